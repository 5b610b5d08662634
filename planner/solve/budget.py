"""Strategy "budget": the cheapest decision that keeps the budget, by linear programs over several segmentations.

Every segmentation is planned by its own linear program (see `segmented`). Cuts of the best are then moved one at a time
where that makes the plan cheaper, the result is solved again with integers, and the winner is improved by local search.
Whatever any other strategy offers is a candidate, too, so that the result is never worse than the best of them.
Candidates are believed only as far as the simulation agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from ..problem import Judged, Problem
from .blocks import block_cuts
from .improve import improved
from .segmented import SegmentedModel
from .segments import Cuts, balanced_cuts, cheap_positions, sqrt_count, tapered_cuts

INTEGRAL = 1  # how many segmentations are solved with integers
LARGE = 1500  # operations above which a model with integers takes longer than it is worth
WORK = 12_000  # operations in all the models of one search over cuts: bounds its time without looking at a clock
FEWEST = 6  # segmentations that are tried however large the model is
STARTS = 4  # how many decisions the local search starts from


def solve_budget(problem: Problem, others: list[Judged], expired: Callable[[], bool]) -> Judged | None:
    """The cheapest decision found that keeps the budget; None if none does.

    Args:
        problem: the profile and the budget.
        others: decisions of the other strategies.
        expired: whether time has run out, so that the best so far has to do.
    """
    search = _Search(problem, others, expired)
    # Large models make do with fewer: the first are the ones that win most often.
    for cuts in segmentations(problem)[: max(FEWEST, WORK // max(1, len(problem.profile.ops)))]:
        search.try_cuts(cuts)
    search.move_cuts()
    if len(problem.profile.ops) <= LARGE:
        search.with_integers()
    fitting = search.fitting()
    if not fitting or expired():
        return fitting[0] if fitting else None
    return min((improved(problem, j) for j in fitting[:STARTS]), key=lambda j: (j.seconds, j.dropped))


class _Search:
    """The decisions met so far, and the best plan of each segmentation."""

    def __init__(self, problem: Problem, others: list[Judged], expired: Callable[[], bool]) -> None:
        self.problem, self.expired = problem, expired
        self.pool: dict[tuple[int, ...], Judged] = {j.dropped: j for j in others}
        self.best_of: dict[Cuts, Judged] = {}

    def rank(self, judged: Judged) -> tuple[int, float, tuple[int, ...]]:
        """What keeps the budget comes first, then the cheapest."""
        return max(0, judged.peak_bytes - self.problem.budget_bytes), judged.seconds, judged.dropped

    def fitting(self) -> list[Judged]:
        """Decisions that keep the budget, cheapest first."""
        fit = [j for j in self.pool.values() if j.peak_bytes <= self.problem.budget_bytes]
        return sorted(fit, key=lambda j: (j.seconds, j.dropped))

    def try_cuts(self, cuts: Cuts) -> None:
        """Plans one segmentation, again below the budget where every plan exceeds it by a little."""
        if cuts in self.best_of or self.expired():
            return
        budget = self.problem.budget_bytes
        model = SegmentedModel(self.problem, cuts)
        plans = model.plans(budget)
        over = min((j.peak_bytes - budget for j in plans), default=0)
        if over > 0:
            plans += model.plans(budget - over, plans[-1], rounds=2)
        self.pool.update((j.dropped, j) for j in plans)
        if plans:
            self.best_of[cuts] = min(plans, key=self.rank)

    def ranked(self) -> list[Cuts]:
        """Segmentations, the one with the best plan first."""
        return sorted(self.best_of, key=lambda cuts: (self.rank(self.best_of[cuts]), cuts))

    def move_cuts(self) -> None:
        """Removes, adds or shifts cuts of the best segmentation as long as that makes its plan cheaper."""
        left = WORK // max(1, len(self.problem.profile.ops))
        improving = bool(self.best_of)
        while improving:
            improving = False
            best = self.ranked()[0]
            for cuts in self._neighbours(best):
                if cuts in self.best_of:
                    continue
                if left <= 0 or self.expired():
                    return
                left -= 1
                self.try_cuts(cuts)
                if cuts in self.best_of and self.rank(self.best_of[cuts]) < self.rank(self.best_of[best]):
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

    def with_integers(self) -> None:
        """Solves the best segmentations with integers; again below the budget by what the answer exceeds it."""
        for cuts in self.ranked()[:INTEGRAL]:
            if self.expired():
                return
            model = SegmentedModel(self.problem, cuts, integral=True)
            found = model.plans(self.problem.budget_bytes, self.best_of[cuts], rounds=2)
            over = min((j.peak_bytes - self.problem.budget_bytes for j in found), default=0)
            if over > 0:
                found += model.plans(self.problem.budget_bytes - over, found[-1], rounds=1)
            self.pool.update((j.dropped, j) for j in found)


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
