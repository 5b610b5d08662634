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
from ..rewrite.capture import Captured, record
from ..rewrite.graphcode import CallCode
from ..rewrite.rewritten import fitting
from .code import Forward, followed, forward_of
from .fixed import FixedGroups, GraphStep

if TYPE_CHECKING:
    from ..decision import Decision

_BOUND = 4  # models that one decision is bound to at a time: the user's and copies of it
_STEPS = 2  # steps in which the graph is followed, at most, before code is written for what is known by then
_KIND = attrgetter("requires_grad", "dtype", "device")
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks

Observer = Callable[[Any, bool], None]


class Graphed:
    """Runs forwards under a decision.

    Args:
        decision: what to drop.
        captured: the graph; captured at the first use where it is None (a plan from a file, or unpickled).

    Attributes:
        directions: what to do at each operation.
    """

    def __init__(self, decision: Decision, captured: Captured | None = None) -> None:
        self.decision, self.captured = decision, captured
        self.directions = direct(decision.profile, decision.schedule)
        self._bound: dict[int, tuple[Any, _Bound]] = {}

    def prepare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Capture what is not captured yet, from this call."""
        if self.captured is None:
            with torch.enable_grad():
                captured = record(model, args, kwargs)
            self.captured = fitting(captured, self.decision.profile, self.decision.mechanism)

    def forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """One forward on a model that is not met again; its own where a guard fails, as in training."""
        self.prepare(model, args, kwargs)
        assert self.captured is not None
        try:
            return _Bound(self.captured, model, self.directions).follow(args, kwargs, None, trusting=True)
        except GuardError:
            return model(*args, **kwargs)

    def run(self, model: nn.Module, args: Any, kwargs: Any, observer: Observer | None = None) -> Any:
        """One forward on the model in training.

        Raises:
            GuardError: the model would take another path.
        """
        known = self._bound.get(id(model.__dict__))
        if known is None or known[0] is not model.__dict__:
            return self.bound_to(model, args, kwargs).run(args, kwargs, observer)
        return known[1].run(args, kwargs, observer)

    def tensors_of(self, model: nn.Module, args: Any, kwargs: Any) -> list[torch.Tensor] | None:
        """The tensors of a call for which code is written and all guards hold; None for any other."""
        known = self._bound.get(id(model.__dict__))
        return known[1].tensors_of(args, kwargs) if known is not None and known[0] is model.__dict__ else None

    def run_on(self, model: nn.Module, tensors: list[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """One forward on what `tensors_of` returned.

        Raises:
            GuardError: a value that forward reads is another one.
        """
        return self._bound[id(model.__dict__)][1].run_on(tensors, args, kwargs)

    def bound_to(self, model: nn.Module, args: Any, kwargs: Any) -> _Bound:
        """Bind to the model as it is now: what of its Python state changes from now on is noticed."""
        self.prepare(model, args, kwargs)
        assert self.captured is not None
        while len(self._bound) >= _BOUND:
            self._bound.pop(next(iter(self._bound)))
        made = _Bound(self.captured, model, self.directions)
        self._bound[id(model.__dict__)] = (model.__dict__, made)
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {"decision": self.decision}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(state["decision"])  # type: ignore[misc]


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
