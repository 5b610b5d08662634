"""The decision with the smallest peak that can be found: what an infeasible budget is answered with."""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from ..problem import Judged, Problem, make_problem
from ..profile import Profile
from . import exact
from .blocks import block_cuts, solve_all
from .local import LocalSearch
from .segmented import SegmentedModel
from .segments import Cuts, balanced_cuts, cheap_positions, sqrt_count, tapered_cuts, within_segments
from .state import State

STARTS = 3  # decisions that local search starts from
SOLVED = 4  # segmentations whose models are solved
ROUNDS = 3  # how often each is
WORK = 100_000  # operations that local search looks at from each start


def tight_segmentations(problem: Problem) -> Iterator[Cuts]:
    """Segmentations of many sizes, some more than once: by blocks, balanced at every scale, tapered towards the end."""
    root, cheap = sqrt_count(problem), cheap_positions(problem)
    yield from (block_cuts(problem), cheap, ())
    counts = sorted({max(1, round(root * 1.25**k)) for k in range(-10, 8)} | set(range(2, 9)))
    for allowed in (cheap, None):
        yield from (balanced_cuts(problem, count, allowed) for count in counts)
    everything = sum(s.bytes for s in problem.profile.storages) + problem.profile.gradient_bytes
    yield from (tapered_cuts(problem, everything * 0.85**k, cheap) for k in range(30))


def solve_minimum(problem: Problem) -> Judged:
    """The decision with the smallest simulated peak among many segmentations, refined by their linear programs.

    Measured times do not enter: two profiles of one step must name the same smallest budget.
    """
    if exact.is_small(problem):
        return problem.judge(exact.smallest(problem).dropped)
    return problem.judge(_search(make_problem(timeless(problem.profile), problem.budget_bytes)))


def timeless(profile: Profile) -> Profile:
    """The profile with times made up from bytes, which every measurement of the same step agrees on.

    Example:
        >>> timeless(profile).ops[0].seconds  # doctest: +SKIP
        1.1e-06
    """
    ops = tuple(msgspec.structs.replace(op, seconds=1e-6 + 1e-10 * op.workspace_bytes) for op in profile.ops)
    return msgspec.structs.replace(profile, ops=ops)


def kept_by_segments(problem: Problem) -> tuple[int, ...] | None:
    """What the first segmentation drops that keeps the budget as it is; None where none does.

    Where one does, the smallest peak need not be looked for.
    """
    state = State(problem)
    for cuts in tight_segmentations(problem):
        state.move_to(within_segments(problem, cuts))
        if state.peak_bytes() <= problem.budget_bytes:
            return tuple(state.dropped)
    return None


def _search(problem: Problem) -> tuple[int, ...]:
    """What the decision with the smallest peak drops."""
    state, scanned = State(problem), dict[tuple[int, float, tuple[int, ...]], Cuts]()

    def here() -> tuple[int, float, tuple[int, ...]]:
        return state.peak_bytes(), state.seconds, tuple(sorted(state.dropped))

    plain = here()
    for cuts in dict.fromkeys(tight_segmentations(problem)):
        state.move_to(within_segments(problem, cuts))
        scanned.setdefault(here(), cuts)
    state.move_to(solve_all(problem).dropped)
    ranked = sorted(scanned)
    found = [plain, here(), *ranked[:STARTS]]
    # Every model is scaled by the budget; any fixed one makes the answer independent of what was asked.
    scaled = problem.with_budget(min(found)[0])
    for start in ranked[:SOLVED]:
        model = SegmentedModel(scaled, scanned[start])
        state.move_to(start[2])
        for _ in range(ROUNDS):
            model.set_bases(state, 0.0)
            values = model.solve()
            if values is None:
                break
            rounded = []
            for threshold in (0.999, 0.5, 0.001):
                state.move_to(s for s, v in values.items() if v >= threshold)
                rounded.append(here())
            found.append(min(rounded))
            state.move_to(found[-1][2])
    local = LocalSearch(problem, 0, lambda: False)
    for start in [*sorted(found)[:STARTS], plain]:
        local.left = WORK
        state.move_to(start[2])
        local.lower(state)
        found.append(here())
    state.move_to(min(found)[2])
    local.left = WORK
    local.descend(state)
    return here()[2]
