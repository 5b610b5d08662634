"""What passes by when a model runs: naming torch calls, finding tensors in them, telling storages apart."""

from __future__ import annotations

import enum
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.multiprocessing.reductions import StorageWeakRef

_NAMES: dict[Any, str] = {}
_storage_id: Callable[[torch.Tensor], int] = torch._C._storage_id  # type: ignore[attr-defined]
_free_weak_ref: Callable[[int], None] = torch.UntypedStorage._free_weak_ref
_PREFIXES = {"_VariableFunctionsClass.": "torch.", "TensorBase.": "Tensor."}


def call_name(function: Callable[..., Any]) -> str:
    """A name for a torch function that is the same in every process, e.g. "torch.nn.functional.linear"."""
    try:
        name = _NAMES.get(function)
    except TypeError:  # not hashable
        return _make_name(function)
    if name is None:
        name = _make_name(function)
        if lasting(function):
            _NAMES[function] = name
    return name


def lasting(function: Callable[..., Any]) -> bool:
    """Whether a function is one for good, and not made anew again and again with all that it closes over."""
    if "<locals>" not in getattr(function, "__qualname__", "<locals>"):
        return True
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    return module is not None and getattr(module, getattr(function, "__name__", ""), None) is function


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
    """Names the storage of a tensor as long as a `storage_ref` to it is held; None if it has none that can be told.

    Of a sparse tensor it is the values' storage, of one that is made up of others the largest's.
    """
    if _STORED.get(type(tensor)) or _has_storage(type(tensor)):
        try:
            return _storage_id(tensor)  # the same as `untyped_storage()._cdata`
        except (RuntimeError, NotImplementedError):
            pass
    inner = _inner(tensor)
    return storage_key(inner) if inner is not tensor else None


def storage_ref(tensor: torch.Tensor) -> StorageWeakRef:
    """Keeps the name of a tensor's storage from being given to another, without keeping its bytes."""
    return StorageWeakRef(storage_of(tensor))


class StorageNames(list[int]):
    """Keeps the names of many storages from being given to others, as `storage_ref` does for one."""

    def hold(self, tensor: torch.Tensor) -> int | None:
        """The name of a tensor's storage, which stays its own from now on; None if it has none that can be told."""
        try:
            storage = tensor.untyped_storage() if _STORED.get(type(tensor)) else storage_of(tensor)
        except (RuntimeError, NotImplementedError):
            if storage_key(tensor) is None:
                return None
            storage = storage_of(tensor)
        name: int = storage._weak_ref()  # type: ignore[assignment]
        self.append(name)
        return name

    def release(self) -> None:
        """Let the names go."""
        while self:
            _free_weak_ref(self.pop())

    def __del__(self) -> None:
        self.release()


def storage_of(tensor: torch.Tensor) -> torch.UntypedStorage:
    """The storage that `storage_key` names."""
    if _has_storage(type(tensor)):
        try:
            return tensor.untyped_storage()
        except (RuntimeError, NotImplementedError):
            pass
    inner = _inner(tensor)
    return tensor.untyped_storage() if inner is tensor else storage_of(inner)


def bytes_of(tensor: torch.Tensor) -> int:
    """Bytes of a tensor's storage; of a sparse tensor with its indices."""
    if storage_key(tensor) is None:
        return tensor.numel() * tensor.itemsize
    size = storage_of(tensor).nbytes()
    with torch._C.DisableTorchFunction():
        if tensor.layout is torch.sparse_coo:
            size += tensor._indices().nbytes
        elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            size += tensor.crow_indices().nbytes + tensor.col_indices().nbytes
        elif tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            size += tensor.ccol_indices().nbytes + tensor.row_indices().nbytes
    return size


def _inner(tensor: torch.Tensor) -> torch.Tensor:
    """What vmap or torch.func has wrapped, a sparse tensor's values, a nested one's; others as they are."""
    if not _has_storage(type(tensor)):
        parts = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else ()
        found = [part for name in parts if isinstance(part := getattr(tensor, name), torch.Tensor)]
        return max(found, key=lambda t: t.numel() * t.itemsize, default=tensor)
    if torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        return torch._C._functorch.get_unwrapped(tensor)
    if tensor.layout is torch.strided:
        return tensor
    with torch._C.DisableTorchFunction(), torch.no_grad():
        if tensor.layout is torch.sparse_coo:
            return tensor._values()
        return tensor.values() if tensor.layout in _COMPRESSED else tensor


def transforming() -> bool:
    """Whether vmap or a transformation of torch.func is at work."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def is_plain(tensor: torch.Tensor) -> bool:
    """Whether a tensor is nothing but numbers in a storage: not of a class of its own, which may know more."""
    return type(tensor) in _PLAIN and tensor.layout is torch.strided


def _has_storage(kind: type) -> bool:
    found = _STORED.get(kind)
    if found is None:  # classes that dispatch by themselves stand for other tensors
        found = _STORED[kind] = kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__  # type: ignore[attr-defined]
    return found


_PLAIN = (
    (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)
    if hasattr(torch.nn, "Buffer")
    else (torch.Tensor, torch.nn.Parameter)
)
_COMPRESSED = (torch.sparse_csr, torch.sparse_csc, torch.sparse_bsr, torch.sparse_bsc)
_STORED: dict[type, bool] = dict.fromkeys(_PLAIN, True)


def plain_layout(tensor: torch.Tensor) -> bool:
    """Whether size, stride and offset say everything about how the tensor looks into its storage."""
    return tensor.layout is torch.strided and not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)


def is_leaf(tensor: torch.Tensor) -> bool:
    """Whether autograd has no node for a tensor; for a view that requires a gradient, perhaps False all the same.

    The node of a view whose base was written into is made when it is asked for, and then counts as a later one, or
    cannot be made at all. So a view is not asked.
    """
    return not tensor.requires_grad or (not tensor._is_view() and tensor.is_leaf)


def mutable(value: Any) -> str:
    """The type of an option that is neither a tensor nor immutable, or of one inside it; "" if there is none.

    An array, a function, a generator: what it holds may be another in backward.
    """
    if isinstance(value, (tuple, list)):
        return next(filter(None, map(mutable, value)), "")
    if isinstance(value, dict):
        return next(filter(None, map(mutable, value.values())), "")
    if isinstance(value, slice):
        return mutable((value.start, value.stop, value.step))
    return "" if value is None or isinstance(value, _IMMUTABLE) else type(value).__name__


_IMMUTABLE = (
    torch.Tensor, int, float, complex, str, bytes, enum.Enum, range, type, type(...), torch.dtype, torch.device,
    torch.layout, torch.memory_format, np.generic, torch.SymInt, torch.SymFloat, torch.SymBool, torch._C.DispatchKey,
)  # fmt: skip


def version_of(tensor: torch.Tensor) -> int:
    """How often the tensor's storage was written in place; -1 where that is not counted."""
    try:
        return tensor._version
    except RuntimeError:  # inference tensors
        return -1
