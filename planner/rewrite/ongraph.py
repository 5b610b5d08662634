"""What runs a captured graph under a decision, bound to whichever model it is run for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch
from torch import nn

from ..errors import GuardError, UnsupportedModelError
from ..profile import Profile
from .capture import Captured, record

if TYPE_CHECKING:
    from ..decision import Decision

_BOUND = 4  # models that one decision is bound to at a time: the user's and copies of it

D = TypeVar("D", bound="Decision")
B = TypeVar("B")


class OnGraph(Generic[D, B]):
    """A decision, the graph that it is carried out on, and the models that the graph is bound to.

    Args:
        decision: what to do.
        captured: the graph; captured at the first use where it is None (a plan from a file, or unpickled).
    """

    def __init__(self, decision: D, captured: Captured | None = None) -> None:
        self.decision, self.captured = decision, captured
        self._bound: dict[int, tuple[Any, B]] = {}

    def prepare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Capture what is not captured yet, from this call."""
        if self.captured is None:
            with torch.enable_grad():
                captured = record(model, args, kwargs)
            self.captured = fitting(captured, self.decision.profile, self.decision.mechanism)

    def known(self, model: nn.Module) -> B | None:
        """The graph as it was bound to the model; None if it was not yet."""
        found = self._bound.get(id(model.__dict__))
        return found[1] if found is not None and found[0] is model.__dict__ else None

    def bound_to(self, model: nn.Module, args: Any, kwargs: Any) -> B:
        """Bind to the model as it is now: what of its Python state changes from now on is noticed."""
        self.prepare(model, args, kwargs)
        while len(self._bound) >= _BOUND:
            self._bound.pop(next(iter(self._bound)))
        made = self._bind(model)
        self._bound[id(model.__dict__)] = (model.__dict__, made)
        return made

    def _bind(self, model: nn.Module) -> B:
        raise NotImplementedError

    def __getstate__(self) -> dict[str, Any]:
        return {"decision": self.decision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["decision"])  # type: ignore[misc]


def fitting(captured: Captured, profile: Profile, mechanism: str) -> Captured:
    """The captured graph, if it can stand for the forward that was profiled; `mechanism` is named in errors.

    Raises:
        UnsupportedModelError: forward does what a graph cannot repeat; the message names it.
        GuardError: it is of another path.
    """
    if captured.limits:
        raise UnsupportedModelError(
            f'mechanism "{mechanism}" runs a captured graph of {profile.model}, which cannot repeat what its '
            f'forward does: {"; ".join(captured.limits)}. Use mechanism="slice", which follows the forward itself.'
        )
    found = [(n.meta["name"], n.meta["ops"]) for n in captured.graph.nodes if n.meta.get("ops")]
    inside = [op.name for op in profile.ops if op.inside]
    position = 0
    for name, count in found:
        own = name.endswith(".apply")  # a custom function: its operations, under their own names
        if not own and (position >= len(inside) or inside[position] != name):
            break
        position += count
    if position != len(inside):
        raise GuardError(
            f"{profile.model} takes another path than when it was profiled (operation {position}); its forward depends "
            'on something that changes from call to call. Use mechanism="slice".'
        )
    return captured
