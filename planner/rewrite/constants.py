"""What the `get_attr` nodes of a captured graph name."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from .graphcode import CapturedModule
from .state import State, resolve


class Constants:
    """Names for the tensors and objects that a graph holds.

    Args:
        model: the one that is captured.
        state: its Python state; a tensor that an attribute holds is found again by its path.

    Attributes:
        values: objects by name, those that are not found on the model.
        paths: how tensors in attributes are found on a model, by name.
        buffers: the model's buffers, by name.
    """

    def __init__(self, model: nn.Module, state: State) -> None:
        self._state = state
        self.buffers = dict(model.named_buffers(remove_duplicate=False))
        self._members: dict[int, str] = {}
        for name, tensor in (*model.named_parameters(remove_duplicate=False), *self.buffers.items()):
            self._members.setdefault(id(tensor), name)
        self.values: dict[str, Any] = {}
        self.paths: dict[str, tuple[Any, ...]] = {}
        self._unplaced: list[torch.Tensor] = []

    def add(self, value: Any, kind: str = "constant") -> str:
        """A name for an object that the graph holds as it is."""
        name = f"_{kind}_{len(self.values) + len(self.paths)}"
        self.values[name] = value
        return name

    def tensor(self, tensor: torch.Tensor) -> str | None:
        """A name for a tensor that no call of forward made; None if it cannot have existed before."""
        member = self._members.get(id(tensor))
        if member is not None and not hasattr(CapturedModule, member.partition(".")[0]):
            return member
        path = tuple(("attribute", part) for part in member.split(".")) if member else self._state.paths.get(id(tensor))
        if path:
            name = f"_attribute_{len(self.values) + len(self.paths)}"
            self.paths[name] = path
            return name
        if not tensor.is_leaf:
            return None
        if path is None:
            self._unplaced.append(tensor)
        return self.add(tensor)

    @property
    def elsewhere(self) -> list[torch.Tensor]:
        """Tensors that are neither the model's nor in anything that was watched."""
        return [t for t in self._unplaced if id(t) not in self._state.paths]

    def found_on(self, model: nn.Module, names: Iterable[str]) -> dict[str, Any]:
        """What the names stand for on a model."""
        found = {}
        for name in names:
            if name in self.values:
                found[name] = self.values[name]
            elif name in self.paths:
                found[name] = resolve(model, self.paths[name])
            else:
                found[name] = resolve(model, tuple(("attribute", part) for part in name.split(".")))
        return found
