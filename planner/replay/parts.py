"""The arguments of a call that is made in every step, and code that is made for it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch

from .noted import COPIED, Source

_ATOMS = frozenset(
    {int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class Taken:
    """Stands for an argument that is a tensor from outside the group; `copied` where the plan says to copy it."""

    __slots__ = ("copied", "kind", "needs_grad")

    def __init__(self, kind: type, needs_grad: bool, copied: bool) -> None:
        self.kind, self.needs_grad, self.copied = kind, needs_grad, copied

    def source(self, tensor: torch.Tensor, version: int) -> Source:
        """The tensor as it would have been noted in full."""
        made = Source.__new__(Source)
        made.tensor, made.version, made.copied, made.needs_grad = tensor, version, version == COPIED, self.needs_grad
        return made


class Several:
    """Stands for a list or tuple with tensors in it."""

    __slots__ = ("kind", "parts")

    def __init__(self, kind: type, parts: list[Any]) -> None:
        self.kind, self.parts = kind, parts


def leaves(parts: list[Any]) -> Iterator[Any]:
    """The parts of a call with what is in lists and tuples in their place."""
    for part in parts:
        if type(part) is Several:
            yield from leaves(part.parts)
        else:
            yield part


def fixed(value: Any) -> bool:
    """Whether an option is one that `same` can compare, and that nobody can change."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is slice:
        return all(map(fixed, (value.start, value.stop, value.step)))
    return (kind is tuple or kind is list or kind is torch.Size) and all(map(fixed, value))


def same(value: Any, want: Any) -> bool:
    """Whether two options are equal, and of equal types."""
    kind = type(value)
    if kind is not type(want):
        return False
    if kind is tuple or kind is list or kind is torch.Size:
        return len(value) == len(want) and all(map(same, value, want))
    if kind is slice:
        return all(map(same, (value.start, value.stop, value.step), (want.start, want.stop, want.step)))
    if kind is float and not value:
        return not want and math.copysign(1.0, value) == math.copysign(1.0, want)  # the two zeros are equal
    return bool(value == want)


def compiled(name: str, parameters: str, lines: list[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """A function of these lines, which sees `scope`."""
    body = "\n".join(f"    {line}" for line in lines)
    exec(compile(f"def {name}({parameters}):\n{body}\n", f"<ckpt_planner {name}>", "exec"), scope)
    found: Callable[..., Any] = scope[name]
    return found
