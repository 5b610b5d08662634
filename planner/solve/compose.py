"""One option for each block of a step, so that the step keeps the budget at the least cost.

Blocks keep bytes from their own place in forward to their own place in backward, so what is live around a block is what
the blocks before it keep, and what it does itself. With K_b(o) the bytes by which option o of block b changes what is
kept after it, every operation and step of the block has the row
    live there when all is kept + sum of K over the blocks before + change by the block's own option <= budget,
with the profile's own timeline in the first term: gradients are there as they appear, and early in backward there is
more room than late. So the choice is a shortest path through the blocks in the order of forward, whose states are pairs
of kept bytes and seconds; of these only the pairs that no other beats in both are carried on, with the bytes from which
what is left cannot be made to fit cut off (dynamic programming with dominance, as for the knapsack; Nemhauser and
Ullmann, 1969). Of very many pairs, the cheapest of each stretch of kept bytes are carried on.

Neighbours may be taken as one block that drops what lies between them, which is how a step is cut at fewer places than
it has blocks. What a composition leaves out is in what it counts for blocks that do not nest in backward as they do in
forward; it is judged when it is carried out.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from .alone import alone
from .options import TRIED, Effect, corners, effects, options
from .repeats import LONGEST, Block, Form, block_of, blocks
from .state import State
from .tables import tables_of

PAIRS = 500  # pairs that are carried on from one block to the next
TOGETHER = 4  # so many neighbours, at most, are taken as one block
SAME = 0.01  # ways to cut a run that differ by less are one
AROUND = 8  # stretches on either side from which the price of a byte is read off
OFTEN = 3  # a kind with so many blocks is worth more work than one with fewer
SELDOM = 8  # so many times less work for the others
DIVISIONS = 2  # so many of them are composed
NOWHERE = -(1 << 60)


class Part(NamedTuple):
    """Neighbouring blocks, or one, with what they may drop.

    Attributes:
        before, after: how many blocks there are before them, and with them.
        storages: those that they have to do with.
        effects: one for each option.
        kept: K of each option, bytes.
        peak: for each option, most bytes live within the blocks if those before them keep all.
        seconds: of each option.
    """

    before: int
    after: int
    storages: tuple[int, ...]
    effects: list[Effect]
    kept: NDArray[np.int64]
    peak: NDArray[np.int64]
    seconds: NDArray[np.float64]


class Pairs(NamedTuple):
    """Kept bytes and seconds that can be had up to a block, with where each comes from: part, option, pair before."""

    kept: NDArray[np.int64]
    seconds: NDArray[np.float64]
    part: NDArray[np.int64]
    option: NDArray[np.int64]
    source: NDArray[np.int64]


class Composer:
    """The blocks of a step with their options, for all its budgets.

    Args:
        problem: the profile.

    Attributes:
        divisions: for each way to cut the step in blocks, its parts in the order of forward.
        repeats: whether some kind of block is met often.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._known: dict[tuple[Form, int, int, int], list[Effect]] = {}
        state = State(problem)
        self._forward, self._backward = state.forward(), state.backward()
        self._blocks: list[list[Block]] = []
        for found in blocks(problem, self._ranked):
            chosen = [block for block in found if block.begin >= 0]
            if chosen and all(a.begin > b.begin for a, b in pairwise(chosen)):
                self._blocks.append(chosen)
        self.divisions = [list(self._parts(number, 1)) for number in range(len(self._blocks))]
        self._joined: dict[int, list[list[Part]]] = {0: self.divisions}
        alike = Counter(block.form for chosen in self._blocks for block in chosen)
        self.repeats = max(alike.values(), default=0) >= OFTEN

    def joined(self, least_alike: int) -> list[list[Part]]:
        """The divisions, with neighbours taken as one block where there are at least so many alike; 0 for none."""
        if least_alike not in self._joined:
            self._joined[least_alike] = [
                parts + [part for count in range(2, TOGETHER + 1) for part in self._parts(number, count, least_alike)]
                for number, parts in enumerate(self.divisions)
            ]
        return self._joined[least_alike]

    def adds(self, least_alike: int) -> bool:
        """Whether any neighbours are taken as one block."""
        return sum(map(len, self.joined(least_alike))) > sum(map(len, self.divisions))

    def _ranked(self, around: list[Block]) -> list[int]:
        """Of blocks that are cut from a run in different ways, the numbers of the best that differ.

        Each is worth the least of seconds and kept bytes together, as a mean over several prices of a byte.
        """
        ways = []
        for block in around:
            if block.begin < 0:
                ways.append([(1, 0.0)])
                continue
            small = alone(self.problem, block, [block])
            # What the block before has made is its own matter.
            other = sum(small.profile.storages[k].bytes for k in block.brought if small.slots_of[k])
            ways.append([(max(1, o.kept - other), o.seconds) for o in corners(small)])
        seconds = max(1e-12, max(s for way in ways for _, s in way))
        size = max(k for way in ways for k, _ in way)
        prices = [4.0**x * seconds / size for x in range(-3, 4)]

        def worth(way: list[tuple[int, float]]) -> float:
            return math.fsum(math.log(min(s + price * k for k, s in way)) for price in prices) / len(prices)

        ranked: list[int] = []
        for value, w in sorted((worth(way), w) for w, way in enumerate(ways)):
            if all(value - worth(ways[other]) > SAME for other in ranked):
                ranked.append(w)
        return ranked[:DIVISIONS]

    def _parts(self, number: int, count: int, least_alike: int = 1) -> Iterator[Part]:
        """Every `count` neighbours of a division as one block, where there are at least so many alike."""
        chosen = self._blocks[number]
        found: list[tuple[int, Block]] = []
        for k in range(len(chosen) - count + 1):
            first, stop = chosen[k].first, chosen[k + count - 1].stop
            if count == 1:
                found.append((k, chosen[k]))
            elif stop - first <= LONGEST:
                found.append((k, block_of(self.problem, first, stop)))
        alike: dict[Form, list[Block]] = {}
        for _, block in found:
            alike.setdefault(block.form, []).append(block)
        for k, block in found:
            same = alike[block.form]
            if len(same) < least_alike:
                continue
            # What one block can do is found once for all divisions; more depends on what is between them.
            key = block.form, count, number if count > 1 else 0, least_alike
            if key not in self._known:
                between = self._between(block, chosen[k : k + count])
                small = alone(self.problem, block, same)
                has = count == 1 or any(small.droppable[s] for s in between)
                effort = TRIED // (1 if count > 1 and least_alike == 1 else count if len(same) >= OFTEN else SELDOM)
                self._known[key] = effects(small, options(small, between, effort) if has else [])
            if known := self._known[key]:
                end = chosen[k - 1].begin if k else len(self._backward)
                begin = 0 if k + count == len(chosen) else block.begin
                yield self._part(k, k + count, block, known, begin, end)

    def _between(self, block: Block, within: list[Block]) -> list[int]:
        """What is inside of several blocks together and of none of them alone."""
        alone_in = {other.storages[x] for other in within for x in other.inside}
        return [x for x in block.inside if len(within) > 1 and block.storages[x] not in alone_in]

    def _part(self, before: int, after: int, block: Block, known: list[Effect], begin: int, end: int) -> Part:
        p, peaks, seconds = self.problem, [], []
        rows = self._forward[block.first : block.stop]
        later = int(self._backward[begin : block.begin].max(initial=NOWHERE))
        steps = self._backward[block.begin : max(end, block.begin)]
        for effect in known:
            own = steps.copy()
            change = effect.backward[: len(own)]
            own[: len(change)] += change
            live = int((rows + effect.forward).max()), int(own.max(initial=NOWHERE)), later + effect.kept
            peaks.append(max(live))
            again = math.fsum(p.cost[block.first + i] for i in effect.again)
            seconds.append(again + p.profile.replay_group_seconds * effect.groups)
        kept = np.array([effect.kept for effect in known], dtype=np.int64)
        return Part(before, after, block.storages, known, kept, np.array(peaks, dtype=np.int64), np.array(seconds))

    def compose(self, budget_bytes: int, least_alike: int = 0) -> list[list[int]]:
        """For each division, the storages to drop for the least seconds within the budget, where there are any.

        Args:
            budget_bytes: most bytes that may be live.
            least_alike: neighbours are taken as one block, too, where so many are alike; 0 for none.

        Example:
            >>> Composer(problem).compose(problem.budget_bytes)  # doctest: +SKIP
            [[4, 5, 9, 17, 18]]
        """
        found = (composed(parts, budget_bytes) for parts in self.joined(least_alike) if parts)
        return [dropped for dropped in found if dropped is not None]


def composer_of(problem: Problem) -> Composer:
    """The composer of a problem, made once for all its budgets."""
    tables = tables_of(problem)
    if tables.composer is None:
        tables.composer = Composer(problem)
    found: Composer = tables.composer
    return found


def composed(parts: list[Part], budget_bytes: int) -> list[int] | None:
    """The storages to drop for the least seconds within the budget; None where nothing keeps it."""
    last = max(part.after for part in parts)
    # Most kept bytes before a block so that the rest can still be made to fit.
    room = [NOWHERE] * last + [-NOWHERE]
    for part in sorted(parts, key=lambda part: -part.after):
        fits = int(np.minimum(budget_bytes - part.peak, room[part.after] - part.kept).max())
        room[part.before] = max(room[part.before], fits)
    if room[0] < 0:
        return None
    none = np.zeros(1, dtype=np.int64)
    at = [Pairs(none, np.zeros(1), none, none, none)]
    for k in range(1, last + 1):
        reached = [
            _reached(at[part.before], part, number, budget_bytes, room[k])
            for number, part in enumerate(parts)
            if part.after == k
        ]
        at.append(_undominated(Pairs(*(np.concatenate(columns) for columns in zip(*reached, strict=True)))))
    k, pair = last, int(np.lexsort((at[last].kept, at[last].seconds))[0])
    dropped: list[int] = []
    while k:
        part = parts[int(at[k].part[pair])]
        dropped += [part.storages[x] for x in part.effects[int(at[k].option[pair])].dropped]
        k, pair = part.before, int(at[k].source[pair])
    return dropped


def _reached(pairs: Pairs, part: Part, number: int, budget_bytes: int, room: int) -> Pairs:
    """The pairs after a part."""
    kept = pairs.kept[:, None] + part.kept[None, :]
    source, option = np.nonzero((pairs.kept[:, None] + part.peak[None, :] <= budget_bytes) & (kept <= room))
    seconds = pairs.seconds[source] + part.seconds[option]
    return Pairs(kept[source, option], seconds, np.full(len(source), number), option, source)


def _undominated(pairs: Pairs) -> Pairs:
    """Those that no other beats in bytes and seconds; of very many, the best of each stretch of bytes."""
    if not len(pairs.kept):
        return pairs
    # By seconds: a pair stays if it keeps less than all before it.
    order = np.argsort(pairs.seconds, kind="stable")
    kept = pairs.kept[order]
    order = order[np.concatenate(([True], kept[1:] < np.minimum.accumulate(kept)[:-1]))]
    if len(order) > PAIRS:
        order = order[_thinned(pairs.kept[order], pairs.seconds[order])]
    kept, seconds, part, option, source = pairs
    return Pairs(kept[order], seconds[order], part[order], option[order], source[order])


def _thinned(kept: NDArray[np.int64], seconds: NDArray[np.float64]) -> NDArray[np.int64]:
    """Of pairs by falling bytes and rising seconds, the best of each stretch of bytes, and the last of all.

    The best is nearest to the lower hull: the seconds that a byte costs are taken from the neighbouring stretches.
    """
    stretch = (kept - kept[-1]) * PAIRS // max(1, int(kept[0] - kept[-1]))
    first = np.flatnonzero(np.concatenate(([True], stretch[1:] != stretch[:-1])))
    left = first[np.maximum(np.arange(len(first)) - AROUND, 0)]
    right = np.append(first, len(kept) - 1)[np.minimum(np.arange(len(first)) + AROUND, len(first))]
    price = (seconds[right] - seconds[left]) / np.maximum(kept[left] - kept[right], 1)
    of = np.repeat(np.arange(len(first)), np.diff(np.append(first, len(kept))))
    value = seconds + price[of] * (kept - kept[-1])
    best = np.lexsort((value, of))[first]
    return np.append(best[:-1], len(kept) - 1) if best[-1] != len(kept) - 1 else best
