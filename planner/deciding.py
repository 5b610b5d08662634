"""Deciding for one kind of call: measure a step, decide, take a real step under the decision, decide more tightly."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from .budget import Bytes, Free, Share, parse_budget
from .decision import Decision, infeasible, unplanned
from .errors import CaptureError, GuardError, InfeasibleBudgetError, UnsupportedModelError
from .graphdecision import GraphDecision
from .graphed.graphed import Graphed
from .mechanism import Mechanism, Slice, mechanism
from .profile import Profile
from .profiling.buckets import bucket_bytes, buckets_to_come
from .profiling.forward import device_of, resident
from .profiling.measure import measure_profile
from .profiling.meter import free_bytes
from .profiling.rehearse import Way, rehearse
from .profiling.shadow import untouched
from .ranks import collectives
from .regional import RegionDecision
from .replay.ambient import generator_states, set_generator_states
from .replay.directions import Directions, direct
from .rewrite.rewritten import Rewritten

log = logging.getLogger("ckpt_planner")

CLEARLY = 0.98  # a plain step predicted to take less than this share of the budget needs no rehearsal
RESERVE = 0.05  # share of the device's free memory that budget=None leaves alone

Told = Callable[["Planned"], None]


class Planned:
    """A decision for one kind of call, ready to be carried out."""

    def __init__(self, decision: Decision, rewritten: Rewritten | Graphed | None = None) -> None:
        self.decision = decision
        if rewritten is None and isinstance(decision, RegionDecision) and decision.regions:
            rewritten = Rewritten(decision)  # captured at its first use
        elif rewritten is None and isinstance(decision, GraphDecision) and decision.runs:
            rewritten = Graphed(decision)
        self.rewritten = rewritten
        self.directions: Directions | None = None
        if isinstance(rewritten, Graphed):
            self.directions = rewritten.directions
        elif decision.schedule.groups:
            self.directions = direct(decision.profile, decision.schedule)
        self.misses = 0
        self.way: Way = self.rewritten or self.directions
        self.states: tuple[torch.Tensor, ...] | None = None  # the random generators', when the call was planned

    def trust_nothing(self) -> None:
        """The model may draw or write where it did not when it was profiled: watch even what is called first."""
        for direction in self.directions.ops if self.directions is not None else ():
            direction.known.add((self,))


class Deciding:
    """What was asked for, and how it is decided for a call.

    Args:
        budget, strategy, loss_fn, optimizer, mechanism, gradient_buckets: as `optimize` takes them.
        progress: told the name of each stage of planning.

    Attributes:
        first: the decision that was made first.
        collectives: whether measuring a step takes part in collectives, as far as is known.
        several: whether several ranks train the model together, as far as is known.
    """

    def __init__(
        self,
        budget: str | int | None,
        strategy: str,
        loss_fn: Callable[[Any], torch.Tensor] | None,
        optimizer: Any,
        progress: Callable[[str], None] | None,
        mechanism: str,
        gradient_buckets: bool | None,
    ) -> None:
        self.budget, self.strategy, self.loss_fn, self.optimizer = budget, strategy, loss_fn, optimizer
        self.mechanism, self.gradient_buckets = mechanism, gradient_buckets
        self.progress = progress or (lambda stage: None)
        self.first: Planned | None = None
        self.collectives = True
        self.several = False
        parse_budget(budget)

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
        return self._with_buckets(profile, model)

    def _with_buckets(self, profile: Profile, model: nn.Module) -> Profile:
        """Counts the buckets that a wrapper is yet to make, where gradients will be averaged in some."""
        there, wanted = profile.bucket_bytes, self.gradient_buckets
        if wanted is False or (wanted is None and (there or not self.several)):
            return profile
        return msgspec.structs.replace(profile, bucket_bytes=there + buckets_to_come(model))

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
        how = self._mechanism(profile, model, args, kwargs)
        planned = self._checked(how, profile, budget, (model, args, kwargs), told)
        planned.states = generator_states()
        if planned.rewritten is not None:
            planned.rewritten.bound_to(model, args, kwargs)
        return planned

    def budget_bytes(self, profile: Profile, model: nn.Module, args: Any, kwargs: Any) -> int:
        """The budget in bytes of peak, for this step."""
        budget = parse_budget(self.budget)
        if isinstance(budget, Bytes):
            return budget.bytes
        if isinstance(budget, Share):
            return budget.of(unplanned(profile).timeline.peak_bytes)
        assert isinstance(budget, Free)
        device = device_of(model, (args, kwargs))
        here = sum(resident(model, args, kwargs, device).values()) + bucket_bytes(model)
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
        self, how: Mechanism, profile: Profile, budget: int, call: tuple[nn.Module, Any, Any], told: Told
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
            told(planned)
            excess = self.rehearsed(planned, *call) - budget
            if excess <= 0:
                return planned
            target -= excess
        return self._smallest(how, profile, budget, call, told)

    def _smallest(
        self, how: Mechanism, profile: Profile, budget: int, call: tuple[nn.Module, Any, Any], told: Told
    ) -> Planned:
        """The plan with the smallest peak, if that keeps the budget; else the error that says what would."""
        decision = how.smallest(profile, budget, self.strategy)
        planned = Planned(decision, how.rewritten(decision))
        predicted = planned.decision.timeline.peak_bytes
        told(planned)
        real = self.rehearsed(planned, *call)
        if self.strategy == "budget" and max(real, predicted) <= budget:
            return planned
        # Another profile of the same step can differ by a few small tensors; what is named has to hold for it, too.
        smallest = max(real, predicted)
        named = smallest + (max(4096, smallest // 200) if planned.way is not None else 0)
        raise infeasible(planned.decision, named)

    def rehearsed(self, planned: Planned, model: nn.Module, args: Any, kwargs: Any) -> int:
        """The peak of a real step under a plan, bytes; more than there is where it ran out of memory."""
        profile = planned.decision.profile
        other = profile.optimizer_state_bytes + profile.bucket_bytes
        try:
            return rehearse(model, args, kwargs, self.loss_fn, planned.way, other_bytes=other).peak_bytes
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            return planned.decision.budget_bytes * 21 // 20 + 1


def captured_again(planned: Planned, model: nn.Module, args: Any, kwargs: Any) -> Mechanism:
    """The mechanism of a planned call, to decide for other budgets.

    Raises:
        CaptureError, GuardError, UnsupportedModelError: the model takes another path than when it was planned.

    Example:
        >>> captured_again(planned, model, (x,), {}).frontier(planned.decision.profile, 8)  # doctest: +SKIP
    """
    with untouched():
        if planned.states is not None:  # a forward that draws its path takes the planned one
            set_generator_states(planned.states)
        return mechanism(planned.decision.mechanism, planned.decision.profile, model, args, kwargs)
