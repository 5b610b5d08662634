"""Every decision of a problem with few storages that may be dropped: nothing is left to guess there."""

from __future__ import annotations

from typing import NamedTuple

from ..problem import Problem
from .state import State

FEW = 12  # storages that may be dropped: 4096 decisions


class Costed(NamedTuple):
    """One decision."""

    seconds: float
    peak_bytes: int
    dropped: tuple[int, ...]


def is_small(problem: Problem) -> bool:
    """Whether every decision can be tried."""
    return len(problem.candidates) <= FEW


def every_decision(problem: Problem) -> list[Costed]:
    """All decisions that can be carried out, the cheapest first; worked out once for all budgets of a problem."""
    if problem.decisions is None:
        state, found = State(problem), dict[tuple[int, ...], Costed]()
        for number in range(1 << len(problem.candidates)):
            code = number ^ (number >> 1)  # a Gray code: each wish differs from the one before by one storage
            state.move_to(s for k, s in enumerate(problem.candidates) if code >> k & 1)
            dropped = tuple(sorted(state.dropped))
            found[dropped] = Costed(state.seconds, state.peak_bytes(), dropped)
        problem.decisions = sorted(found.values())
    decisions: list[Costed] = problem.decisions
    return decisions


def cheapest(problem: Problem) -> Costed | None:
    """The cheapest of all decisions that keep the budget; None if none does."""
    return next((d for d in every_decision(problem) if d.peak_bytes <= problem.budget_bytes), None)


def smallest(problem: Problem) -> Costed:
    """The decision with the smallest peak, the cheapest of several."""
    return min(every_decision(problem), key=lambda d: (d.peak_bytes, d.seconds, d.dropped))
