"""What passes by when a model runs: naming torch calls, finding tensors in them, telling storages apart."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

_NAMES: dict[Any, str] = {}
_PREFIXES = {"_VariableFunctionsClass.": "torch.", "TensorBase.": "Tensor."}


def call_name(function: Callable[..., Any]) -> str:
    """A name for a torch function that is the same in every process, e.g. "torch.nn.functional.linear"."""
    try:
        name = _NAMES.get(function)
    except TypeError:  # not hashable
        return _make_name(function)
    if name is None:
        name = _NAMES[function] = _make_name(function)
    return name


def _make_name(function: Callable[..., Any]) -> str:
    descriptor = getattr(function, "__self__", None)
    if type(function).__name__ == "method-wrapper" and descriptor is not None:  # a property: x.T, x.shape
        return f"Tensor.{descriptor.__name__}.{function.__name__}"
    if isinstance(function, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
        return f"torch.ops.{function}"
    name = getattr(function, "__qualname__", None) or getattr(function, "__name__", None) or type(function).__name__
    if "<locals>" in name:  # F.max_pool2d and its like are made by a function; their own names say more
        name = getattr(function, "__name__", name)
    for prefix, public in _PREFIXES.items():
        if name.startswith(prefix):
            return public + name.removeprefix(prefix)
    module = getattr(function, "__module__", None)
    return f"{module}.{name}" if module and module != "builtins" else name


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """The tensors in arguments or a result: bare, or in tuples, lists and dicts of any depth."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            if isinstance(item, torch.Tensor):
                yield item
            elif isinstance(item, (tuple, list, dict)):
                yield from tensors_in(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from tensors_in(item)


def is_operation(result: Any) -> bool:
    """Whether a call made or changed tensors; a call that returns a number, a shape or a flag only reads."""
    if result is None or isinstance(result, torch.Tensor):
        return True
    if isinstance(result, (tuple, list, dict)):
        return next(tensors_in(result), None) is not None
    return False


def storage_key(tensor: torch.Tensor) -> int | None:
    """Names the storage of a tensor as long as a `storage_ref` to it is held; None if it has no plain storage."""
    if type(tensor) not in _PLAIN or tensor.layout is not torch.strided:
        return None
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # functorch wrappers and the like
        return None


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Keeps the name of a tensor's storage from being given to another, without keeping its bytes."""
    return StorageWeakRef(tensor.untyped_storage())


_PLAIN = (
    (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if hasattr(torch.nn, "Buffer")
    else (torch.Tensor, torch.nn.Parameter)
)


def plain_layout(tensor: torch.Tensor) -> bool:
    """Whether size, stride and offset say everything about how the tensor looks into its storage."""
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's storage was written in place; -1 where that is not counted."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors
        return -1
