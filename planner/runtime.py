"""Plans for calls as they come, and carries them out: what stands behind `plan.model`."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .budget import Bytes, Free, Share, format_bytes, parse_budget
from .decision import Decision, infeasible
from .errors import CaptureError, GuardError, InfeasibleBudgetError, UnsupportedModelError
from .mechanism import Mechanism, Slice, mechanism
from .profile import Profile
from .profiling.measure import device_of, measure_profile, resident
from .profiling.meter import free_bytes
from .profiling.rehearse import Way, rehearse
from .profiling.signature import input_signature
from .regional import RegionDecision
from .replay.directions import Directions, direct
from .replay.follow import Follower
from .replay.group import generator_states
from .rewrite.rewritten import Rewritten
from .solve import Solution, SolveStatus

log = logging.getLogger("ckpt_planner")

CACHE = 8  # decisions kept, one for each kind of call
REPLANS = 3  # how often a kind of call is planned again because steps left the plan
CLEARLY = 0.98  # a plain step predicted to take less than this share of the budget needs no rehearsal
RESERVE = 0.05  # share of the device's free memory that budget=None leaves alone

Key = tuple[Any, ...]

# Set while a step is followed or measured in this thread: planned modules inside it run as they are.
_ACTIVE = threading.local()


class Planned:
    """A decision for one kind of call, ready to be carried out."""

    def __init__(self, decision: Decision, rewritten: Rewritten | None = None) -> None:
        self.decision = decision
        if rewritten is None and isinstance(decision, RegionDecision) and decision.regions:
            rewritten = Rewritten(decision)  # captured at its first use
        self.rewritten = rewritten
        self.directions: Directions | None = None
        if decision.schedule.groups:
            self.directions = direct(decision.profile, decision.schedule)
        self.misses = 0
        self.way: Way = self.rewritten or self.directions
        self.states: tuple[torch.Tensor, ...] | None = None  # the random generators', when the call was planned


class Runtime:
    """Holds what was asked for, and a bounded cache of what was decided.

    Args:
        budget: as `optimize` takes it.
        strategy, loss_fn, optimizer, mechanism: likewise.
        progress: told the name of each stage of planning.
    """

    def __init__(
        self,
        budget: str | int | None,
        strategy: str = "budget",
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        progress: Callable[[str], None] | None = None,
        mechanism: str = "slice",
    ) -> None:
        self.budget, self.strategy, self.loss_fn, self.optimizer = budget, strategy, loss_fn, optimizer
        self.mechanism = mechanism
        self.progress = progress or (lambda stage: None)
        self.cache: OrderedDict[Key, Planned] = OrderedDict()
        self.first: Planned | None = None
        self._replans: dict[Key, int] = {}
        parse_budget(budget)

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """Measure, decide, check by a real step, and remember.

        Raises:
            InfeasibleBudgetError: the budget cannot be kept.
            CaptureError, UnsupportedModelError: the step cannot be measured.
        """
        profile = measure_profile(
            model, args, kwargs, loss_fn=self.loss_fn, optimizer=self.optimizer, progress=self.progress
        )
        budget = self.budget_bytes(profile, model, args, kwargs)
        self.progress("deciding")
        how = self._mechanism(profile, model, args, kwargs)
        planned = self._checked(how, profile, budget, model, args, kwargs)
        planned.states = generator_states()
        if planned.rewritten is not None:
            planned.rewritten.bound_to(model, args, kwargs)
        self.remember(self.key(model, args, kwargs), planned)
        return planned

    def remember(self, key: Key, planned: Planned) -> None:
        """Keep a decision for calls of this kind."""
        self.cache[key] = planned
        self.cache.move_to_end(key)
        while len(self.cache) > CACHE:
            self.cache.popitem(last=False)
        self.first = self.first or planned

    def adopt(self, model: nn.Module) -> None:
        """Take the first decision for calls of its kind on `model`, in the mode that the model is in now."""
        assert self.first is not None
        for direction in self.first.directions.ops if self.first.directions is not None else ():
            direction.known.add((self.first,))  # no call is: the model may draw where it did not when it was profiled
        modes = tuple(m.training for m in model.modules())
        frozen = tuple(p.requires_grad for p in model.parameters())
        self.cache[self.first.decision.profile.input_signature, modes, frozen] = self.first

    def budget_bytes(self, profile: Profile, model: nn.Module, args: Any, kwargs: Any) -> int:
        """The budget in bytes of peak, for this step."""
        budget = parse_budget(self.budget)
        if isinstance(budget, Bytes):
            return budget.bytes
        if isinstance(budget, Share):
            return budget.of(Decision(profile, _nothing(), 0, "none").plain.peak_bytes)
        assert isinstance(budget, Free)
        device = device_of(model, (args, kwargs))
        here = sum(resident(model, args, kwargs, device).values())
        return here + int(free_bytes(device) * (1 - RESERVE))

    def _mechanism(self, profile: Profile, model: nn.Module, args: Any, kwargs: Any) -> Mechanism:
        try:
            return mechanism(self.mechanism, profile, model, args, kwargs)
        except (UnsupportedModelError, CaptureError, GuardError) as error:
            if self.first is None:
                raise
            log.warning('%s This kind of call is planned for mechanism "slice".', error)
            return Slice()

    def _checked(
        self, how: Mechanism, profile: Profile, budget: int, model: nn.Module, args: Any, kwargs: Any
    ) -> Planned:
        """Decide; then take one step under the decision, and decide more tightly if it took more than predicted."""
        target = budget
        for _ in range(4):
            try:
                decision = how.decide(profile, budget, self.strategy, target)
                planned = Planned(decision, how.rewritten(decision))
            except InfeasibleBudgetError:
                break
            if planned.way is None and planned.decision.timeline.peak_bytes <= CLEARLY * budget:
                return planned
            self.progress("rehearsing")
            excess = self._rehearsed(planned, model, args, kwargs) - budget
            if excess <= 0:
                return planned
            target -= excess
        return self._smallest(how, profile, budget, model, args, kwargs)

    def _smallest(
        self, how: Mechanism, profile: Profile, budget: int, model: nn.Module, args: Any, kwargs: Any
    ) -> Planned:
        """The plan with the smallest peak, if that keeps the budget; else the error that says what would."""
        decision = how.smallest(profile, budget, self.strategy)
        planned = Planned(decision, how.rewritten(decision))
        predicted = planned.decision.timeline.peak_bytes
        real = self._rehearsed(planned, model, args, kwargs)
        if self.strategy == "budget" and max(real, predicted) <= budget:
            return planned
        # Another profile of the same step can differ by a few small tensors; what is named has to hold for it, too.
        smallest = max(real, predicted)
        named = smallest + (max(4096, smallest // 200) if planned.way is not None else 0)
        raise infeasible(planned.decision, named)

    def _rehearsed(self, planned: Planned, model: nn.Module, args: Any, kwargs: Any) -> int:
        """The peak of a real step under a plan, bytes; more than there is where it ran out of memory."""
        state = planned.decision.profile.optimizer_state_bytes
        try:
            return rehearse(model, args, kwargs, self.loss_fn, planned.way, state_bytes=state).peak_bytes
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return planned.decision.budget_bytes * 21 // 20 + 1

    # -- running ----------------------------------------------------------------------------------------------------

    @staticmethod
    def key(model: nn.Module, args: Any, kwargs: Any) -> Key:
        """What has to be equal for a decision to be the right one: the call's kind, modes, and what is frozen."""
        return (
            input_signature(args, kwargs),
            tuple(m.training for m in model.modules()),
            tuple(p.requires_grad for p in model.parameters()),
        )

    def call(self, model: nn.Module, plainly: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `plan.model`: follow the plan for it, making one first if there is none."""
        if not (model.training and torch.is_grad_enabled()) or getattr(_ACTIVE, "busy", False):
            return plainly(*args, **kwargs)
        key = self.key(model, args, kwargs)
        planned = self.cache.get(key)
        if planned is None:
            planned = self._plan_within(model, args, kwargs, key)
        else:
            self.cache.move_to_end(key)
        if planned.rewritten is not None:
            return self._run(planned, planned.rewritten, model, plainly, args, kwargs, key)
        if planned.directions is None:
            return plainly(*args, **kwargs)
        follower = Follower(planned.directions)
        _ACTIVE.busy = True
        try:
            with follower:
                result = plainly(*args, **kwargs)
        finally:
            _ACTIVE.busy = False
            follower.finish()
        self._look_back(follower, planned, key)
        return result

    def _run(
        self, planned: Planned, rewritten: Rewritten, model: nn.Module, plainly: Any, args: Any, kwargs: Any, key: Key
    ) -> Any:
        """One call by the rewritten forward; by the model's own where a guard fails, and then it is planned anew."""
        _ACTIVE.busy = True
        try:
            try:
                result = rewritten.run(model, args, kwargs)
            except GuardError as error:
                missed = error
            else:
                planned.misses = 0
                return result
            planned.misses += 1
            if planned.misses == 1:
                log.warning(
                    "a step of %s ran its own forward, which keeps everything: %s",
                    planned.decision.profile.model,
                    missed,
                )
            self._replan(planned, key, 2 if missed.guard is not None else 1)
            return plainly(*args, **kwargs)
        finally:
            _ACTIVE.busy = False

    def _replan(self, planned: Planned, key: Key, after: int) -> None:
        """Have a kind of call planned again whose steps left the plan `after` times in a row."""
        if planned.misses >= after and self._replans.get(key, 0) < REPLANS:
            self._replans[key] = self._replans.get(key, 0) + 1
            self.cache.pop(key, None)

    def _plan_within(self, model: nn.Module, args: Any, kwargs: Any, key: Key) -> Planned:
        _ACTIVE.busy = True
        try:
            planned = self.plan(model, args, kwargs)
        finally:
            _ACTIVE.busy = False
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                torch.clear_autocast_cache()  # it holds the stand-in's weights
        decision = planned.decision
        log.info(
            "planned %s for %s: %s within a budget of %s",
            decision.profile.model,
            key[0],
            format_bytes(decision.timeline.peak_bytes),
            format_bytes(decision.budget_bytes),
        )
        return planned

    def _look_back(self, follower: Follower, planned: Planned, key: Key) -> None:
        """A step that left the plan was right, but kept more: say so once, and plan again if it goes on."""
        assert planned.directions is not None
        if follower.diverged is None and follower.position == len(planned.directions.ops):
            planned.misses = 0
            return
        planned.misses += 1
        if planned.misses == 1:
            position, expected, found = follower.diverged or (
                follower.position,
                "another operation",
                "the end of forward",
            )
            log.warning(
                "a step of %s took another path than planned (operation %d: %s instead of %s); from there on "
                "everything was kept, so it may have taken more memory than the budget",
                planned.decision.profile.model,
                position,
                found,
                expected,
            )
        self._replan(planned, key, 2)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k != "progress"}
        if isinstance(self.optimizer, torch.optim.Optimizer):  # belongs to the original's parameters
            state["optimizer"] = type(self.optimizer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.progress = lambda stage: None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        made = Runtime.__new__(Runtime)
        made.__setstate__({**self.__getstate__(), "cache": OrderedDict(self.cache), "_replans": dict(self._replans)})
        return made


def _nothing() -> Solution:
    return Solution((), SolveStatus.NOTHING_TO_DO, 0.0, 0)
