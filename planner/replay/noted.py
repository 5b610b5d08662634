"""A torch call as it was noted: with stand-ins for its tensors, and what it depends on besides them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .ambient import autocast_state, choices
from .calls import is_leaf, version_of

if TYPE_CHECKING:
    from .handles import Handle

COPIED = -2  # in place of a version


class Source:
    """A tensor argument that is kept: from outside the group, or a parameter."""

    __slots__ = ("copied", "needs_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, copied: bool) -> None:
        self.needs_grad = tensor.requires_grad
        self.copied = copied
        if copied:
            self.tensor = tensor.detach().clone()
        else:
            self.tensor = held(tensor)
        self.version = version_of(self.tensor)

    def copy(self) -> None:
        """Keep a copy, because the tensor is about to be written into; if it was already, the replay has to say so."""
        if version_of(self.tensor) == self.version:
            self.tensor, self.copied = self.tensor.detach().clone(), True


def held(tensor: torch.Tensor) -> torch.Tensor:
    """What a group may hold of a tensor: detached, or it would hold the graph that holds the group."""
    return tensor if is_leaf(tensor) else tensor.detach()


class Ref:
    """A tensor argument that the group makes again: result number `output` of the group's call number `call`."""

    __slots__ = ("call", "needs_grad", "output")

    def __init__(self, call: int, output: int, needs_grad: bool) -> None:
        self.call, self.output, self.needs_grad = call, output, needs_grad


class Borrowed:
    """A tensor argument that another group makes again: an inner boundary, of which `handle` says where it is.

    `expected`: that group waits for it to be asked for.
    """

    __slots__ = ("expected", "handle", "needs_grad")

    def __init__(self, handle: Handle, needs_grad: bool, expected: bool) -> None:
        self.handle, self.needs_grad, self.expected = handle, needs_grad, expected


class Call:
    """One torch call as it was made, with `Source`, `Ref` and `Borrowed` in place of tensors."""

    __slots__ = (
        "args", "autocast", "captured", "choices", "function", "grad", "graded", "kwargs", "states", "writes",
    )  # fmt: skip

    def __init__(self, function: Callable[..., Any], args: Any, kwargs: Any) -> None:
        self.function, self.args, self.kwargs = function, args, kwargs
        self.captured: tuple[int, ...] = ()
        self.graded = self.writes = False
        self.grad = torch.is_grad_enabled()
        self.autocast, self.choices = autocast_state(), choices()
        self.states: tuple[torch.Tensor, ...] | None = None

    @property
    def wants_grad(self) -> bool:
        """Whether its replay has to record gradients."""
        return (self.graded or bool(self.captured)) and self.grad


GONE = Call(torch.clone, (), {})  # in place of a call that was withdrawn
