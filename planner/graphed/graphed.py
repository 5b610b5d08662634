"""A captured graph run under a plan, bound to whichever model it is run for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from ..errors import GuardError
from ..replay.ambient import choices
from ..replay.directions import Directions, direct
from ..replay.follow import Follower
from ..rewrite.bind import bind
from ..rewrite.capture import Captured
from ..rewrite.graphcode import CallCode
from ..rewrite.ongraph import OnGraph
from .code import Forward, followed, forward_of
from .fixed import FixedGroups, GraphStep

if TYPE_CHECKING:
    from ..decision import Decision

_STEPS = 2  # steps in which the graph is followed, at most, before code is written for what is known by then
_KIND = attrgetter("requires_grad", "dtype", "device")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

Observer = Callable[[Any, bool], None]


class Graphed(OnGraph["Decision", "_Bound"]):
    """Runs forwards that drop what a decision says; see `OnGraph`.

    Attributes:
        directions: what to do at each operation.
    """

    def __init__(self, decision: Decision, captured: Captured | None = None) -> None:
        super().__init__(decision, captured)
        self.directions = direct(decision.profile, decision.schedule)

    def forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """One forward on a model that is not met again; its own where a guard fails, as in training."""
        self.prepare(model, args, kwargs)
        try:
            return self._bind(model).follow(args, kwargs, None, trusting=True)
        except GuardError:
            return model(*args, **kwargs)

    def run(self, model: nn.Module, args: Any, kwargs: Any, observer: Observer | None = None) -> Any:
        """One forward on the model in training.

        Raises:
            GuardError: the model would take another path.
        """
        return (self.known(model) or self.bound_to(model, args, kwargs)).run(args, kwargs, observer)

    def tensors_of(self, model: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """The tensors of a call for which code is written and all guards hold; None for any other."""
        known = self.known(model)
        return known.tensors_of(args, kwargs) if known is not None else None

    def run_on(self, model: nn.Module, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """One forward on what `tensors_of` returned.

        Raises:
            GuardError: a value that forward reads is another one.
        """
        known = self.known(model)
        assert known is not None
        return known.run_on(tensors, args, kwargs)

    def _bind(self, model: nn.Module) -> _Bound:
        assert self.captured is not None
        return _Bound(self.captured, model, self.directions)


class _Bound:
    """The graph on one model's tensors: followed for a step or two, then run by code that is made for it."""

    def __init__(self, captured: Captured, model: nn.Module, directions: Directions) -> None:
        self._module, self._graph, self._directions = bind(captured, model), captured.graph, directions
        self._code: CallCode = self._module.graph._codegen  # type: ignore[assignment]
        names = dict.fromkeys(str(node.target) for node in self._graph.nodes if node.op == "get_attr")
        self._values = captured.constants.found_on(model, names)
        self._fixed: FixedGroups | None = None
        self._forward: Forward | None = None
        self._parameters = list(model.parameters())
        self._kinds = list(map(_KIND, self._parameters))
        self._followed = 0

    def run(self, args: Any, kwargs: Any, observer: Observer | None) -> Any:
        if _top_hooks(True) is not None:  # somebody else has hooks around the call: what is saved is theirs
            return self._module(*args, **kwargs)
        if self._forward is None and self._ready():
            self._fixed = FixedGroups(self._directions, followed(self._graph, self._directions))
            self._forward = forward_of(self._graph, self._values, self._directions, self._fixed)
        if self._forward is None:
            self._followed += 1
            return self.follow(args, kwargs, observer)
        return self._module.guarded(partial(self._written, observer, None), args, kwargs)

    def tensors_of(self, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        if self._forward is None or _top_hooks(True) is not None or not self._settings_hold():
            return None
        if list(map(_KIND, self._parameters)) != self._kinds:
            return None
        try:
            return self._code.flat(args, kwargs)
        except GuardError:
            return None

    def run_on(self, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        return self._module.guarded(partial(self._written, None, tensors), args, kwargs)

    def _settings_hold(self) -> bool:
        assert self._fixed is not None
        return self._fixed.choices is None or choices() == self._fixed.choices

    def _ready(self) -> bool:
        return self._followed >= _STEPS or all(d.familiar for d in self._directions.ops if d.group >= 0)

    def follow(self, args: Any, kwargs: Any, observer: Observer | None, trusting: bool = False) -> Any:
        """Run the graph as forwards are followed."""
        step = Follower(self._directions, trusting)
        step.observer = observer
        try:
            return self._module.within(step, args, kwargs)
        finally:
            step.finish()

    def _written(self, observer: Observer | None, tensors: list[torch.Tensor] | None, *args: Any, **kwargs: Any) -> Any:
        assert self._fixed is not None and self._forward is not None
        if tensors is None:
            if not self._settings_hold():
                raise GuardError("the default type of numbers or the kernels of attention differ from those planned")
            tensors = self._code.flat(args, kwargs)
        step = GraphStep(self._directions, self._fixed)
        step.observer = observer
        try:
            return self._code.process_outputs(self._forward(step, tensors))
        finally:
            step.finish()
