"""Where a step repeats itself: runs of equal blocks in its operations, and blocks of one kind wherever they are.

Models are made of layers that are alike. What is worth dropping within a layer can be found once and used for all of
them, if the layers are recognised, and names of modules say little: layers are unrolled by hand, fused, numbered, not
numbered. So blocks are read off the operations alone.

*Runs.* Each operation gets a symbol: its name, and the bytes of all that it reads, makes, saves and changes. A repeat
of period p shows as a stretch in which each symbol equals the one p places on. Which periods are looked at is decided
by vote: short windows of symbols are sorted, and each vote is the distance to the last window that is equal. A fixed
number of periods is looked at, each in time linear in the number of operations; what is found are the maximal
repetitions of Main and Lorentz (1984) for the periods that win. A run is cut where cutting keeps least, which for a
transformer is its residual stream.

*Kinds.* Two blocks are of one kind where their `form` is equal: the same operations on the same storages up to
numbering, with the same slots read in the same order. Names of modules and measured times have no part in it.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from ..schedule import EXTERNAL
from .segments import cheap_positions, crossing_bytes, needed_span, saved_before

PERIODS = 32  # periods that are looked at, those with the most votes
WINDOWS = (1, 4, 16)  # lengths of the windows that vote
LEAST = 3  # operations of the shortest block
WORTH = 2  # a block saves so many times as much for backward as a cut keeps, at least
PHASES, NEAR = 4, 1.25  # ways to cut a run that are compared, and how much more than the least they may keep
LARGEST = 300  # operations of the largest block that is worth deciding on its own
LONGEST = 120  # operations between runs that are one block; more are cut

Form = tuple[Any, ...]


class Run(NamedTuple):
    """Operations start..stop-1, in which each symbol equals the one `period` places before."""

    start: int
    stop: int
    period: int


class Block(NamedTuple):
    """Operations first..stop-1.

    Attributes:
        first, stop: the operations.
        storages: those that the block has to do with, numbered by first mention; equal forms number alike.
        inside: which of them, as positions in `storages`, may be dropped and are made and needed in the block alone.
        brought: which of them are made before it and needed for the last time within it.
        begin: the first backward step that reads a slot of what is inside; -1 if there is none.
        form: equal for blocks of one kind.
    """

    first: int
    stop: int
    storages: tuple[int, ...]
    inside: tuple[int, ...]
    brought: tuple[int, ...]
    begin: int
    form: Form


def symbols(problem: Problem) -> NDArray[np.int64]:
    """A number for each operation, equal where name, kinds and bytes are."""
    p = problem.profile
    number: dict[Form, int] = {}

    def sizes(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(p.storages[s].bytes for s in found)

    def symbol(op: Any) -> Form:
        reads = tuple(
            (p.storages[r.storage].kind if p.storages[r.storage].kind in EXTERNAL else "", p.storages[r.storage].bytes)
            for r in op.reads
        )
        made = sizes(op.makes), sizes(op.hides), sizes(op.writes), sizes(op.output)
        return op.name, reads, made, op.random, op.replay, op.inside

    return np.array([number.setdefault(symbol(op), len(number)) for op in p.ops], dtype=np.int64)


def runs(values: NDArray[np.int64], least: int = LEAST) -> list[Run]:
    """Stretches without overlap in which the values repeat, in order: the longest first, of these the shortest period.

    Args:
        values: a number for each place.
        least: the shortest period.

    Example:
        >>> runs(np.array([9, 1, 2, 3, 1, 2, 3, 1, 2, 3, 8]))
        [Run(start=1, stop=10, period=3)]
    """
    found = []
    for period in _periods(values, least):
        equal = np.concatenate(([False], values[:-period] == values[period:], [False]))
        edges = np.flatnonzero(equal[1:] != equal[:-1])
        for a, b in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if b - a >= period:
                found.append(Run(a, b + period, period))
    chosen: list[Run] = []
    taken = np.zeros(len(values), dtype=bool)
    for run in sorted(found, key=lambda r: (r.start - r.stop, r.period, r.start)):
        free = np.flatnonzero(~taken[run.start : run.stop])
        # What others have left of it; one stretch, since the others are stretches and no shorter.
        if not len(free) or free[-1] - free[0] + 1 != len(free) or len(free) < 2 * run.period:
            continue
        clipped = Run(run.start + int(free[0]), run.start + int(free[-1]) + 1, run.period)
        chosen.append(clipped)
        taken[clipped.start : clipped.stop] = True
    return sorted(chosen)


def _periods(values: NDArray[np.int64], least: int) -> list[int]:
    """The distances between equal windows that are met most often."""
    votes: Counter[int] = Counter()
    for length in WINDOWS:
        if len(values) < 2 * max(length, least):
            break
        windows = np.lib.stride_tricks.sliding_window_view(values, length)
        _, same = np.unique(windows, axis=0, return_inverse=True)
        same = same.reshape(-1)
        order = np.argsort(same, kind="stable")
        distance = np.diff(order)[np.diff(same[order]) == 0]
        votes.update(distance[distance >= least].tolist())
    return [p for p, _ in sorted(votes.items(), key=lambda item: (-item[1], item[0]))[:PERIODS]]


def blocks(problem: Problem, ranked: Callable[[list[Block]], list[int]] | None = None) -> list[list[Block]]:
    """All operations in blocks, in order: those of runs, and what lies between; once for each way to cut the runs.

    Args:
        problem: what is decided.
        ranked: where a run may be cut in several ways that keep about as little, a block of each is given, and the
            numbers of those worth having come back, the best first; the way that keeps least by default.

    Returns:
        The divisions, the best first; empty where nothing repeats.
    """
    n = len(problem.profile.ops)
    wanted = (run for run in runs(symbols(problem)) if run.period <= LARGEST)
    ways = [found for run in wanted if (found := _phases(problem, run))]
    for k, phases in enumerate(ways):
        # The second block is the first whose surroundings are those of the others.
        around = [block_of(problem, *(places[1:3] if len(places) > 2 else places[:2])) for places in phases]
        ways[k] = [phases[w] for w in ranked(around)] if ranked is not None and len(around) > 1 else phases[:1]
    divisions = []
    for rank in range(max(map(len, ways), default=0)):
        edges = sorted({0, n}.union(*(phases[min(rank, len(phases) - 1)] for phases in ways)))
        for a, b in pairwise(list(edges)):
            if b - a > LONGEST:
                edges += _cheapest_between(problem, a, b)
        divisions.append([block_of(problem, a, b) for a, b in pairwise(sorted(edges))])
    return divisions


def _phases(problem: Problem, run: Run) -> list[list[int]]:
    """Ways to cut a run at each period, those that keep least first; none where a block is not worth its cut."""
    price, saved = crossing_bytes(problem), saved_before(problem)
    ways: list[tuple[float, int, list[int]]] = []
    before = -1.0
    for phase in range(run.period):
        places = list(range(run.start + phase, run.stop + 1, run.period))
        mean = sum(price[x] for x in places) / len(places)  # some phases have one cut more
        if mean != before and len(places) > 1:
            ways.append((mean, phase, places))
        before = mean
    ways.sort()
    if not ways or (saved[run.stop] - saved[run.start]) * run.period <= WORTH * ways[0][0] * (run.stop - run.start):
        return []
    return [places for mean, _, places in ways[:PHASES] if mean <= NEAR * ways[0][0]]


def _cheapest_between(problem: Problem, a: int, b: int) -> list[int]:
    """Cheap positions that cut a..b into parts of about half of LONGEST."""
    price, found, last = crossing_bytes(problem), [], a
    near: list[int] = []
    for p in (x for x in cheap_positions(problem) if a < x < b):
        near.append(p)
        if p - last >= LONGEST // 2:
            last = min(near, key=lambda x: (price[x], -x))
            found.append(last)
            near = [x for x in near if x > last]
    return found


def block_of(problem: Problem, first: int, stop: int) -> Block:
    """The block of operations first..stop-1."""
    p = problem.profile
    number: dict[int, int] = {}
    for op in p.ops[first:stop]:
        for s in (*(r.storage for r in op.reads), *op.makes, *op.hides, *op.writes, *op.output):
            number.setdefault(s, len(number))
    storages = tuple(number)
    inside, brought = [], []
    for k, s in enumerate(storages):
        born, last = needed_span(problem, s)
        if problem.droppable[s] and first <= born and last < stop:
            inside.append(k)
        elif problem.made[s] and born < first and last < stop:
            brought.append(k)
    steps = [p.slots[x].step for k in inside for x in problem.slots_of[storages[k]] if p.slots[x].step >= 0]
    begin = min(steps, default=-1)
    block = Block(first, stop, storages, tuple(inside), tuple(brought), begin, ())
    return block._replace(form=_form(problem, block))


def _form(problem: Problem, block: Block) -> Form:
    """What two blocks of one kind have in common."""
    p, first, stop, begin = problem.profile, block.first, block.stop, block.begin
    number = {s: k for k, s in enumerate(block.storages)}
    inside, brought = ({block.storages[k] for k in found} for found in (block.inside, block.brought))

    def of(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[s] for s in found)

    def before(s: int) -> int:
        return sum(i < first for i in problem.touching.get(s, ()))

    form: list[Any] = []
    for s in block.storages:
        storage = p.storages[s]
        kind = storage.kind if storage.kind in EXTERNAL or storage.birth >= first else "input"
        slots = [p.slots[x] for x in problem.slots_of[s]] if s in inside or s in brought else []
        read = tuple((max(-1, x.op - first), max(-1, x.producer - first), max(-1, x.step - begin)) for x in slots)
        death = min(storage.death, stop + 1) - first if storage.birth >= first else -1
        form.append((storage.bytes, kind, s in inside, s in brought, death, read))
    for op in p.ops[first:stop]:
        reads = tuple((number[r.storage], max(-1, r.producer - first), r.version - before(r.storage)) for r in op.reads)
        made = of(op.makes), of(op.hides), of(op.writes), of(op.output), of(op.choices)
        form.append((op.name, reads, made, op.workspace_bytes, op.random, op.replay, op.inside, op.snapshot))
    return tuple(form)
