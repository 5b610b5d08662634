"""The decision with the smallest peak that can be found: what an infeasible budget is answered with."""

from __future__ import annotations

import msgspec

from ..problem import Judged, Problem, make_problem
from ..profile import Profile
from .blocks import block_cuts, solve_all
from .improve import lowered
from .segmented import SegmentedModel
from .segments import Cuts, balanced_cuts, cheap_positions, inside_segments, sqrt_count, tapered_cuts


def smallest_first(judged: Judged) -> tuple[int, float, tuple[int, ...]]:
    """Sorts decisions by peak, then by cost."""
    return judged.peak_bytes, judged.seconds, judged.dropped


def tight_segmentations(problem: Problem) -> list[Cuts]:
    """Segmentations of many sizes, each once: balanced at every scale, tapered towards the end, by blocks."""
    root, cheap = sqrt_count(problem), cheap_positions(problem)
    found: list[Cuts] = [(), block_cuts(problem), cheap]
    counts = sorted({max(1, round(root * 1.25**k)) for k in range(-10, 8)} | set(range(2, 9)))
    found += [balanced_cuts(problem, count) for count in counts]
    found += [balanced_cuts(problem, count, cheap) for count in counts]
    everything = sum(s.bytes for s in problem.profile.storages) + problem.profile.gradient_bytes
    found += [tapered_cuts(problem, everything * 0.85**k, cheap) for k in range(30)]
    return list(dict.fromkeys(found))


def solve_minimum(problem: Problem) -> Judged:
    """The decision with the smallest simulated peak among many segmentations, refined by their linear programs.

    Measured times do not enter: two profiles of one step must name the same smallest budget.
    """
    return problem.judge(_search(make_problem(_timeless(problem.profile), problem.budget_bytes)).dropped)


def _timeless(profile: Profile) -> Profile:
    """The profile with times made up from bytes, which every measurement of the same step agrees on."""
    ops = tuple(msgspec.structs.replace(op, seconds=1e-6 + 1e-10 * op.workspace_bytes) for op in profile.ops)
    return msgspec.structs.replace(profile, ops=ops)


def _search(problem: Problem) -> Judged:
    plain = problem.judge(())
    scanned: dict[tuple[int, ...], tuple[Judged, Cuts]] = {}
    for cuts in tight_segmentations(problem):
        judged = problem.judge(inside_segments(problem, cuts))
        scanned.setdefault(judged.dropped, (judged, cuts))
    ranked = sorted(scanned.values(), key=lambda pair: smallest_first(pair[0]))
    best = min([plain, solve_all(problem), ranked[0][0]], key=smallest_first)
    # Every model is scaled by the budget; any fixed one makes the answer independent of what was asked.
    scaled = problem.with_budget(best.peak_bytes)
    for judged, cuts in ranked[:4]:
        plans = SegmentedModel(scaled, cuts).plans(0.0, judged, rounds=4)
        best = min([best, *plans], key=smallest_first)
    return min((lowered(problem, start) for start in (best, plain)), key=smallest_first)
