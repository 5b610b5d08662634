"""A forward whose regions are checkpointed, bound to whichever model it is run for."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import GuardError
from ..regional import RegionDecision
from .bind import bind
from .capture import Captured
from .graphcode import CapturedModule
from .ongraph import OnGraph
from .partition import partition


class Rewritten(OnGraph[RegionDecision, CapturedModule]):
    """Runs forwards with regions in checkpoints; see `OnGraph`."""

    def __init__(self, decision: RegionDecision, captured: Captured | None = None) -> None:
        super().__init__(decision, captured)
        self._split: Any = None

    def prepare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Capture what is not captured yet, from this call, and part it."""
        super().prepare(model, args, kwargs)
        if self._split is None:
            assert self.captured is not None
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
        return (self.known(model) or self.bound_to(model, args, kwargs))(*args, **kwargs)

    def _bind(self, model: nn.Module) -> CapturedModule:
        assert self.captured is not None
        return bind(self.captured, model, *self._split)
