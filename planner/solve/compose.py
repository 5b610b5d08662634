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

What a composition leaves out is between blocks: storages that several of them need are kept. It is exact in what it
counts for blocks that nest in backward as they do in forward; what it cannot see is judged when it is carried out.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from .alone import alone
from .options import Effect, effects, options
from .repeats import Block, Form, blocks
from .state import State

PAIRS = 1_000  # pairs that are carried on from one block to the next
SMALLEST = 0.5  # share of what may be dropped that must lie within blocks for a composition to be worth its while


class Part(NamedTuple):
    """A block with its options.

    Attributes:
        block: the block.
        effects: one for each option.
        kept: K of each option, bytes.
        peak: for each option, most bytes live within the block if the blocks before it keep all.
        forward: K in forward, where Python holds some of what is dropped for longer than the block.
        seconds: of each option.
    """

    block: Block
    effects: list[Effect]
    kept: NDArray[np.int64]
    peak: NDArray[np.int64]
    seconds: NDArray[np.float64]


class Composer:
    """The blocks of a step with their options, for all budgets.

    Args:
        problem: the profile.

    Attributes:
        parts: blocks with more than one option, in the order of forward; empty where nothing repeats.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        found = [block for block in blocks(problem, self._best_phase) if block.begin >= 0]
        alike: dict[Form, list[Block]] = {}
        for block in found:
            alike.setdefault(block.form, []).append(block)
        known: dict[Form, list[Effect]] = {}
        for form, same in alike.items():
            small = alone(problem, same[0], same)
            known[form] = effects(small, options(small))
        state = State(problem)
        forward, backward = state.forward(), state.backward()
        self.parts: list[Part] = []
        ends = [block.begin for block in found[1:]] and [len(backward), *(block.begin for block in found[:-1])]
        for k, block in enumerate(found):
            begin = 0 if k == len(found) - 1 else block.begin
            self.parts.append(self._part(block, known[block.form], forward, backward, begin, ends[k]))

    def _part(
        self,
        block: Block,
        known: list[Effect],
        forward: NDArray[np.int64],
        backward: NDArray[np.int64],
        begin: int,
        end: int,
    ) -> Part:
        p, peaks, seconds = self.problem, [], []
        rows = forward[block.first : block.stop]
        before = backward[begin : block.begin].max(initial=0)
        steps = backward[block.begin : max(end, block.begin)]
        for effect in known:
            own = steps.copy()
            change = effect.backward[: len(own)]
            own[: len(change)] += change
            peaks.append(max(int((rows + effect.forward).max()), int(own.max(initial=0)), int(before) + effect.kept))
            again = sum(p.cost[block.first + i] for i in effect.again)
            seconds.append(again + p.profile.replay_group_seconds * effect.groups)
        kept = np.array([effect.kept for effect in known], dtype=np.int64)
        return Part(block, known, kept, np.array(peaks, dtype=np.int64), np.array(seconds))

    def _best_phase(self, around: list[Block]) -> int:
        """Of blocks that are cut from a run in different ways, the number of the one whose options are the best.

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
            ways.append([(max(1, o.kept - other), o.seconds) for o in options(small)])
        seconds = max(s for way in ways for _, s in way)
        size = max(k for way in ways for k, _ in way)
        prices = [4.0**x * seconds / size for x in range(-3, 4)]

        def worth(way: list[tuple[int, float]]) -> float:
            return math.fsum(math.log(max(1e-12, min(s + price * k for k, s in way))) for price in prices)

        return min(range(len(ways)), key=lambda w: (round(worth(ways[w]), 6), w))

    def compose(self, budget_bytes: int) -> list[int] | None:
        """The storages to drop for one option a block, the least seconds within the budget; None where none is."""
        parts = self.parts
        room = [np.iinfo(np.int64).max // 4] * (len(parts) + 1)  # most kept bytes before a block so that the rest fits
        for k in reversed(range(len(parts))):
            room[k] = int(np.minimum(budget_bytes - parts[k].peak, room[k + 1] - parts[k].kept).max())
        if not parts or room[0] < 0:
            return None
        kept, seconds = np.zeros(1, dtype=np.int64), np.zeros(1)
        back: list[tuple[NDArray[np.int64], NDArray[np.int64]]] = []
        for k, part in enumerate(parts):
            total = kept[:, None] + part.kept[None, :]
            allowed = (kept[:, None] + part.peak[None, :] <= budget_bytes) & (total <= room[k + 1])
            source, option = np.nonzero(allowed)
            total_kept, total_seconds = total[source, option], seconds[source] + part.seconds[option]
            # By seconds, then bytes: a pair stays if it keeps less than all that are cheaper.
            order = np.lexsort((option, source, total_kept, total_seconds))
            ordered = total_kept[order]
            least = np.minimum.accumulate(ordered)
            order = order[np.concatenate(([True], ordered[1:] < least[:-1]))]
            order = _thinned(order, total_kept[order])
            kept, seconds = total_kept[order], total_seconds[order]
            back.append((source[order], option[order]))
        at = int(np.lexsort((kept, seconds))[0])
        dropped: list[int] = []
        for part, (source, option) in zip(reversed(parts), reversed(back), strict=True):
            dropped += [part.block.storages[x] for x in part.effects[int(option[at])].dropped]
            at = int(source[at])
        return dropped


def _thinned(order: NDArray[np.int64], kept: NDArray[np.int64]) -> NDArray[np.int64]:
    """Of pairs by rising seconds and falling bytes, the first of each stretch of bytes, and the last of all."""
    if len(order) <= PAIRS:
        return order
    high, low = int(kept[0]), int(kept[-1])
    stretch = (kept - low) * PAIRS // max(1, high - low)
    first = np.concatenate(([True], stretch[1:] != stretch[:-1]))
    first[-1] = True
    return order[first]
