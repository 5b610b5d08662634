"""What every plan that drops given storages costs and holds at least, whichever of them are inner boundaries."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np

from ..facts import facts_of
from ..problem import Problem
from .bound import read_spans, used_until


class Sure(NamedTuple):
    """What happens whichever storages are inner boundaries: `ops` run again, and `filled` storages are made again."""

    ops: set[int]
    filled: set[int]


class Floors:
    """The floors of one profile's decisions; what they need of it is looked up once.

    Args:
        problem: the profile; its budget is not asked for.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self._facts = problem, facts_of(problem.profile)
        self._spans, self._until = read_spans(problem), used_until(problem)
        self._optimizer_bytes = problem.judge(()).timeline.optimizer_bytes

    def surely(self, dropped: Iterable[int]) -> Sure:
        """What happens where these are dropped.

        What a step reads is made again, and what that is made from, and each mere look by which something reads it. A
        look that needs more than what it looks into need not be made again at an inner boundary, nor need a write be
        into one that nobody reads.
        """
        p, gone, look_of = self.problem.profile, set(dropped), self._facts.look_of
        read = [x for s in gone for x in self.problem.slots_of[s] if p.slots[x].step >= 0]
        stack, again, filled = [self.problem.seed[x] for x in read], set[int](), set[int]()

        def fill(storages: set[int]) -> None:
            for s in storages - filled:
                filled.add(s)
                stack.extend([p.storages[s].birth, *self.problem.touching.get(s, ())])

        fill({p.slots[x].storage for x in read})
        while stack:
            if (i := stack.pop()) not in again:
                again.add(i)
                fill({r.storage for r in p.ops[i].reads} & gone)
                stack += [
                    r.producer for r in p.ops[i].reads if r.storage in gone and look_of.get(r.producer) == r.storage
                ]
        return Sure(again, filled)

    def seconds(self, dropped: tuple[int, ...], groups: int) -> float:
        """Seconds that dropping these costs at least, unless it costs no less than without inner boundaries.

        There are no fewer groups than without. One is added wherever a group that backward starts borrows; where it
        surely starts all of them and none borrows, it all costs what it does without.

        Args:
            dropped: the storages.
            groups: how many groups backward starts without inner boundaries.
        """
        p, sure = self.problem.profile, self.surely(dropped)
        all_read = all(p.slots[x].step >= 0 for s in dropped for x in self.problem.slots_of[s])
        groups += all_read and sure.filled.issuperset(dropped)
        return math.fsum([*(self.problem.cost[i] for i in sure.ops), *[p.replay_group_seconds] * groups])

    def peak_bytes(self, dropped: Iterable[int]) -> int:
        """Bytes that are live at some moment of any step that drops these."""
        p, n, m = self.problem.profile, len(self.problem.profile.ops), len(self.problem.profile.steps)
        gone, again = set(dropped), self.surely(dropped).ops
        # Differences of live bytes at the start of each operation, and at each step.
        forward, backward = np.zeros(n + 2, dtype=np.int64), np.zeros(m + 2, dtype=np.int64)
        for s, storage in enumerate(p.storages):
            if not self.problem.made[s]:
                continue
            if s in gone:
                first, last = self._spans.get(s, (0, -1))
            else:
                reads = (self._until[i] for i in self.problem.readers[s] if i in again)
                first, last = 0, max(self.problem.last_step[s], max(reads, default=-1))
                last = m if storage.death > n else min(last, m)
            forward[storage.birth + 1] += storage.bytes
            forward[storage.death if s in gone or last < 0 else n + 1] -= storage.bytes
            backward[first] += storage.bytes
            backward[last + 1] -= storage.bytes
        operations = np.cumsum(forward)[:n] + self._facts.workspace
        steps = np.cumsum(backward)[:m] + self._facts.step_peaks
        most = max(int(operations.max(initial=0)), int(steps.max(initial=0)))
        return max(p.resident_bytes + most, self._optimizer_bytes)
