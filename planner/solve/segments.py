"""Where to cut the forward pass, and what a segmentation means: drop what stays inside a segment, keep what crosses.

A cut is a position p: it lies before operation p. A segmentation is a sorted tuple of cuts; n cuts make n + 1 segments.
"""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from functools import cached_property
from itertools import accumulate

from ..problem import Problem

Cuts = tuple[int, ...]


class Positions:
    """What the functions of this module find out about a problem, once for all its budgets."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @cached_property
    def spans(self) -> list[tuple[int, int]]:
        """`needed_span` of each storage."""
        return [_span(self._problem, s) for s in range(len(self._problem.made))]

    @cached_property
    def crossing(self) -> list[int]:
        """See `crossing_bytes`."""
        return _crossing(self._problem)

    @cached_property
    def saved(self) -> list[int]:
        """See `saved_before`."""
        return _saved(self._problem)

    @cached_property
    def cheap(self) -> Cuts:
        """See `cheap_positions`."""
        return _cheap(self._problem)


def positions_of(problem: Problem) -> Positions:
    """The same for one problem, made once."""
    if problem.positions is None:
        problem.positions = Positions(problem)
    found: Positions = problem.positions
    return found


def needed_span(problem: Problem, s: int) -> tuple[int, int]:
    """The first and the last operation that have to do with a storage: its birth, its last reader or saver."""
    return positions_of(problem).spans[s]


def _span(problem: Problem, s: int) -> tuple[int, int]:
    ops = [*problem.readers[s], *problem.touched[s], *(problem.profile.slots[x].op for x in problem.slots_of[s])]
    return problem.profile.storages[s].birth, max(ops, default=problem.profile.storages[s].birth)


def crossing_bytes(problem: Problem) -> list[int]:
    """For each position 0..len(ops), bytes of what is made before it and needed at or after it: the price of a cut."""
    return positions_of(problem).crossing


def _crossing(problem: Problem) -> list[int]:
    difference = [0] * (len(problem.profile.ops) + 2)
    for s in problem.candidates:
        first, last = needed_span(problem, s)
        difference[first + 1] += problem.profile.storages[s].bytes
        difference[last + 1] -= problem.profile.storages[s].bytes
    return list(accumulate(difference))[:-1]


def saved_before(problem: Problem) -> list[int]:
    """For each position 0..len(ops), bytes of droppable storages saved for backward that are born before it."""
    return positions_of(problem).saved


def _saved(problem: Problem) -> list[int]:
    born = [0] * (len(problem.profile.ops) + 1)
    for s in problem.candidates:
        if problem.slots_of[s]:
            born[problem.profile.storages[s].birth + 1] += problem.profile.storages[s].bytes
    return list(accumulate(born))


def inside_segments(problem: Problem, cuts: Cuts) -> tuple[int, ...]:
    """The decision that drops whatever is made and needed within one segment, and keeps what crosses a cut."""
    return problem.repaired(within_segments(problem, cuts))


def within_segments(problem: Problem, cuts: Cuts) -> list[int]:
    """The storages that are made and needed within one segment."""
    wish = []
    for s in problem.candidates:
        first, last = needed_span(problem, s)
        if bisect_right(cuts, first) == bisect_right(cuts, last):
            wish.append(s)
    return wish


def balanced_cuts(problem: Problem, count: int, allowed: Cuts | None = None) -> Cuts:
    """Cuts that make about `count` segments of equal saved bytes, each at the cheapest position near its ideal place.

    Args:
        problem: what is cut.
        count: how many segments are wanted; fewer come back where the cheapest positions coincide.
        allowed: positions to choose from; every position by default.
    """
    price, saved = crossing_bytes(problem), saved_before(problem)
    total, n = saved[-1], len(problem.profile.ops)
    positions = allowed if allowed is not None else tuple(range(1, n))
    bytes_at = [saved[p] for p in positions]
    chosen: set[int] = set()
    for k in range(1, count):
        ideal = total * k / count
        # Within half a segment of the ideal place, or the nearest position where there is none.
        close = total / (2 * count)
        begin = max(0, bisect_left(bytes_at, ideal - close) - 1)
        some = positions[begin : bisect_right(bytes_at, ideal + close) + 1]
        near = [p for p in some if abs(saved[p] - ideal) * 2 * count <= total]
        if not near:
            near = sorted(positions, key=lambda p: (abs(saved[p] - ideal), p))[:1]
        if near:
            chosen.add(min(near, key=lambda p: (price[p], abs(saved[p] - ideal), p)))
    return tuple(sorted(chosen))


def cheap_positions(problem: Problem) -> Cuts:
    """Positions where a cut keeps little: the cheapest of each stretch in which the price is locally least."""
    return positions_of(problem).cheap


def _cheap(problem: Problem) -> Cuts:
    price, n = crossing_bytes(problem), len(problem.profile.ops)
    found, p = [], 1
    while p < n:
        q = p
        while q + 1 < n and price[q + 1] == price[p]:
            q += 1
        before = price[p - 1] if p > 1 else price[p] + 1
        after = price[q + 1] if q + 1 < n else price[p] + 1
        if before > price[p] and after > price[p]:
            found.append(p)
        p = q + 1
    return tuple(found)


def tapered_cuts(problem: Problem, room: float, allowed: Cuts) -> Cuts:
    """Segments that each fill `room` bytes at their own replay: short ones late in forward, long ones early.

    The replay of a segment meets all cuts before it still kept, so the later a segment lies, the less room is left.
    Gradients grow the other way. Working from the first segment on, each is made as long as fits.
    """
    price, saved = crossing_bytes(problem), saved_before(problem)
    n, gradients = len(problem.profile.ops), _gradients_at(problem)
    cuts: list[int] = []
    begin, kept = 0, 0
    ends = [p for p in allowed if 0 < p < n] + [n]
    for k, p in enumerate(ends):
        following = ends[k + 1] if k + 1 < len(ends) else None
        if following is None:
            break
        if saved[following] - saved[begin] + kept + gradients[begin] > room:
            cuts.append(p)
            kept += price[p]
            begin = p
    return tuple(cuts)


def _gradients_at(problem: Problem) -> list[int]:
    """For each operation, the most gradients live while its own backward runs or that of anything before it begins."""
    steps, n = problem.profile.steps, len(problem.profile.ops)
    found, current = [0] * (n + 1), 0
    for step in steps:
        if step.op >= 0:
            found[step.op] = max(found[step.op], step.live_bytes)
    for i in reversed(range(n)):
        current = found[i] or current
        found[i] = current
    return found


def segments_by_bytes(problem: Problem, count: int | None = None) -> tuple[int, ...]:
    """The storages to drop when forward is cut into `count` segments of equal saved bytes; `sqrt_count` by default.

    Backward need not be known: the profile may have no steps.
    """
    if count is None:
        count = sqrt_count(problem)
    return inside_segments(problem, balanced_cuts(problem, count))


def sqrt_count(problem: Problem) -> int:
    """The number of segments at which kept crossings weigh about as much as one segment: Chen's sqrt(n), in bytes."""
    price, saved = crossing_bytes(problem), saved_before(problem)
    if not saved[-1]:
        return 1
    cheapest = sorted(price[p] for p in cheap_positions(problem)) or [max(price)]
    # Of the local minima the cheaper half is what cuts will use.
    crossing = max(1, cheapest[len(cheapest) // 4])
    return max(1, min(round(math.sqrt(saved[-1] / crossing)), len(cheapest) + 1))
