"""Every decision of a problem with few storages that may be dropped: nothing is left to guess there.

Of inner boundaries there are more sets than that: those are tried that may be in the cheapest decision, up to a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from ..problem import Judged, Problem
from .floors import Floors
from .state import State

FEW = 12  # storages that may be dropped: 4096 decisions
MOST = 5_000  # decisions with inner boundaries that are tried


class Costed(NamedTuple):
    """One decision; `groups` are those of its groups that backward starts."""

    seconds: float
    peak_bytes: int
    dropped: tuple[int, ...]
    groups: int


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
            dropped = state.effective()
            # Summed anew, so that it does not depend on the way here by a rounding.
            seconds = math.fsum(group.seconds for group in state.groups.values())
            groups = sum(group.trigger >= 0 for group in state.groups.values())
            found[dropped] = Costed(seconds, state.peak_bytes(), dropped, groups)
        problem.decisions = sorted(found.values())
    decisions: list[Costed] = problem.decisions
    return decisions


def cheapest(problem: Problem) -> Costed | None:
    """The cheapest of all decisions that keep the budget; None if none does."""
    return next((d for d in every_decision(problem) if d.peak_bytes <= problem.budget_bytes), None)


def smallest(problem: Problem) -> Costed:
    """The decision with the smallest peak, the cheapest of several."""
    return min(every_decision(problem), key=lambda d: (d.peak_bytes, d.seconds, d.dropped))


class Proven(NamedTuple):
    """The cheapest decision that keeps the budget, and how far that is proven.

    Attributes:
        judged: the decision; None where none was met that keeps the budget.
        least_seconds: no decision within the budget costs less.
    """

    judged: Judged | None
    least_seconds: float


class Floored(NamedTuple):
    """A decision without inner boundaries, and what none that has some and drops the same storages is below."""

    floor: float
    plain: Costed


def cheapest_of_all(problem: Problem) -> Proven:
    """The cheapest decision, with or without inner boundaries.

    Inner boundaries do not change what is dropped. Those are tried that may be in the cheapest decision, by the least
    that any replay of those storages costs and holds.
    """
    if (known := problem.proven.get(problem.budget_bytes)) is not None:
        proven: Proven = known
        return proven
    budget, plain = problem.budget_bytes, cheapest(problem)
    best, least = (problem.judge(plain.dropped), plain.seconds) if plain is not None else (None, math.inf)
    floors, tried, unseen = floors_of(problem), 0, math.inf
    for floor, decision in _by_seconds(problem):
        if floor >= least:
            break
        if decision.peak_bytes <= budget and decision.seconds <= floor:
            continue
        if floors.peak_bytes(decision.dropped) > budget:
            continue
        tried += _sets_of_inner(problem, decision)
        if tried > MOST:
            unseen = floor
            break
        for judged in _with_inner(problem, decision):
            if judged.peak_bytes <= budget and judged.seconds < least:
                best, least = judged, judged.seconds
    if best is not None:
        best = problem.judge(best.dropped, best.inner)
    found = Proven(best, min(least, unseen) if best is not None or unseen < math.inf else 0.0)
    problem.proven[problem.budget_bytes] = found
    return found


def smallest_of_all(problem: Problem) -> Judged | None:
    """The decision with the smallest peak, with or without inner boundaries; None where there are too many to try."""
    plain = smallest(problem)
    best, tried, floors = problem.judge(plain.dropped), 0, floors_of(problem)
    by_peak = sorted(Floored(floors.peak_bytes(d.dropped), d) for d in every_decision(problem))
    for floor, decision in by_peak:
        if floor >= best.peak_bytes:
            return problem.judge(best.dropped, best.inner)
        tried += _sets_of_inner(problem, decision)
        if tried > MOST:
            return None
        for judged in _with_inner(problem, decision):
            if (judged.peak_bytes, judged.seconds) < (best.peak_bytes, best.seconds):
                best = judged
    return problem.judge(best.dropped, best.inner)


def floors_of(problem: Problem) -> Floors:
    """The floors of a problem's decisions, for all budgets alike."""
    if problem.floors is None:
        problem.floors = Floors(problem)
    floors: Floors = problem.floors
    return floors


def _by_seconds(problem: Problem) -> list[Floored]:
    """Every decision with the least that it costs with any inner boundaries, the least first."""
    if problem.floored is None:
        floors = floors_of(problem)
        problem.floored = sorted(Floored(floors.seconds(d.dropped, d.groups), d) for d in every_decision(problem))
    floored: list[Floored] = problem.floored
    return floored


def _choices(problem: Problem, decision: Costed) -> list[int]:
    return [s for s in decision.dropped if problem.profile.storages[s].kind != "hidden"]


def _sets_of_inner(problem: Problem, decision: Costed) -> int:
    return 1 << len(_choices(problem, decision))


def _with_inner(problem: Problem, decision: Costed) -> Iterator[Judged]:
    choices = _choices(problem, decision)
    for count in range(1, len(choices) + 1):
        for inner in combinations(choices, count):
            try:
                yield problem.judged(decision.dropped, inner)
            except ValueError:  # these separate nothing
                continue
