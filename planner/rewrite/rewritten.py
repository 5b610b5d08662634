"""A forward whose regions are checkpointed, bound to whichever model it is run for."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..errors import GuardError, UnsupportedModelError
from ..profile import Profile
from ..regional import RegionDecision
from .bind import bind
from .capture import Captured, record
from .graphcode import CapturedModule
from .partition import partition

_BOUND = 4  # models that one decision is bound to at a time: the user's and copies of it


class Rewritten:
    """Runs forwards under a decision.

    Args:
        decision: what to checkpoint.
        captured: the graph; captured at the first use where it is None (a plan from a file, or unpickled).
    """

    def __init__(self, decision: RegionDecision, captured: Captured | None = None) -> None:
        self.decision, self.captured = decision, captured
        self._split: Any = None
        self._bound: dict[int, tuple[Any, CapturedModule]] = {}

    def prepare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Capture what is not captured yet, from this call."""
        if self.captured is None:
            with torch.enable_grad():
                captured = record(model, args, kwargs)
            self.captured = fitting(captured, self.decision.profile, self.decision.mechanism)
        if self._split is None:
            self._split = partition(self.captured.graph, self.decision.regions, self.decision.regional)

    def forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """One forward on a model that is not met again; its own where a guard fails, as in training."""
        self.prepare(model, args, kwargs)
        try:
            return self._bind(model)(*args, **kwargs)
        except GuardError:
            return model(*args, **kwargs)

    def run(self, model: nn.Module, args: Any, kwargs: Any, observer: Any = None) -> Any:
        """One forward on the model in training. There is nothing for an observer: torch tells nobody when it replays.

        Raises:
            GuardError: the model would take another path.
        """
        known = self._bound.get(id(model.__dict__))
        if known is None or known[0] is not model.__dict__:
            return self.bound_to(model, args, kwargs)(*args, **kwargs)
        return known[1](*args, **kwargs)

    def bound_to(self, model: nn.Module, args: Any, kwargs: Any) -> CapturedModule:
        """Bind to the model as it is now: what of its Python state changes from now on is noticed."""
        self.prepare(model, args, kwargs)
        while len(self._bound) >= _BOUND:
            self._bound.pop(next(iter(self._bound)))
        made = self._bind(model)
        self._bound[id(model.__dict__)] = (model.__dict__, made)
        return made

    def _bind(self, model: nn.Module) -> CapturedModule:
        assert self.captured is not None
        return bind(self.captured, model, *self._split)

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
