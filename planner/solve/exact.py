"""Every decision of a problem with few storages that may be dropped: nothing is left to guess there.

Of inner boundaries there are more sets than that: those are tried that may be in the cheapest decision, up to a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import combinations
from typing import NamedTuple

from ..problem import Judged, Problem
from .bound import read_spans, used_until
from .state import State

FEW = 12  # storages that may be dropped: 4096 decisions
MOST = 5_000  # decisions with inner boundaries that are tried


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
            # Summed anew, so that it does not depend on the way here by a rounding.
            seconds = math.fsum(group.seconds for group in state.groups.values())
            found[dropped] = Costed(seconds, state.peak_bytes(), dropped)
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


def cheapest_of_all(problem: Problem) -> Proven:
    """The cheapest decision, with or without inner boundaries.

    Inner boundaries change neither what is kept nor what runs again, but for running some of it once more. So one with
    them costs as much as the one without, and a group more: only those are tried that may be the cheapest.
    """
    plain = cheapest(problem)
    best, least = (problem.judge(plain.dropped), plain.seconds) if plain is not None else (None, math.inf)
    tried = 0
    for decision in every_decision(problem):
        floor = decision.seconds + problem.profile.replay_group_seconds
        if floor >= least:
            break
        budget = problem.budget_bytes
        if decision.peak_bytes <= budget or least_peak(problem, decision.dropped) > budget:
            continue
        choices = [s for s in decision.dropped if problem.profile.storages[s].kind != "hidden"]
        tried += 1 << len(choices)
        if tried > MOST:
            return Proven(best, floor)
        for judged in _with_inner(problem, decision.dropped, choices):
            if judged.peak_bytes <= budget and judged.seconds < least:
                best, least = judged, judged.seconds
    return Proven(best and problem.judge(best.dropped, best.inner), least if best is not None else 0.0)


def _with_inner(problem: Problem, dropped: tuple[int, ...], choices: list[int]) -> Iterator[Judged]:
    for count in range(1, len(choices) + 1):
        for inner in combinations(choices, count):
            try:
                yield problem.judged(dropped, inner)
            except ValueError:  # these separate nothing
                continue


def least_peak(problem: Problem, dropped: tuple[int, ...]) -> int:
    """Bytes that are live at some moment of any step that drops these storages, however they are computed again."""
    p, judged = problem.profile, problem.judge(dropped)
    live = [p.resident_bytes + step.peak_bytes for step in p.steps]
    gone, spans, until = set(dropped), read_spans(problem), used_until(problem)
    for s, storage in enumerate(p.storages):
        if not problem.made[s]:
            continue
        first, last = spans.get(s, (0, -1))
        if s not in gone:
            reads = (until[i] for i in problem.readers[s] if i in judged.again)
            first, last = 0, max(problem.last_step[s], min(len(live), max(reads, default=-1)))
            if storage.death > len(p.ops):
                last = len(live)
        for t in range(first, min(last + 1, len(live))):
            live[t] += storage.bytes
    return max(*judged.timeline.forward, judged.timeline.optimizer_bytes, *live)
