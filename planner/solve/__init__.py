"""Choosing what to drop: problem in, solution out, one file an algorithm.

`solve` is the entry; `minimum` answers what the smallest budget is that can be kept.
"""

from __future__ import annotations

import enum
import time
from typing import Literal, get_args

import msgspec

from ..problem import Judged, Problem, make_problem
from ..profile import Profile
from .blocks import solve_all
from .bound import lower_bound_seconds
from .budget import solve_budget
from .minimum import solve_minimum, surely_kept
from .segments import segments_by_bytes as _segments_by_bytes
from .sqrt import solve_sqrt, sqrt_candidates

Strategy = Literal["budget", "sqrt", "all", "none"]
STRATEGIES: tuple[str, ...] = get_args(Strategy)
PROVEN_GAP = 1e-3


class SolveStatus(enum.Enum):
    """How a search ended; the values are sentences for the user."""

    OPTIMAL = "Proven to cost the least within the budget, to 0.1 %."
    FEASIBLE = "Keeps the budget; a cheaper plan may exist."
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
    """

    dropped: tuple[int, ...]
    status: SolveStatus
    recompute_seconds: float
    peak_bytes: int
    lower_bound_seconds: float = 0.0
    gap: float = 0.0


def solve(problem: Problem, strategy: str = "budget", *, time_limit: float = 60.0) -> Solution:
    """Decides what to drop.

    Args:
        problem: the profile and the budget.
        strategy: "budget" for the cheapest plan that keeps the budget, "sqrt" for Chen's segments, "all" for every
            repeated block, "none" for the plain step.
        time_limit: seconds after which "budget" makes do with what it has; a safety net that ordinary problems do not
            meet, so that they are decided alike on every machine.

    Returns:
        The solution. Where the budget cannot be kept its status is INFEASIBLE and its peak is above the budget.

    Raises:
        ValueError: the strategy is unknown.
    """
    if strategy not in STRATEGIES:
        raise ValueError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    plain = problem.judge(())
    if strategy == "none":
        return rate(problem, plain)
    if strategy == "sqrt":
        return rate(problem, solve_sqrt(problem))
    if strategy == "all":
        return rate(problem, solve_all(problem))
    if plain.peak_bytes <= problem.budget_bytes:
        return rate(problem, plain)
    end = time.monotonic() + time_limit
    others = [solve_all(problem), *sqrt_candidates(problem)]
    if not surely_kept(problem):
        others.append(minimum_of(problem))
        if others[-1].peak_bytes > problem.budget_bytes:
            return rate(problem, others[-1])
    best = solve_budget(problem, others, lambda: time.monotonic() > end)
    return rate(problem, best or minimum_of(problem))


def minimum(profile: Profile) -> Solution:
    """The decision with the smallest peak that this planner finds; budgets from its peak on can be kept."""
    problem = make_problem(profile, 0)
    smallest = minimum_of(problem)
    return rate(problem.with_budget(smallest.peak_bytes), smallest)


def minimum_of(problem: Problem) -> Judged:
    """The decision with the smallest peak, whatever the problem's budget; found once for all budgets of a problem."""
    if problem.smallest is None:
        problem.smallest = solve_minimum(problem)
    return problem.smallest


def segments_by_bytes(profile: Profile, count: int | None = None) -> tuple[int, ...]:
    """The storages to drop when forward is cut into `count` segments of equal saved bytes; Chen's count by default.

    Needs no backward pass: the profile may have no steps.
    """
    return _segments_by_bytes(make_problem(profile, 0), count)


def rate(problem: Problem, judged: Judged) -> Solution:
    """A decision with its status, its lower bound and its gap under the problem's budget."""
    if judged.peak_bytes > problem.budget_bytes:
        return Solution(judged.dropped, SolveStatus.INFEASIBLE, judged.seconds, judged.peak_bytes)
    if not judged.seconds:
        status = SolveStatus.FEASIBLE if judged.dropped else SolveStatus.NOTHING_TO_DO
        return Solution(judged.dropped, status, judged.seconds, judged.peak_bytes)
    bound = min(lower_bound_seconds(problem) or 0.0, judged.seconds)
    gap = (judged.seconds - bound) / judged.seconds
    status = SolveStatus.OPTIMAL if gap <= PROVEN_GAP else SolveStatus.FEASIBLE
    return Solution(judged.dropped, status, judged.seconds, judged.peak_bytes, bound, gap)


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
