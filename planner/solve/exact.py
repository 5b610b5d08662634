"""Every decision of a problem with few storages that may be dropped: nothing is left to guess there.

Of inner boundaries there are more sets than that: those are tried that may be in the cheapest decision, up to a number.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from itertools import combinations
from typing import NamedTuple

from ..facts import facts_of
from ..problem import Judged, Problem
from .bound import read_spans, used_until
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
            dropped = tuple(sorted(state.dropped))
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
    """A decision without inner boundaries, and what none that has some and drops the same storages costs less than."""

    floor_seconds: float
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
    tried, unseen = 0, math.inf
    for floor, decision in _floored(problem):
        if floor >= least:
            break
        if (decision.peak_bytes <= budget and decision.seconds <= floor) or least_peak(problem, decision) > budget:
            continue
        choices = [s for s in decision.dropped if problem.profile.storages[s].kind != "hidden"]
        tried += 1 << len(choices)
        if tried > MOST:
            unseen = floor
            break
        for judged in _with_inner(problem, decision.dropped, choices):
            if judged.peak_bytes <= budget and judged.seconds < least:
                best, least = judged, judged.seconds
    if best is not None:
        best = problem.judge(best.dropped, best.inner)
    found = Proven(best, min(least, unseen) if best is not None or unseen < math.inf else 0.0)
    problem.proven[problem.budget_bytes] = found
    return found


def _floored(problem: Problem) -> list[Floored]:
    """Every decision with the least that it costs with any inner boundaries, the least first."""
    if problem.floors is None:
        problem.floors = sorted(Floored(_floor_seconds(problem, d), d) for d in every_decision(problem))
    floors: list[Floored] = problem.floors
    return floors


def _floor_seconds(problem: Problem, decision: Costed) -> float:
    """Seconds that dropping these storages costs with any inner boundaries, at least.

    There are no fewer groups than without. One is added wherever a group that backward starts borrows; where it starts
    all of them and none borrows, it all costs what it does without.
    """
    slots = (problem.profile.slots[x] for s in decision.dropped for x in problem.slots_of[s])
    groups = decision.groups + all(slot.step >= 0 for slot in slots)
    seconds = [problem.cost[i] for i in surely_again(problem, decision.dropped)]
    return math.fsum([*seconds, *[problem.profile.replay_group_seconds] * groups])


def surely_again(problem: Problem, dropped: Iterable[int]) -> set[int]:
    """The operations that run again where these storages are dropped, whichever of them are inner boundaries.

    What a step reads is made again, and what that is made from, and each mere look by which something reads it. A look
    that needs more than what it looks into need not be made again at an inner boundary.
    """
    p, gone, look_of = problem.profile, set(dropped), facts_of(problem.profile).look_of
    stack = [problem.seed[x] for s in gone for x in problem.slots_of[s] if p.slots[x].step >= 0]
    again: set[int] = set()
    while stack:
        i = stack.pop()
        if i not in again:
            again.add(i)
            for s in {*(read.storage for read in p.ops[i].reads), *p.ops[i].output} & gone:
                stack += [p.storages[s].birth, *problem.touching.get(s, ())]
            stack += [r.producer for r in p.ops[i].reads if r.storage in gone and look_of.get(r.producer) == r.storage]
    return again


def _with_inner(problem: Problem, dropped: tuple[int, ...], choices: list[int]) -> Iterator[Judged]:
    for count in range(1, len(choices) + 1):
        for inner in combinations(choices, count):
            try:
                yield problem.judged(dropped, inner)
            except ValueError:  # these separate nothing
                continue


def least_peak(problem: Problem, decision: Costed) -> int:
    """Bytes that are live at some moment of any step that drops these storages, whichever are inner boundaries."""
    p, judged = problem.profile, problem.judge(decision.dropped)
    live = [p.resident_bytes + step.peak_bytes for step in p.steps]
    gone, again = set(decision.dropped), surely_again(problem, decision.dropped)
    spans, until = read_spans(problem), used_until(problem)
    for s, storage in enumerate(p.storages):
        if not problem.made[s]:
            continue
        first, last = spans.get(s, (0, -1))
        if s not in gone:
            reads = (until[i] for i in problem.readers[s] if i in again)
            first, last = 0, max(problem.last_step[s], min(len(live), max(reads, default=-1)))
            if storage.death > len(p.ops):
                last = len(live)
        for t in range(first, min(last + 1, len(live))):
            live[t] += storage.bytes
    return max(*judged.timeline.forward, judged.timeline.optimizer_bytes, *live)
