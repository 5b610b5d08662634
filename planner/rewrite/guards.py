"""What a captured graph takes for granted about values, and the check of it at each run."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ..errors import GuardError
from .structure import equal

# What a read may give so that two runs can be compared by it.
COMPARABLE = (
    bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format,
)  # fmt: skip
# Reads that differ from run to run without anything hanging on it.
INCIDENTAL = frozenset(
    {"data_ptr", "_version", "__repr__", "__str__", "__format__", "__hash__", "untyped_storage", "storage", "grad_fn",
     "_base", "_cdata", "__deepcopy__", "__reduce_ex__", "storage_type"}
)  # fmt: skip
# Reads that do not look at a tensor's values.
SHAPES = frozenset(
    {"shape", "size", "dim", "ndim", "ndimension", "numel", "nelement", "stride", "storage_offset", "__len__", "dtype",
     "device", "layout", "is_contiguous", "is_floating_point", "is_complex", "is_signed", "requires_grad",
     "is_cuda", "is_cpu", "is_meta", "is_sparse", "is_quantized", "itemsize", "element_size", "nbytes", "get_device",
     "type", "is_tensor", "is_conj", "is_neg", "is_inference", "is_mps", "is_xpu", "names", "retains_grad", "grad"}
)  # fmt: skip


class Guard:
    """One value that forward read from a tensor, and on which the captured path hangs.

    Attributes:
        name: what was called, e.g. "Tensor.item".
        expected: what it gave.
        module: path of the module that read it.
        place: "file.py:12".
        shape: whether only the tensor's shape or type was read, not its values.
    """

    __slots__ = ("expected", "function", "module", "name", "place", "shape")

    def __init__(
        self, name: str, function: Callable[..., Any], expected: Any, module: str, place: str, shape: bool
    ) -> None:
        self.name, self.function, self.expected = name, function, expected
        self.module, self.place, self.shape = module, place, shape

    def __deepcopy__(self, memo: Any) -> Guard:
        return self

    def __repr__(self) -> str:
        return f"<{self.name} gave {shortened(self.expected)} at {self.place} in '{self.module}'>"


def check(guard: Guard, *args: Any, **kwargs: Any) -> None:
    """Read the value again.

    Raises:
        GuardError: it is another one than when the graph was captured.
    """
    found = guard.function(*args, **kwargs)
    if not equal(found, guard.expected):
        raise GuardError(
            f"{guard.name} gave {shortened(found)} at {guard.place} in module '{guard.module}', and "
            f"{shortened(guard.expected)} when the graph was captured: this call takes another path",
            guard=guard,
        )


def comparable(value: Any) -> bool:
    """Whether two runs can be compared by this value."""
    if isinstance(value, (tuple, list)):
        return all(map(comparable, value))
    return isinstance(value, COMPARABLE) or hasattr(value, "__array__")


def shortened(value: Any) -> str:
    """The value for a message."""
    text = repr(value)
    return text if len(text) <= 60 else text[:57] + "..."
