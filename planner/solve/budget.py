"""Strategy "budget": the cheapest decision that keeps the budget, by linear programs over several segmentations.

Every segmentation is planned by its own linear program (see `segmented`). The best few are solved again with integers,
and the winner is improved by local search. Whatever any other strategy offers is a candidate, too, so that the result
is never worse than the best of them. Candidates are believed only as far as the simulation agrees.
"""

from __future__ import annotations

from collections.abc import Callable

from ..problem import Judged, Problem
from .blocks import block_cuts
from .improve import improved
from .segmented import SegmentedModel
from .segments import Cuts, balanced_cuts, cheap_positions, sqrt_count, tapered_cuts

INTEGRAL = 2  # how many segmentations are solved with integers
LARGE = 1500  # operations above which a model with integers takes longer than it is worth


def solve_budget(problem: Problem, others: list[Judged], expired: Callable[[], bool]) -> Judged | None:
    """The cheapest decision found that keeps the budget; None if none does.

    Args:
        problem: the profile and the budget.
        others: decisions of the other strategies.
        expired: whether time has run out, so that the best so far has to do.
    """
    budget = problem.budget_bytes
    pool: dict[tuple[int, ...], Judged] = {j.dropped: j for j in others}
    ranked: list[tuple[tuple[float, float], Cuts, Judged]] = []
    for cuts in segmentations(problem):
        if expired():
            break
        model = SegmentedModel(problem, cuts)
        plans = model.plans(budget)
        over = [j.peak_bytes - budget for j in plans if j.peak_bytes > budget]
        if over and len(over) == len(plans):
            plans += model.plans(budget - min(over), plans[-1], rounds=2)
        pool.update((j.dropped, j) for j in plans)
        if plans:
            best = min(plans, key=lambda j: (max(0, j.peak_bytes - budget), j.seconds, j.dropped))
            ranked.append(((max(0, best.peak_bytes - budget), best.seconds), cuts, best))
    ranked.sort(key=lambda entry: (entry[0], entry[1]))
    if len(problem.profile.ops) <= LARGE:
        for _, cuts, start in ranked[:INTEGRAL]:
            if expired():
                break
            pool.update((j.dropped, j) for j in _integral(problem, cuts, start))
    fitting = sorted((j for j in pool.values() if j.peak_bytes <= budget), key=lambda j: (j.seconds, j.dropped))
    if not fitting:
        return None
    if expired():
        return fitting[0]
    return improved(problem, fitting[0])


def _integral(problem: Problem, cuts: Cuts, start: Judged) -> list[Judged]:
    """Plans of the model with integers; solved again below the budget by what the first answer exceeds it."""
    model = SegmentedModel(problem, cuts, integral=True)
    found = model.plans(problem.budget_bytes, start, rounds=2)
    over = min((j.peak_bytes - problem.budget_bytes for j in found), default=0)
    if over > 0:
        found += model.plans(problem.budget_bytes - over, found[-1], rounds=1)
    return found


def segmentations(problem: Problem) -> list[Cuts]:
    """The segmentations that are tried, each once: blocks, parts of blocks, several blocks, tapered to the budget."""
    blocks, cheap, root = block_cuts(problem), cheap_positions(problem), sqrt_count(problem)
    found = [blocks, cheap, tuple(sorted({*blocks, *cheap})), blocks[::2], blocks[1::2], blocks[::3], blocks[::4]]
    for factor in (0.35, 0.5, 0.7, 1.0, 1.4, 2.0):
        found.append(balanced_cuts(problem, max(1, round(root * factor)), cheap))
    found.append(balanced_cuts(problem, root))
    room = problem.budget_bytes - problem.profile.resident_bytes
    for share in (1.0, 0.8, 0.6, 0.45, 0.3, 0.2):
        found.append(tapered_cuts(problem, room * share, cheap))
    return list(dict.fromkeys(found))
