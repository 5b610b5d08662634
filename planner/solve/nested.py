"""Decisions with inner boundaries, for budgets that no decision without them keeps, or keeps only dearly.

A segment of a tight plan is cut again where it is replayed: what crosses such an inner cut is computed once more, by a
replay of its own, instead of being held with everything that it came from. This is the recursion of Chen, Xu, Zhang
and Guestrin, "Training Deep Nets with Sublinear Memory Cost" (2016), section 4.4, to a depth of two, with cuts that
are chosen by what they cost and hold: first regularly, then moved one at a time, and then storage by storage.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from random import Random
from typing import NamedTuple

from ..problem import Judged, Problem, make_problem
from .minimum import tight_segmentations, timeless
from .nestedstate import Moments, NestedState
from .segments import Cuts, cheap_positions, needed_span

# Of the cuts of a regular segmentation every so many is kept, and the others are inner; 0: none is kept.
STRIDES = (2, 3, 4, 5, 6, 8, 0)
# Work is counted in operations simulated, not by the clock, so that every machine finds the same plan.
REGULAR, MOVED, POLISHED = 200_000, 200_000, 2_400_000

FEW = 50  # decisions of which a search of a large graph that sees no more is left out
STARTS = 3  # how many regular decisions are improved
KICKS = 5  # storages that are changed by lot, at most, before a decision is improved again
IN_VAIN = 40  # such changes without any gain after which the search ends
LOW = 0.9  # what is live above this share of the smallest peak counts on the way to a smaller one
CLOSE = 1.001  # peaks this near to each other are one

Cost = tuple[float, ...]
NONE: Cost = (math.inf,)  # of what cannot be carried out


class Met(NamedTuple):
    """A decision, and how good it is: the smallest cost is the best."""

    cost: Cost
    dropped: frozenset[int]
    inner: frozenset[int]


class TwoCuts(NamedTuple):
    """A segmentation of two levels: what crosses `kept` is kept, what crosses `inner` is computed again by itself."""

    kept: Cuts
    inner: Cuts


def cheapest_nested(
    problem: Problem, starts: Iterable[Judged], expired: Callable[[], bool], work: float = 1.0
) -> Judged:
    """The cheapest decision with or without inner boundaries that keeps the budget, as far as this search finds it.

    Args:
        problem: the profile and the budget.
        starts: decisions to begin with; at least one that keeps the budget comes back if any of them does.
        expired: whether time has run out, so that the best so far has to do.
        work: how long to search, as a share of the ordinary.
    """

    def cost(moments: Moments) -> Cost:
        return moments.excess(problem.budget_bytes), moments.seconds

    return NestedSearch(problem, cost, expired).run(starts, work)


def smallest_nested(problem: Problem, smallest: Judged) -> Judged:
    """The decision with the smallest peak, with or without inner boundaries, whatever the problem's budget.

    Measured times do not enter: two profiles of one step must name the same smallest budget.

    Args:
        problem: the profile.
        smallest: the decision with the smallest peak without inner boundaries.
    """
    if smallest.peak_bytes <= CLOSE * unavoidable_bytes(problem):
        return smallest
    without_times = make_problem(timeless(problem.profile), problem.budget_bytes)
    start = without_times.judge(smallest.dropped)
    low = round(LOW * start.peak_bytes)

    def cost(moments: Moments) -> Cost:
        return moments.peak_bytes, moments.excess(low), moments.seconds

    found = NestedSearch(without_times, cost, lambda: False).run([start])
    # Where it is no smaller, what is cheaper and needs nothing of its own is the better answer.
    return smallest if found.peak_bytes * CLOSE > smallest.peak_bytes else problem.judge(found.dropped, found.inner)


def is_worth(problem: Problem, work: float) -> bool:
    """Whether a search for so long, as a share of the ordinary, would look at more than a few decisions."""
    return REGULAR * work >= FEW * len(problem.profile.ops)


def unavoidable_bytes(problem: Problem) -> int:
    """A peak that every plan reaches: that of the optimizer's step, of single operations and of single steps."""
    p = problem.profile
    once = [op.workspace_bytes for op in p.ops] + [step.peak_bytes for step in p.steps]
    return max(p.resident_bytes + max(once, default=0), problem.judge(()).timeline.optimizer_bytes)


class NestedSearch:
    """A search among decisions with inner boundaries.

    Args:
        problem: the profile and the budget.
        cost: how good a decision is.
        expired: whether time has run out.
    """

    def __init__(self, problem: Problem, cost: Callable[[Moments], Cost], expired: Callable[[], bool]) -> None:
        self.problem, self._cost, self.expired = problem, cost, expired
        self._state = NestedState(problem)
        self._known: dict[tuple[frozenset[int], frozenset[int]], Cost] = {}
        self._left = math.inf
        self.best = Met(NONE, frozenset(), frozenset())

    def run(self, starts: Iterable[Judged], work: float = 1.0) -> Judged:
        """The best decision that the whole search meets, its starts among them."""
        given = [((), ()), *((judged.dropped, judged.inner) for judged in starts)]
        first = sorted(filter(None, (self._try(*each) for each in given)), key=_best_first)
        found: dict[TwoCuts, Cost] = {}
        self._left = REGULAR * work
        for cuts in self._regular():
            if self.over:
                break
            if cuts not in found and (met := self._of_cuts(cuts)) is not None:
                found[cuts] = met.cost
        for cuts in sorted(found, key=lambda cuts: (found[cuts], cuts))[:STARTS]:
            self._left = MOVED * work / STARTS
            self._move_cuts(cuts, found)
        self._left = POLISHED * work
        for met in dict.fromkeys((self.best, *first[:1])):
            self._polish(met)
        self._shake(Random(0))
        return self.problem.judge(self.best.dropped, self.best.inner)

    @property
    def over(self) -> bool:
        """Whether this part of the search has to end."""
        return self._left <= 0 or self.expired()

    def _try(self, dropped: Iterable[int], inner: Iterable[int], than: Cost = NONE) -> Met | None:
        """What becomes of a decision.

        None where it cannot be carried out, is known to be no better `than` so much, or all the allotted work is done.
        """
        if self.over:
            return None
        self._left -= len(self.problem.profile.ops)
        if not self._state.move_to(dropped, inner):
            return None
        key = frozenset(self._state.dropped), frozenset(self._state.inner)
        cost = self._known.get(key)
        if cost is None:
            moments = self._state.moments()
            cost = self._known[key] = NONE if moments is None else self._cost(moments)
        if cost >= than:
            return None
        met = Met(cost, *key)
        if cost < self.best.cost:
            self.best = met
        return met

    # -- cuts -------------------------------------------------------------------------------------------------------

    def _regular(self) -> Iterator[TwoCuts]:
        """Segmentations of which every second, third and so on cut is kept."""
        regular = list(dict.fromkeys(tight_segmentations(self.problem)))
        for stride in STRIDES:
            for cuts in regular:
                for first in range(min(stride, 2) if stride else 1):
                    kept = cuts[first::stride] if stride else ()
                    yield TwoCuts(kept, tuple(c for c in cuts if c not in kept))

    def _of_cuts(self, cuts: TwoCuts) -> Met | None:
        dropped, inner = [], []
        for s in self.problem.candidates:
            first, last = needed_span(self.problem, s)
            if bisect_right(cuts.kept, first) == bisect_right(cuts.kept, last):
                dropped.append(s)
                if bisect_right(cuts.inner, first) != bisect_right(cuts.inner, last):
                    inner.append(s)
        return self._try(dropped, (s for s in inner if self._separates(s)))

    def _separates(self, s: int) -> bool:
        """Whether a storage may be an inner boundary."""
        return self.problem.profile.storages[s].kind != "hidden"

    def _move_cuts(self, cuts: TwoCuts, found: dict[TwoCuts, Cost]) -> None:
        """Adds, removes and turns cuts one at a time as long as that makes the decision better."""
        improving = True
        while improving:
            improving = False
            for other in self._neighbours(cuts):
                if self.over:
                    return
                if other in found:
                    continue
                met = self._of_cuts(other)
                found[other] = met.cost if met is not None else NONE
                if found[other] < found[cuts]:
                    cuts, improving = other, True
                    break

    def _neighbours(self, cuts: TwoCuts) -> Iterator[TwoCuts]:
        for p in sorted({*cuts.kept, *cuts.inner, *cheap_positions(self.problem)}, reverse=True):
            kept, inner = (tuple(c for c in level if c != p) for level in cuts)
            yield from (
                other
                for other in (
                    TwoCuts(kept, inner),
                    TwoCuts(tuple(sorted({*kept, p})), inner),
                    TwoCuts(kept, tuple(sorted({*inner, p}))),
                )
                if other != cuts
            )

    # -- storages ---------------------------------------------------------------------------------------------------

    def _polish(self, at: Met) -> None:
        """Keeps, drops and makes boundaries of single storages as long as that makes the decision better."""
        storages = self.problem.profile.storages
        # What is dear to compute for what it weighs comes first: keeping it is what pays most.
        dear = {s: self.problem.cost[storages[s].birth] / max(1, storages[s].bytes) for s in self.problem.candidates}
        improving = True
        while improving:
            improving = False
            for s in sorted(dear, key=lambda s: (-dear[s], s)):
                for other in self._changed(at, s):
                    if self.over:
                        return
                    met = self._try(*other, at.cost)
                    if met is not None and met.cost < at.cost:
                        at, improving = met, True
                        break

    def _shake(self, lot: Random) -> None:
        """Changes the best decision in a few places by lot and improves it again, as long as work is left."""
        candidates, in_vain = self.problem.candidates, 0
        while not self.over and candidates and in_vain < IN_VAIN:
            before = self.best
            dropped, inner = set(self.best.dropped), set(self.best.inner)
            for s in lot.sample(candidates, min(len(candidates), lot.randint(1, KICKS))):
                kind = lot.randrange(3)
                (dropped.discard if kind == 0 else dropped.add)(s)
                (inner.add if kind == 2 and self._separates(s) else inner.discard)(s)
            met = self._try(dropped, inner)
            if met is not None:
                self._polish(met)
            in_vain = 0 if self.best.cost < before.cost else in_vain + 1

    def _changed(self, met: Met, s: int) -> Iterator[tuple[frozenset[int], frozenset[int]]]:
        """A decision with one storage kept, merely dropped, or made a boundary, whichever it is not."""
        dropped, inner = met.dropped, met.inner
        if s in dropped:
            yield dropped - {s}, inner - {s}
        if s not in dropped or s in inner:
            yield dropped | {s}, inner - {s}
        if s not in inner and self._separates(s):
            yield dropped | {s}, inner | {s}


def _best_first(met: Met) -> tuple[Cost, list[int]]:
    return met.cost, sorted(met.dropped)
