"""Choosing what to drop: problem in, solution out, one file an algorithm.

`solve` is the entry; `minimum` answers what the smallest budget is that can be kept.
"""

from __future__ import annotations

import enum
import time
from collections.abc import Callable, Sequence
from typing import Literal, get_args

import msgspec

from ..problem import Judged, Problem, make_problem
from ..profile import Profile
from . import exact
from .blocks import solve_all
from .bound import lower_bound_seconds, relaxed
from .budget import Search
from .minimum import kept_by_segments, solve_minimum
from .nested import cheapest_nested, is_worth, smallest_nested
from .segments import segments_by_bytes as _segments_by_bytes
from .sqrt import solve_sqrt, sqrt_candidates

Strategy = Literal["budget", "sqrt", "all", "none"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
PROVEN_GAP = 1e-3
SETTLED = 0.01  # a gap that a composition of blocks leaves to no further search
LITTLE = 1e-3  # what is left open is little where it is at most this share of the step
ALIKE = 5  # neighbours of which there are so many alike may be composed as one block
OPEN = 0.05  # a gap above this is worth searching longer
WIDE_OPEN = 0.1  # and from which it is searched much longer from everywhere
# The relaxation with whole decisions: for so many operations at most, where the gap is above this, with so many nodes.
WHOLE = ((200, 0.005, 30), (400, 0.02, 10), (800, 0.04, 1))
LONG = (800, 0.1, 200)  # and once more for longer, where that leaves much open
# Inner boundaries are tried where so much is open and so much of forward runs again, for a share of an ordinary search.
NESTED = (0.1, 0.25, 0.3)


class SolveStatus(enum.Enum):
    """How a search ended; the values are sentences for the user."""

    OPTIMAL = "Proven to cost the least within the budget, to 0.1 %."
    FEASIBLE = "Keeps the budget; a cheaper plan may exist."
    BY_RULE = "Keeps the budget by the strategy's own rule; the gap is to the best plan that the budget allows."
    STOPPED = "Keeps the budget; the search was stopped before its end, so nothing is proven."
    NOTHING_TO_DO = "The plain step fits; nothing is recomputed."
    INFEASIBLE = (
        "The budget cannot be kept by this strategy; the plan is the one with the smallest peak that was found."
    )


class Solution(msgspec.Struct, frozen=True):
    """A decision, and what is known about it.

    Attributes:
        dropped: storages that are not kept for backward but computed again, sorted.
        status: how the search ended.
        recompute_seconds: time of everything that runs again.
        peak_bytes: most bytes live at any moment of the step, by simulation.
        lower_bound_seconds: no plan within the budget recomputes for less; 0 where nothing is known.
        gap: the share of the recomputation that may be avoidable: (recompute - bound) / recompute.
        inner: dropped storages that are inner boundaries, sorted; see `Schedule`.
    """

    dropped: tuple[int, ...]
    status: SolveStatus
    recompute_seconds: float
    peak_bytes: int
    lower_bound_seconds: float = 0.0
    gap: float = 0.0
    inner: tuple[int, ...] = ()


def solve(problem: Problem, strategy: str = "budget", *, time_limit: float = 60.0) -> Solution:
    """Decides what to drop.

    Args:
        problem: the profile and the budget.
        strategy: "budget" for the cheapest plan that keeps the budget, "sqrt" for Chen's segments, "all" for every
            repeated block, "none" for the plain step.
        time_limit: seconds after which "budget" makes do with what it has; a safety net that ordinary problems do not
            meet, so that they are decided alike on every machine.

    Returns:
        The solution. Where the budget cannot be kept its status is INFEASIBLE and its peak is above the budget. Where
        the search is interrupted (KeyboardInterrupt) after it has met a plan that keeps the budget, or time runs out,
        the best such plan comes back with the status STOPPED and without a bound.

    Raises:
        ValueError: the strategy is unknown.
        KeyboardInterrupt: it came before there was any plan that keeps the budget.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    plain = problem.judge(())
    if strategy == "none":
        return rate(problem, plain)
    if strategy == "sqrt":
        return rate(problem, solve_sqrt(problem), by_rule=True)
    if strategy == "all":
        return rate(problem, solve_all(problem), by_rule=True)
    if plain.peak_bytes <= problem.budget_bytes:
        return rate(problem, plain)
    end = time.monotonic() + time_limit

    def expired() -> bool:
        return time.monotonic() > end

    if exact.is_small(problem):
        return rate(problem, _smallish(problem, expired))
    search = Search(problem, expired)
    result: Judged | None = None
    stopped = False
    try:
        for judged in (solve_all(problem), *sqrt_candidates(problem)):
            search.add(judged)
        kept = kept_by_segments(problem)
        search.add(smallest := problem.judge(kept) if kept is not None else unnested_minimum_of(problem))
        if smallest.peak_bytes > problem.budget_bytes:
            result = minimum_of(problem)
            if result.peak_bytes > problem.budget_bytes:
                return rate(problem, result)
            bound = lower_bound_seconds(problem) or 0.0
            result = cheapest_nested(problem, [result], expired)
        else:
            bound = _searched(problem, search)
            result = search.result() or smallest
            result = _nested_where_it_pays(problem, result, bound, expired)
    except KeyboardInterrupt:
        stopped = True
        result = result or search.result()
        if result is None:
            raise
    if stopped or expired():
        return _solution(result, SolveStatus.STOPPED, 0.0, 1.0)
    return _rated(problem, result, bound)


def _smallish(problem: Problem, expired: Callable[[], bool]) -> Judged:
    """The best decision of a problem that is so small that nearly every one can be tried."""
    best, least_seconds = exact.cheapest_of_all(problem)
    judged = best or minimum_of(problem)
    if judged.peak_bytes > problem.budget_bytes or judged.seconds <= least_seconds * (1 + PROVEN_GAP):
        return judged
    return cheapest_nested(problem, [judged], expired)


def _nested_where_it_pays(problem: Problem, judged: Judged, bound: float, expired: Callable[[], bool]) -> Judged:
    """A decision that keeps the budget, or a cheaper one with inner boundaries where there may be one."""
    open_gap, share, work = NESTED
    little = judged.seconds * (1 - open_gap) <= bound or judged.seconds < share * problem.profile.forward_seconds
    if little or not is_worth(problem, work):
        return judged
    return cheapest_nested(problem, [judged], expired, work)


def _searched(problem: Problem, search: Search) -> float:
    """Runs the search from what the relaxation says; returns the bound that this proves."""
    found = relaxed(problem)
    bound = found.seconds if found is not None else 0.0
    search.no_less_than(bound)
    if found is not None:
        search.start_from(found.dropped)
    if search.gap() > PROVEN_GAP:
        search.compose()
    little = LITTLE * problem.profile.step_seconds
    if search.gap() > SETTLED / 2 and search.least_seconds() > bound + little / 2:
        search.compose(ALIKE)
    if search.gap() > SETTLED:
        search.run(search.least_seconds() > bound + little)
    if search.gap() > OPEN:
        search.compose(1)
    if search.least_seconds() * (1 - OPEN) > bound:
        search.deepen(search.least_seconds() * (1 - WIDE_OPEN) > bound)
    for limits in (WHOLE, (LONG,)):
        nodes = _worth_whole(problem, search.least_seconds(), bound, limits)
        if nodes and not search.expired() and (whole := relaxed(problem, nodes)) is not None:
            bound = max(bound, whole.seconds)
            search.no_less_than(bound)
            search.start_from(whole.dropped)
            search.improve()
    return bound


def minimum(profile: Profile, problem: Problem | None = None) -> Solution:
    """The decision with the smallest peak that this planner finds; budgets from its peak on can be kept.

    Args:
        profile: the measured step.
        problem: the profile's, if there is one.
    """
    problem = problem or make_problem(profile, 0)
    smallest = minimum_of(problem)
    at_it = problem.with_budget(smallest.peak_bytes)
    # Nobody asks for this plan as such: the bound of the linear program will do.
    return _rated(at_it, smallest, lower_bound_seconds(at_it) or 0.0)


def minimum_of(problem: Problem) -> Judged:
    """The decision with the smallest peak, whatever the problem's budget; found once for all budgets of a problem."""
    if problem.smallest is None:
        found = exact.smallest_of_all(problem) if exact.is_small(problem) else None
        problem.smallest = found or smallest_nested(problem, unnested_minimum_of(problem))
    return problem.smallest


def unnested_minimum_of(problem: Problem) -> Judged:
    """The same of decisions without inner boundaries."""
    if problem.smallest_unnested is None:
        problem.smallest_unnested = solve_minimum(problem)
    return problem.smallest_unnested


def segments_by_bytes(profile: Profile, count: int | None = None) -> tuple[int, ...]:
    """The storages to drop when forward is cut into `count` segments of equal saved bytes; Chen's count by default.

    Needs no backward pass: the profile may have no steps.
    """
    return _segments_by_bytes(make_problem(profile, 0), count)


def rate(problem: Problem, judged: Judged, *, by_rule: bool = False) -> Solution:
    """A decision with its status, its lower bound and its gap under the problem's budget.

    Args:
        problem: the profile and the budget.
        judged: the decision.
        by_rule: a strategy by hand made it, which does not look for the best; the status then says so.
    """
    return _rated(problem, judged, _bound(problem, judged.seconds), by_rule=by_rule)


def _rated(problem: Problem, judged: Judged, bound: float, *, by_rule: bool = False) -> Solution:
    if judged.peak_bytes > problem.budget_bytes:
        return _solution(judged, SolveStatus.INFEASIBLE)
    if not judged.seconds:
        return _solution(judged, SolveStatus.FEASIBLE if judged.dropped else SolveStatus.NOTHING_TO_DO)
    bound = min(bound, judged.seconds)
    gap = (judged.seconds - bound) / judged.seconds
    status = SolveStatus.BY_RULE if by_rule else SolveStatus.FEASIBLE
    if gap <= PROVEN_GAP:
        status = SolveStatus.OPTIMAL
    return _solution(judged, status, bound, gap)


def _solution(judged: Judged, status: SolveStatus, bound: float = 0.0, gap: float = 0.0) -> Solution:
    return Solution(judged.dropped, status, judged.seconds, judged.peak_bytes, bound, gap, judged.inner)


def _bound(problem: Problem, seconds: float) -> float:
    """Seconds that any decision within the budget computes again, at least; `seconds` is what the best one found does.

    Where the linear program leaves too much open and is not too large, whole decisions tighten it.
    """
    if not seconds:
        return 0.0
    if exact.is_small(problem):
        return exact.cheapest_of_all(problem).least_seconds
    bound = lower_bound_seconds(problem) or 0.0
    for limits in (WHOLE, (LONG,)):
        if nodes := _worth_whole(problem, seconds, bound, limits):
            bound = max(bound, lower_bound_seconds(problem, nodes) or 0.0)
    return bound


def _worth_whole(problem: Problem, seconds: float, bound: float, limits: Sequence[tuple[int, float, int]]) -> int:
    """How many nodes the relaxation with whole decisions is worth; 0 where it is not."""
    for most_ops, open_gap, nodes in limits:
        if len(problem.profile.ops) <= most_ops:
            return nodes if seconds - bound > open_gap * seconds else 0
    return 0


__all__ = [
    "STRATEGIES",
    "Solution",
    "SolveStatus",
    "Strategy",
    "make_problem",
    "minimum",
    "minimum_of",
    "rate",
    "segments_by_bytes",
    "solve",
]
