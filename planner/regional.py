"""Deciding for mechanism "torch": regions for `torch.utils.checkpoint`, simulated and explained. Free of torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .checkpointed import kept_until, let_go, simulate_regions
from .decision import Decision, Segment, infeasible
from .problem import make_problem
from .profile import Profile
from .regions import Region, Regional
from .simulate import Timeline
from .solve import PROVEN_GAP, Solution, SolveStatus
from .solve.bound import lower_bound_seconds
from .solve.regions import RegionProblem, Wrapped, smallest_regions, solve_regions

TIME_LIMIT = 60.0  # seconds; a safety net, as in `solve`


@dataclass(frozen=True)
class RegionDecision(Decision):
    """A decision that is carried out by checkpointing regions; see `Decision`.

    Attributes:
        regions: what is checkpointed, in order.
    """

    regions: tuple[Region, ...] = ()
    mechanism: ClassVar[str] = "torch"

    @property
    def mechanism_reason(self) -> str:
        """What the mechanism is, and why it was taken; a sentence."""
        if not self.regions:
            return "As asked for; nothing is checkpointed, so the model's own forward runs."
        return "As asked for: a captured graph runs, with the segments in torch.utils.checkpoint."

    @cached_property
    def regional(self) -> Regional:
        """What the regions mean for the profile."""
        return Regional(self.profile)

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every moment of the planned step."""
        return simulate_regions(self.regional, self.regions) if self.regions else self.plain

    @cached_property
    def needed_until(self) -> dict[int, int]:
        """For each storage that is kept for backward, the last backward step that needs it."""
        return kept_until(self.regional, self.regions)

    @cached_property
    def let_go(self) -> tuple[int, ...]:
        """For each storage, the operation before which forward lets go of it, unless backward needs it."""
        # Without regions the model itself runs, not its graph.
        return let_go(self.regional, self.regions) if self.regions else self.unplanned.let_go

    @cached_property
    def freed(self) -> frozenset[int]:
        """Storages that the plain step keeps for backward, and this one does not."""
        return frozenset(s for region in self.regions for s in self._freed_by(region))

    @cached_property
    def again_seconds(self) -> dict[int, float]:
        """For each operation that runs again, its time in backward; what the checkpoints take is not in it."""
        regional, ops = self.regional, self.profile.ops
        return {i: ops[i].seconds + regional.op_seconds(r) for r in self.regions for i in regional.again(r)}

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The regions, in the order of forward."""
        return tuple(self._segment(region) for region in self.regions)

    @cached_property
    def segment_of(self) -> dict[int, int]:
        """For each operation that runs again, the number of its region."""
        return {i: number for number, region in enumerate(self.regions) for i in self.regional.again(region)}

    @property
    def follow_seconds(self) -> float:
        """Nothing is followed: a captured graph runs."""
        return 0.0

    def _freed_by(self, region: Region) -> set[int]:
        """What a region makes that would be kept without it, and that no other region keeps."""
        storages, n = self.profile.storages, len(self.profile.ops)
        own = self.regional.own(region)
        return {s for s in own if self.needed_until.get(s, -1) < 0 and storages[s].death <= n}

    def _segment(self, region: Region) -> Segment:
        regional, profile = self.regional, self.profile
        again = regional.again(region)
        held = {s for i in region.kept for s in (*profile.ops[i].makes, *profile.ops[i].hides)}
        return Segment(
            modules=tuple(dict.fromkeys(profile.ops[i].module for i in again)),
            nodes=len(again),
            bytes_freed=sum(profile.storages[s].bytes for s in self._freed_by(region)),
            bytes_kept=sum(profile.storages[s].bytes for s in regional.inputs(region) | held),
            recompute_seconds=regional.seconds(region),
        )


def decide_regions(
    profile: Profile,
    budget_bytes: int,
    strategy: str = "budget",
    target_bytes: int | None = None,
    barriers: Iterable[int] = (),
    whole: Iterable[int] = (),
) -> RegionDecision:
    """Decide what to checkpoint, and check it by simulation; like `decide`.

    Args:
        profile, budget_bytes, strategy, target_bytes: as `decide` takes them.
        barriers, whole: as `Regional` takes them.

    Raises:
        InfeasibleBudgetError: the strategy cannot keep the budget with this mechanism.
    """
    target = budget_bytes if target_bytes is None else min(target_bytes, budget_bytes)
    problem = RegionProblem(make_problem(profile, target), Regional(profile, barriers, whole))
    found = solve_regions(problem, strategy, _timer())
    if found is None or found.peak_bytes > target:
        smallest = smallest_regions(problem)
        decision = _decision(problem, found or smallest, budget_bytes, strategy)
        raise infeasible(decision, smallest.peak_bytes + budget_bytes - target)
    return _decision(problem, found, budget_bytes, strategy)


def decide_for_budgets(
    profile: Profile,
    budgets: Callable[[int, int], list[int]],
    barriers: Iterable[int] = (),
    whole: Iterable[int] = (),
    progress: Callable[[int, int], None] | None = None,
) -> list[RegionDecision]:
    """Decisions for several budgets, together: what was found for one is a candidate for all the others.

    Args:
        profile, barriers, whole: as `decide_regions` takes them.
        budgets: from the smallest peak that is found and the plain step's, the budgets, all between the two.
        progress: told how many budgets of how many are decided.

    Returns:
        One for each budget, in the order of the budgets.

    Example:
        >>> decide_for_budgets(profile, lambda least, plain: [plain, least])  # doctest: +SKIP
    """
    problem = RegionProblem(make_problem(profile, 0), Regional(profile, barriers, whole))
    plain, smallest = problem.judge(()), smallest_regions(problem)
    asked = budgets(smallest.peak_bytes, plain.peak_bytes)
    known = [plain, smallest]
    for done, budget in enumerate(asked):
        if progress is not None:
            progress(done, len(asked))
        problem.problem = problem.problem.with_budget(budget)
        found = solve_regions(problem, "budget", _timer())
        known += [found] if found is not None else []
    decisions = []
    for budget in asked:
        best = min((w for w in known if w.peak_bytes <= budget), key=lambda w: (w.seconds, w.peak_bytes))
        problem.problem = problem.problem.with_budget(budget)
        decisions.append(_decision(problem, best, budget, "budget"))
    return decisions


def _timer() -> Callable[[], bool]:
    """Whether the time of one search has run out."""
    end = time.monotonic() + TIME_LIMIT
    return lambda: time.monotonic() > end


def minimum_regions(
    profile: Profile, budget_bytes: int, strategy: str, barriers: Iterable[int] = (), whole: Iterable[int] = ()
) -> RegionDecision:
    """The decision with the smallest peak that this mechanism can have, as far as is found."""
    problem = RegionProblem(make_problem(profile, 0), Regional(profile, barriers, whole))
    smallest = smallest_regions(problem)
    problem.problem = problem.problem.with_budget(smallest.peak_bytes)
    return _decision(problem, smallest, budget_bytes, strategy)


def _decision(problem: RegionProblem, found: Wrapped, budget_bytes: int, strategy: str) -> RegionDecision:
    profile, bound, gap = problem.problem.profile, 0.0, 0.0
    if found.peak_bytes > problem.problem.budget_bytes:
        status = SolveStatus.INFEASIBLE
    elif not found.regions:
        status = SolveStatus.NOTHING_TO_DO
    else:
        bound = min(lower_bound_seconds(problem.problem, groups=False) or 0.0, found.seconds)
        gap = (found.seconds - bound) / found.seconds if found.seconds else 0.0
        status = SolveStatus.OPTIMAL if gap <= PROVEN_GAP else SolveStatus.FEASIBLE
    solution = Solution((), status, found.seconds, found.peak_bytes, bound, gap)
    return RegionDecision(profile, solution, budget_bytes, strategy, regions=found.regions)
