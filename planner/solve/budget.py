"""Strategy "budget": the cheapest decision that keeps the budget, by composing blocks and by linear programs.

Where blocks repeat, an option for each is chosen first (see `compose`). Every segmentation of a family is planned by
its own linear program (see `segmented`) and rounded part by part. Cuts of the best are then moved one at a time where
that makes the plan cheaper, and the winners are improved by local search (see `local`). Whatever any other strategy
offers is a candidate, too, so that the result is never worse than the best of them. Candidates are believed only as
far as the simulation agrees.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from ..problem import Judged, Problem
from .blocks import block_cuts
from .compose import composer_of
from .local import LocalSearch
from .relax import parts_of
from .segmented import SegmentedModel
from .segments import Cuts, balanced_cuts, cheap_positions, sqrt_count, tapered_cuts, within_segments
from .state import State

# Work is bounded by counting it, not by the clock, so that every machine finds the same plan.
TRIED, MOVED = 4_500, 3_500  # operations in all the models of the first segmentations, and of those with moved cuts
FEWEST = 3  # segmentations that are tried however large the model is
FAR = 0.02  # a gap of a composition above which it is improved less by itself
COMPOSED = 4  # so many times fewer are tried where blocks have been composed
ROUNDS = 2  # how often a segmentation's model is solved
LOCAL, MORE = 160_000, 100  # operations that local search looks at, and so many more for each of the step's moments
LEAST, EACH = 100_000, 400  # the same for small problems
WIDER, WIDEST = 6, 6_000_000  # where very much is open: how many times as long, and the most operations
# Where much is left open, operations that local search looks at: for each of the model's, up to a number, and of a
# large model for each of its own at least.
DEEPER, DEEP, LARGE = 3_000, 10_000_000, 1_600
STARTS = 3  # how many decisions it starts from
THRESHOLDS = (0.01, 0.5, 0.99)  # what a relaxed decision drops by more is dropped where a plan starts from it


class Found(NamedTuple):
    """A decision met on the way; the smallest is the best."""

    excess: int
    seconds: float
    dropped: tuple[int, ...]


class Search:
    """The search for the cheapest decision that keeps the budget: what it has met so far is there at any time.

    Args:
        problem: the profile and the budget.
        expired: whether time has run out, so that the best so far has to do.
    """

    def __init__(self, problem: Problem, expired: Callable[[], bool]) -> None:
        self.problem, self.expired = problem, expired
        self.state = State(problem)
        self.local = LocalSearch(problem, 0, expired)
        self.pool: set[Found] = set()
        self.best_of: dict[Cuts, Found] = {}
        self.starts: list[frozenset[int]] = []
        self.composed = False

    def no_less_than(self, seconds: float) -> None:
        """No decision costs less than this: once met, nothing is left to look for."""
        self.local.floor = max(self.local.floor, seconds)

    @property
    def over(self) -> bool:
        """Whether the search has to end, or has nothing left to find."""
        return self.expired() or self.least_seconds() <= self.local.floor * (1 + 1e-9)

    def add(self, judged: Judged) -> None:
        """A decision of another strategy, as a candidate."""
        self.state.move_to(judged.dropped)
        self.pool.add(self.here())

    def start_from(self, values: dict[int, float]) -> None:
        """Takes a relaxed decision, which says how far each storage is dropped, as several to improve.

        It knows less of working memory than a segmentation's model, but it is free to drop across all cuts.
        """
        self.pool.add(self.rounded(values, parts_of(self.problem, values)))
        for least in THRESHOLDS:
            self.state.move_to(s for s, v in values.items() if v > least)
            self.starts.append(frozenset(self.state.dropped))

    def compose(self, joined: int = 0) -> None:
        """Composes blocks that repeat (see `compose`), and improves the best of what comes of it.

        Where the composition exceeds the budget, by what several blocks need in common, it is made once more below it.

        Args:
            joined: neighbours are taken as one block, too, where there are at least so many alike; 0 for none.
        """
        composer = composer_of(self.problem)
        if not composer.repeats or (joined and not composer.adds(joined)):
            return
        target = self.problem.budget_bytes
        found: list[Found] = []
        for _ in range(ROUNDS):
            if self.over:
                return
            excess = []
            for dropped in composer.compose(target, joined):
                self.state.move_to(dropped)
                found.append(self.here())
                excess.append(self.state.peak_bytes() - self.problem.budget_bytes)
            if min(excess, default=0) <= 0:
                break
            target -= min(excess)
        if found:
            self.pool.update(found)
            self.composed = True
            # Where much is left open, more is looked for elsewhere first.
            self.local.left = self._work() // ((STARTS + 1) * (1 if self.gap() < FAR else 3))
            self.state.move_to(min(found).dropped)
            self.local.run(self.state)
            self.pool.add(self.here())

    def gap(self) -> float:
        """The share of what the best decision met costs that the bound leaves open; 1 where none keeps the budget."""
        least = self.least_seconds()
        return 1.0 if least == math.inf else (least - self.local.floor) / max(least, 1e-12)

    def run(self, wide: bool = True) -> None:
        """The search over many segmentations, over a few of them where blocks have been composed, and from the best.

        Without `wide` no segmentation is tried where blocks have been composed.
        """
        size = max(1, len(self.problem.profile.ops)) * (COMPOSED if self.composed else 1)
        if wide or not self.composed:
            # Large models make do with fewer: the first are the ones that win most often.
            for cuts in segmentations(self.problem)[: max(FEWEST, TRIED // size)]:
                self.try_cuts(cuts)
            self.move_cuts(MOVED // size)
        self.improve()

    def here(self) -> Found:
        """The state as it is, its seconds summed anew, so that they do not depend on the way here by a rounding."""
        seconds = math.fsum(group.seconds for group in self.state.groups.values())
        return Found(self.state.excess(self.problem.budget_bytes), seconds, tuple(sorted(self.state.dropped)))

    def try_cuts(self, cuts: Cuts) -> None:
        """Plans one segmentation, the second time below the budget where the first plan exceeds it by a little."""
        if cuts in self.best_of or self.over:
            return
        budget, target = self.problem.budget_bytes, float(self.problem.budget_bytes)
        model = SegmentedModel(self.problem, cuts)
        self.state.move_to(within_segments(self.problem, cuts))
        found = []
        for _ in range(ROUNDS):
            model.set_bases(self.state, target)
            values = model.solve()
            if values is None:
                break
            found.append(self.rounded(values, parts_of(self.problem, values)))
            self.state.move_to(found[-1].dropped)
            target = float(budget - max(0, self.state.peak_bytes() - budget))
        if found:
            self.pool.update(found)
            self.best_of[cuts] = min(found)

    def rounded(self, values: dict[int, float], parts: list[list[int]]) -> Found:
        """The decision that drops what the model drops, and of what it halves the parts that there is no room for.

        Parts are kept as long as that does not exceed the budget by more: once from the last one on, whose memory is
        let go first, and once from the first.
        """
        found = []
        for order in (parts[::-1], parts) if len(parts) > 1 else (parts,):
            self.state.move_to(s for s, v in values.items() if v > 0.01)
            for part in order:
                excess, seconds = self.state.excess(self.problem.budget_bytes), self.state.seconds
                undo = self.state.change((), part)
                if self.state.excess(self.problem.budget_bytes) > excess or self.state.seconds >= seconds:
                    self.state.undo(undo)
            found.append(self.here())
        return min(found)

    def move_cuts(self, left: int) -> None:
        """Removes, adds or shifts cuts of the best segmentation as long as that makes its plan cheaper.

        At most `left` segmentations are tried.
        """
        improving = bool(self.best_of)
        while improving:
            improving = False
            best = min(self.best_of, key=lambda cuts: (self.best_of[cuts], cuts))
            for cuts in self._neighbours(best):
                if cuts in self.best_of:
                    continue
                if left <= 0 or self.over:
                    return
                left -= 1
                self.try_cuts(cuts)
                if cuts in self.best_of and self.best_of[cuts] < self.best_of[best]:
                    improving = True
                    break

    def _neighbours(self, cuts: Cuts) -> Iterator[Cuts]:
        """Segmentations that differ by one cut, the late ones first: there memory is scarcest."""
        cheap = cheap_positions(self.problem)
        for p in sorted({*cuts, *cheap}, reverse=True):
            if p in cuts:
                yield tuple(c for c in cuts if c != p)
            else:
                yield tuple(sorted({*cuts, p}))

    def improve(self, more: int = 1) -> None:
        """Local search from the relaxed decisions and the best met, then by lot around the best of all.

        With `more`, so many times as long, and from those relaxed decisions again from which it was too short.
        """
        left = total = self._work()
        if more > 1:
            left = total = max(total, min(more * total, WIDEST))
        best = [frozenset(found.dropped) for found in sorted(self.pool)[:STARTS]]
        starts = list(dict.fromkeys([*self.starts, *best]))
        self.starts = []
        for start in starts:
            if self.over:
                return
            self.local.left = share = min(left, total // (len(starts) + 1))
            self.state.move_to(start)
            self.local.run(self.state)
            self.pool.add(self.here())
            if self.local.left <= 0:
                self.starts.append(start)
            left -= share - self.local.left
        nearest = min(self.pool)
        if not nearest.excess and not self.over:
            self.local.left = left
            self.state.move_to(nearest.dropped)
            self.local.shake(self.state, Random(0))
            self.pool.add(self.here())

    def _work(self) -> int:
        """Operations that local search looks at in a round."""
        moments = self.state.t.n + self.state.t.m
        return min(LEAST + EACH * moments, LOCAL + MORE * moments)

    def deepen(self, wide: bool) -> None:
        """Goes on for longer where the bound leaves much open, from the best decision and then by lot."""
        if wide:
            self.improve(WIDER)
        n = self.state.t.n
        self.local.left = max(LARGE * n, min(DEEPER * n, DEEP))
        self.state.move_to(min(self.pool).dropped)
        self.local.run(self.state)
        self.pool.add(self.here())
        if self.fits() and not self.over:
            self.state.move_to(min(self.pool).dropped)
            self.local.shake(self.state, Random(1))
            self.pool.add(self.here())

    def fits(self) -> bool:
        """Whether a decision that keeps the budget has been met."""
        return any(not found.excess for found in self.pool)

    def least_seconds(self) -> float:
        """What the cheapest decision met costs that keeps the budget; infinite where none does."""
        return min((found.seconds for found in self.pool if not found.excess), default=math.inf)

    def result(self) -> Judged | None:
        """The cheapest decision that keeps the budget, as the simulation judges it."""
        for found in sorted(self.pool)[:STARTS]:
            judged = self.problem.judge(found.dropped)
            # The simulation has the last word.
            if judged.peak_bytes <= self.problem.budget_bytes:
                return judged
        return None


def segmentations(problem: Problem) -> list[Cuts]:
    """The segmentations that are tried, each once: blocks, parts of blocks, several blocks, tapered to the budget."""
    blocks, cheap, root = block_cuts(problem), cheap_positions(problem), sqrt_count(problem)
    room = problem.budget_bytes - problem.profile.resident_bytes
    found = [blocks, cheap]
    found += [tapered_cuts(problem, room * share, cheap) for share in (0.8, 0.45, 0.3)]
    found += [balanced_cuts(problem, max(1, round(root * factor)), cheap) for factor in (1.0, 0.5, 2.0, 0.7, 1.4, 0.35)]
    found += [tapered_cuts(problem, room * share, cheap) for share in (1.0, 0.6, 0.2)]
    found += [tuple(sorted({*blocks, *cheap})), blocks[::2], blocks[1::2], blocks[::3], balanced_cuts(problem, root)]
    return list(dict.fromkeys(found))
