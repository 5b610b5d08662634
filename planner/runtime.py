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
from .decision import Decision, decide, infeasible
from .errors import InfeasibleBudgetError
from .profile import Profile
from .profiling.forward import device_of, resident
from .profiling.measure import measure_profile
from .profiling.meter import free_bytes
from .profiling.rehearse import rehearse
from .profiling.signature import input_signature
from .profiling.watch import Watch
from .ranks import Ranks, collectives, ranks_of
from .replay.directions import Directions, direct
from .replay.follow import Follower
from .solve import Solution, SolveStatus, minimum
from .together import plan_together

log = logging.getLogger("ckpt_planner")

CACHE = 8  # decisions kept, one for each kind of call
REPLANS = 3  # how often a kind of call is planned again because steps left the plan
CLEARLY = 0.98  # a plain step predicted to take less than this share of the budget needs no rehearsal
RESERVE = 0.05  # share of the device's free memory that budget=None leaves alone

Key = tuple[Any, ...]

Told = Callable[["Planned"], None]

# Set while a step is followed or measured in this thread: planned modules inside it run as they are.
_ACTIVE = threading.local()


class Planned:
    """A decision for one kind of call, ready to be carried out."""

    def __init__(self, decision: Decision) -> None:
        self.decision = decision
        self.directions: Directions | None = None
        if decision.schedule.groups:
            self.directions = direct(decision.profile, decision.schedule)
        self.misses = 0

    def trust_nothing(self) -> None:
        """The model may draw or write where it did not when it was profiled: watch even what is called first."""
        for direction in self.directions.ops if self.directions is not None else ():
            direction.known.add((self,))


class Runtime:
    """Holds what was asked for, and a bounded cache of what was decided.

    Args:
        budget: as `optimize` takes it.
        strategy, loss_fn, optimizer, process_group: likewise.
        progress: told the name of each stage of planning.

    Attributes:
        cache: decisions by kind of call; `first` is the one that was planned first.
        left: decisions for kinds of calls that are to be planned again.
        calls: how many training calls there were.
        collectives: whether measuring a step takes part in collectives, as far as is known.
    """

    def __init__(
        self,
        budget: str | int | None,
        strategy: str = "budget",
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        progress: Callable[[str], None] | None = None,
        process_group: Any = None,
    ) -> None:
        self.budget, self.strategy, self.loss_fn, self.optimizer = budget, strategy, loss_fn, optimizer
        self.progress = progress or (lambda stage: None)
        self.cache: OrderedDict[Key, Planned] = OrderedDict()
        self.first: Planned | None = None
        self.left: dict[Key, Planned] = {}
        self.calls, self.collectives = 0, True
        self.watches: list[Watch] = []  # steps that are being watched; each belongs to a monitor
        self._replans: dict[Key, int] = {}
        self._group = process_group
        self._ranks: Ranks | None = None
        parse_budget(budget)

    # -- planning ---------------------------------------------------------------------------------------------------

    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """Measure, decide, check by a real step, and remember; on several ranks, as the first of them decides.

        Raises:
            InfeasibleBudgetError: the budget cannot be kept.
            CaptureError, UnsupportedModelError: the step cannot be measured.
            PlanMismatchError: the first rank has another model.
        """
        ranks = self._ranks = self._ranks or ranks_of(self._group)
        call = (model, args, kwargs)
        planned = self.plan_alone(*call) if ranks is None else plan_together(self, ranks, *call)
        self.remember(self.key(model, args, kwargs), planned)
        return planned

    def plan_alone(self, model: nn.Module, args: Any, kwargs: Any, told: Told = lambda planned: None) -> Planned:
        """Plan by this rank's own profile. `told` is given each plan of which a step is taken, before that."""
        return self.decide_alone(self.measure(model, args, kwargs), model, args, kwargs, told)

    def measure(self, model: nn.Module, args: Any, kwargs: Any) -> Profile:
        """The profile of one step, and whether it takes part in collectives."""
        before = collectives()
        profile = measure_profile(
            model, args, kwargs, loss_fn=self.loss_fn, optimizer=self.optimizer, progress=self.progress
        )
        self.collectives = collectives() != before
        return profile

    def decide_alone(
        self,
        profile: Profile,
        model: nn.Module,
        args: Any,
        kwargs: Any,
        told: Told = lambda planned: None,
    ) -> Planned:
        """Decide from a profile and check by real steps."""
        budget = self.budget_bytes(profile, model, args, kwargs)
        self.progress("deciding")
        return self._checked(profile, budget, (model, args, kwargs), told)

    def remember(self, key: Key, planned: Planned) -> None:
        """Keep a decision for calls of this kind."""
        self.cache[key] = planned
        self.cache.move_to_end(key)
        while len(self.cache) > CACHE:
            self.cache.popitem(last=False)
        self.first = self.first or planned

    def under(self, budget_bytes: int) -> Runtime:
        """Another one for the same step under this budget, with nothing decided yet."""
        return Runtime(budget_bytes, "budget", self.loss_fn, self.optimizer, self.progress)

    def adopt(self, model: nn.Module) -> None:
        """Take the first decision for calls of its kind on `model`, in the mode that the model is in now."""
        assert self.first is not None
        self.first.trust_nothing()
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

    def _checked(self, profile: Profile, budget: int, call: tuple[nn.Module, Any, Any], told: Told) -> Planned:
        """Decide; then take one step under the decision, and decide more tightly if it took more than predicted."""
        target = budget
        for _ in range(4):
            try:
                planned = Planned(decide(profile, budget, self.strategy, target))
            except InfeasibleBudgetError:
                break
            if planned.directions is None and planned.decision.timeline.peak_bytes <= CLEARLY * budget:
                return planned
            self.progress("rehearsing")
            told(planned)
            excess = self.rehearsed(planned, *call) - budget
            if excess <= 0:
                return planned
            target -= excess
        return self._smallest(profile, budget, call, told)

    def _smallest(self, profile: Profile, budget: int, call: tuple[nn.Module, Any, Any], told: Told) -> Planned:
        """The plan with the smallest peak, if that keeps the budget; else the error that says what would."""
        planned = Planned(Decision(profile, minimum(profile), budget, self.strategy, 0))
        predicted = planned.decision.timeline.peak_bytes
        told(planned)
        real = self.rehearsed(planned, *call)
        if self.strategy == "budget" and max(real, predicted) <= budget:
            return planned
        # Another profile of the same step can differ by a few small tensors; what is named has to hold for it, too.
        smallest = max(real, predicted)
        named = smallest + (max(4096, smallest // 200) if planned.directions is not None else 0)
        raise infeasible(planned.decision, named)

    def rehearsed(self, planned: Planned, model: nn.Module, args: Any, kwargs: Any) -> int:
        """The peak of a real step under a plan, bytes; more than there is where it ran out of memory."""
        state = planned.decision.profile.optimizer_state_bytes
        try:
            return rehearse(model, args, kwargs, self.loss_fn, planned.directions, state_bytes=state).peak_bytes
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
        self.calls += 1
        key = self.key(model, args, kwargs)
        planned = self.cache.get(key)
        if planned is None:
            planned = self._plan_within(model, args, kwargs, key)
        else:
            self.cache.move_to_end(key)
        for watch in self.watches:
            watch.called(planned.decision, (args, kwargs))
        if planned.directions is None:
            return plainly(*args, **kwargs)
        follower = Follower(planned.directions)
        if self.watches:
            follower.observer = self._observer()
        _ACTIVE.busy = True
        try:
            with follower:
                result = plainly(*args, **kwargs)
        finally:
            _ACTIVE.busy = False
            follower.finish()
        self._look_back(follower, planned, key)
        return result

    def _observer(self) -> Callable[[Any, bool], None]:
        watches = tuple(self.watches)

        def observe(group: Any, begins: bool) -> None:
            for watch in watches:
                watch.replaying(group, begins)

        return observe

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
            end = (follower.position, "another operation", "the end of forward")
            position, expected, found = follower.diverged or end
            log.warning(
                "a step of %s took another path than planned (operation %d: %s instead of %s); from there on, until "
                "it met the plan again, everything was kept, so it may have taken more memory than the budget",
                planned.decision.profile.model,
                position,
                found,
                expected,
            )
        if planned.misses >= 2 and self._replans.get(key, 0) < REPLANS:
            self._replans[key] = self._replans.get(key, 0) + 1
            self.left[key] = planned
            self.cache.pop(key, None)

    def replans(self, key: Key) -> int:
        """How often calls of a kind have been given up to be planned again."""
        return self._replans.get(key, 0)

    def __getstate__(self) -> dict[str, Any]:
        state = {k: v for k, v in self.__dict__.items() if k not in ("progress", "watches", "_ranks", "_group")}
        if isinstance(self.optimizer, torch.optim.Optimizer):  # belongs to the original's parameters
            state["optimizer"] = type(self.optimizer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.progress, self.watches, self._ranks, self._group = (lambda stage: None), [], None, None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        made = Runtime.__new__(Runtime)
        own = {"cache": OrderedDict(self.cache), "_replans": dict(self._replans), "left": {}}
        made.__setstate__({**self.__getstate__(), **own})
        return made


def _nothing() -> Solution:
    return Solution((), SolveStatus.NOTHING_TO_DO, 0.0, 0)
