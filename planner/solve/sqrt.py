"""Strategy "sqrt": Chen et al. 2016, segments of equal bytes with everything inside recomputed.

The paper balances nodes; here it is saved bytes that are balanced, and cuts are moved to where few bytes cross. Several
segment counts around the square root are simulated, since the best one depends on gradients and crossings.
"""

from __future__ import annotations

from ..problem import Judged, Problem
from .segments import balanced_cuts, inside_segments, sqrt_count


def sqrt_candidates(problem: Problem) -> list[Judged]:
    """One decision for each segment count tried, by count."""
    root = sqrt_count(problem)
    counts = sorted({max(1, round(root * factor)) for factor in (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)})
    found: dict[tuple[int, ...], Judged] = {}
    for count in counts:
        judged = problem.judge(inside_segments(problem, balanced_cuts(problem, count)))
        found.setdefault(judged.dropped, judged)
    return list(found.values())


def solve_sqrt(problem: Problem) -> Judged:
    """The cheapest candidate that keeps the budget; the one with the smallest peak if none does."""
    found = sqrt_candidates(problem)
    fitting = [j for j in found if j.peak_bytes <= problem.budget_bytes]
    if fitting:
        return min(fitting, key=lambda j: (j.seconds, j.peak_bytes, j.dropped))
    return min(found, key=lambda j: (j.peak_bytes, j.seconds, j.dropped))
