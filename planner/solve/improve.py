"""Local search around a decision, each move judged by the simulation.

Models see whole segments and approximate working memory; what they leave unused is spent here: a group or a single
storage is kept after all where the plan still fits, or kept in exchange for another that costs less to recompute.
"""

from __future__ import annotations

import math

from ..problem import Judged, Problem

WORK = 60_000  # operations simulated by one search, all moves together: bounds its time without looking at a clock

EXCHANGED, OFFERED = 20, 6  # exchanges look at so many of the dearest storages, and at so many others for each


def lowered(problem: Problem, start: Judged, work: int = WORK) -> Judged:
    """The decision with the smallest peak that a descent by single storages reaches."""

    def rank(judged: Judged) -> tuple[int, float]:
        return judged.peak_bytes, judged.seconds

    best, left, improving = start, work // max(1, len(problem.profile.ops) + len(problem.profile.steps)), True
    while improving:
        improving = False
        for s in problem.candidates:
            if left <= 0:
                return best
            left -= 1
            other = problem.judge(set(best.dropped) ^ {s})
            if rank(other) < rank(best):
                best, improving = other, True
    return best


def improved(problem: Problem, start: Judged, work: int = WORK) -> Judged:
    """The cheapest decision that a descent from `start` reaches; `start` must keep the budget."""
    search = _Search(problem, start, work)
    while search.left > 0:
        before = search.best.seconds
        search.keep_more()
        search.exchange()
        if search.best.seconds >= before:
            break
    return search.best


class _Search:
    """The best decision so far, and how many moves may still be judged."""

    def __init__(self, problem: Problem, start: Judged, work: int) -> None:
        self.problem, self.best = problem, start
        self.left = work // max(1, len(problem.profile.ops) + len(problem.profile.steps))

    def _accept(self, dropped: set[int]) -> bool:
        self.left -= 1
        judged = self.problem.judge(dropped)
        if judged.peak_bytes <= self.problem.budget_bytes and judged.seconds < self.best.seconds:
            self.best = judged
            return True
        return False

    def _price(self, s: int) -> float:
        """Seconds for each byte that dropping a storage saves, roughly: what makes it, over its size."""
        storage = self.problem.profile.storages[s]
        return self.problem.cost[storage.birth] / max(1, storage.bytes)

    def keep_more(self) -> None:
        """Keeps whole groups, then single storages, dearest first, wherever the plan still fits."""
        groups = sorted(self.best.groups, key=lambda g: (-math.fsum(self.problem.cost[self._birth(s)] for s in g), g))
        for group in groups:
            if self.left > 0 and set(group) <= set(self.best.dropped):
                self._accept(set(self.best.dropped) - set(group))
        for s in sorted(self.best.dropped, key=lambda s: (-self._price(s), s)):
            if self.left <= 0:
                return
            if s in self.best.dropped:
                self._accept(set(self.best.dropped) - {s})

    def exchange(self) -> None:
        """Keeps a dear storage and drops a cheap one of about the bytes that were missing."""
        kept = [s for s in self.problem.candidates if self.problem.slots_of[s] and s not in self.best.dropped]
        kept.sort(key=lambda s: (self._price(s), s))
        for s in sorted(self.best.dropped, key=lambda s: (-self._price(s), s))[:EXCHANGED]:
            if s not in self.best.dropped:
                continue
            gain = self.problem.cost[self._birth(s)]
            room = self.problem.budget_bytes - self.best.peak_bytes
            missing = self.problem.profile.storages[s].bytes - room
            cheap = [
                t for t in kept if self.problem.profile.storages[t].bytes >= missing and t not in self.best.dropped
            ]
            for t in [t for t in cheap if self.problem.cost[self._birth(t)] < gain][:OFFERED]:
                if self.left <= 0:
                    return
                if self._accept((set(self.best.dropped) - {s}) | {t}):
                    break

    def _birth(self, s: int) -> int:
        return self.problem.profile.storages[s].birth
