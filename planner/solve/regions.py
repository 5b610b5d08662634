"""Choosing regions to checkpoint: segmentations of forward, of which each part is wrapped or not.

Every segmentation that the other strategies know is tried, with all of its parts wrapped; where that keeps the budget,
parts are unwrapped and results within parts kept as far as the budget allows, the dearest seconds for a byte first.
Candidates are believed only as far as the simulation agrees.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import msgspec

from ..checkpointed import simulate_regions
from ..problem import Problem
from ..regions import OP_SECONDS, SELECTIVE_OP_SECONDS, Region, Regional
from ..schedule import Schedule
from ..simulate import Timeline, simulate
from .blocks import block_cuts, block_of_ops
from .minimum import tight_segmentations
from .segments import Cuts, balanced_cuts, sqrt_count

REFINED = 6  # segmentations that are refined
TRIES = 600  # simulations in one refinement, at most

Regions = tuple[Region, ...]


class Wrapped(msgspec.Struct, frozen=True):
    """Regions, and what the simulation says of them.

    Attributes:
        regions: in order and apart.
        seconds: what they cost.
        peak_bytes: most bytes live at any moment of the step.
        timeline: bytes at each moment.
    """

    regions: Regions
    seconds: float
    peak_bytes: int
    timeline: Timeline


class RegionProblem:
    """A problem for which regions are chosen; remembers what was simulated.

    Args:
        problem: the profile and the budget.
        regional: what regions mean for the profile.
    """

    def __init__(self, problem: Problem, regional: Regional) -> None:
        self.problem, self.regional = problem, regional
        self._judged: dict[Regions, Wrapped] = {}

    def judge(self, regions: Iterable[Region]) -> Wrapped:
        """What the simulation says of regions."""
        key = tuple(sorted(regions, key=lambda r: r.first))
        if key not in self._judged:
            profile = self.problem.profile
            # Without regions the model itself runs, not its graph.
            timeline = simulate_regions(self.regional, key) if key else simulate(profile, Schedule(profile, ()))
            seconds = sum(self.regional.seconds(r) for r in key)
            self._judged[key] = Wrapped(key, seconds, timeline.peak_bytes, timeline)
        return self._judged[key]

    def wrapped(self, cuts: Cuts) -> Wrapped:
        """Everything between cuts that can be wrapped and frees something."""
        edges = [0, *cuts, self.regional.inside]
        found: list[Region] = []
        for first, stop in pairwise(edges):
            found += self.regional.within(first, min(stop, self.regional.inside))
        return self.judge(found)

    def all_blocks(self) -> Wrapped:
        """Every repeated block, as by hand."""
        block, found, i = block_of_ops(self.problem), list[Region](), 0
        while i < self.regional.inside:
            stop = i + 1
            while stop < self.regional.inside and block[stop] == block[i]:
                stop += 1
            found += self.regional.within(i, stop) if block[i] >= 0 else ()
            i = stop
        return self.judge(found)

    def square_roots(self) -> list[Wrapped]:
        """Chen's segments, for counts around the square root."""
        root = sqrt_count(self.problem)
        counts = sorted({max(1, round(root * factor)) for factor in (0.5, 0.7, 0.85, 1.0, 1.2, 1.5, 2.0)})
        return [self.wrapped(balanced_cuts(self.problem, count)) for count in counts]

    def candidates(self) -> list[Wrapped]:
        """Every segmentation with all its parts wrapped, each once."""
        cuts = [*tight_segmentations(self.problem), block_cuts(self.problem)]
        found = [self.all_blocks(), *self.square_roots(), *map(self.wrapped, dict.fromkeys(cuts))]
        return list({w.regions: w for w in found}.values())


def smallest_regions(problem: RegionProblem) -> Wrapped:
    """The choice with the smallest peak that is found."""
    best = min([problem.judge(()), *problem.candidates()], key=lambda w: (w.peak_bytes, w.seconds, _key(w)))
    improving = True
    while improving:  # a part that frees less than running it again takes
        improving = False
        for region in best.regions:
            other = problem.judge(r for r in best.regions if r is not region)
            if other.peak_bytes < best.peak_bytes:
                best, improving = other, True
                break
    return best


def solve_regions(problem: RegionProblem, strategy: str, expired: Callable[[], bool]) -> Wrapped | None:
    """The cheapest choice found that keeps the budget; None if none does.

    Args:
        problem: the profile, the budget and what can be wrapped.
        strategy: as `solve` takes it.
        expired: whether time has run out, so that the best so far has to do.
    """
    budget, plain = problem.problem.budget_bytes, problem.judge(())
    if strategy == "none":
        return plain
    if strategy == "all":
        return problem.all_blocks()
    if strategy == "sqrt":
        roots = problem.square_roots()
        fitting = [w for w in roots if w.peak_bytes <= budget]
        return min(fitting, key=_cheapest) if fitting else min(roots, key=lambda w: (w.peak_bytes, w.seconds, _key(w)))
    if plain.peak_bytes <= budget:
        return plain
    found = [*problem.candidates(), smallest_regions(problem)]
    fitting = sorted((w for w in found if w.peak_bytes <= budget), key=_cheapest)
    if not fitting:
        return None
    # The cheapest as they are, and those with the most room to unwrap.
    roomy = sorted(fitting, key=lambda w: (w.peak_bytes, w.seconds, _key(w)))
    chosen = {w.regions: w for w in (*fitting[: REFINED // 2], *roomy[: REFINED // 2])}
    refined = [fitting[0]]
    for start in chosen.values():
        if expired():
            break
        refined.append(_refined(problem, start))
    return min(refined, key=_cheapest)


def _refined(problem: RegionProblem, start: Wrapped) -> Wrapped:
    """Unwraps regions, then keeps results within them, as far as the budget allows."""
    budget, regional, best, tries = problem.problem.budget_bytes, problem.regional, start, TRIES
    by_price = sorted(start.regions, key=lambda r: (-regional.seconds(r) / max(1, regional.freed(r)), r.first))
    for region in by_price:
        other = problem.judge(r for r in best.regions if r is not region)
        tries -= 1
        if other.peak_bytes <= budget and other.seconds < best.seconds:
            best = other
    for region in sorted(best.regions, key=lambda r: (-regional.seconds(r), r.first)):
        for more in _keeping(regional, region):
            if tries <= 0:
                return best
            other = problem.judge(more if r.first == region.first else r for r in best.regions)
            tries -= 1
            if other.peak_bytes > budget:
                break
            if other.seconds < best.seconds:
                best = other
    return best


def _keeping(regional: Regional, region: Region) -> list[Region]:
    """The region with more and more results kept, the dearest seconds for a byte first."""
    profile = regional.profile
    again = regional.again(region)
    able = [i for i in again if _keepable(regional, i)]
    able.sort(key=lambda i: (-profile.ops[i].seconds / max(1, _bytes(regional, i)), i))
    # What selecting costs has to be worth it.
    extra = (SELECTIVE_OP_SECONDS - OP_SECONDS) * len(again)
    if sum(profile.ops[i].seconds for i in able) <= extra:
        return []
    counts = sorted({max(1, len(able) * k // 8) for k in range(1, 9)}) if able else []
    return [Region(region.first, region.stop, tuple(sorted(able[:count]))) for count in counts]


def _keepable(regional: Regional, i: int) -> bool:
    """Whether its results can be kept: new memory that nothing changes, and no random draw that later ones follow."""
    op = regional.profile.ops[i]
    made = (*op.makes, *op.hides)
    return bool(op.makes) and not op.random and not op.writes and not any(regional.final.get(s, 0) for s in made)


def _bytes(regional: Regional, i: int) -> int:
    op = regional.profile.ops[i]
    return sum(regional.profile.storages[s].bytes for s in (*op.makes, *op.hides))


def _cheapest(wrapped: Wrapped) -> tuple[float, int, Any]:
    return wrapped.seconds, wrapped.peak_bytes, _key(wrapped)


def _key(wrapped: Wrapped) -> Any:
    """Orders regions that are equal otherwise, so that the answer is the same every time."""
    return tuple((r.first, r.stop, r.kept) for r in wrapped.regions)
