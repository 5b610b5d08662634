"""Local search: from a decision that was rounded from a model to one that keeps the budget at the least cost nearby.

Three kinds of moves on a `State`. *Repair*: where memory is short, drop what frees most for its time. *Fill*: where
there is room, keep what costs most to compute again. *Exchange*: keep something dear although it does not fit, repair,
and stay there if that was cheaper. Work is counted, so that the search ends at the same place on every machine.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from random import Random

import numpy as np

from ..problem import Problem
from .state import State, Undo
from .tables import tables_of

TRIALS = 10  # storages that repair tries out before it drops the best of them
EXCHANGED, EACH = 60, 20  # a round of exchanges looks at so many of the dearest storages, and one for EACH operations
LONGEST = 30  # changes that one exchange may take to fit again
CHAIN = 12  # values without slots that are dropped together with what is made of them
SHAKEN = 4  # so many storages, at most, are kept by lot at a time
AGAIN = 2_000  # what a draw that was met before counts as; a small problem has no more to offer after some of them
TINY = 1e-12

Move = tuple[tuple[int, ...], tuple[int, ...]]  # what is dropped, what is kept


class LocalSearch:
    """Improves decisions for one problem.

    Args:
        problem: the profile and the budget.
        work: operations that may be looked at, all changes together.
        expired: whether time has run out.

    Attributes:
        left: operations that may still be looked at.
        floor: seconds below which no decision is; once met, nothing is left to improve.
    """

    def __init__(self, problem: Problem, work: int, expired: Callable[[], bool]) -> None:
        self.floor = 0.0
        self.candidates = problem.candidates
        self.budget, self.t, self.left, self.expired = problem.budget_bytes, tables_of(problem), work, expired
        t = self.t
        self.saved = np.array([s for s in problem.candidates if problem.slots_of[s] and t.size[s]], dtype=np.int64)
        self._size = np.array([t.size[s] for s in self.saved], dtype=np.float64)
        self._death = np.array([min(t.death[s], t.n) for s in self.saved], dtype=np.int64)
        first = [min((problem.profile.slots[x].step for x in problem.slots_of[s]), default=0) for s in self.saved]
        self._first = np.array([max(0, x) for x in first], dtype=np.int64)
        self._cost = np.array([max(TINY, math.fsum(t.cost[i] for i in t.seeds[s])) for s in self.saved])

    @property
    def over(self) -> bool:
        """Whether the search has to end."""
        return self.left <= 0 or self.expired()

    def run(self, state: State) -> bool:
        """Improves `state` in place; whether it keeps the budget in the end."""
        if not self.repair(state, [], 1 << 30):
            return False
        before = float("inf")
        while state.seconds < before * (1 - 1e-9) and not self.over:
            before = state.seconds
            self.fill(state)
            self.exchange(state)
        return True

    def shake(self, state: State, numbers: Random) -> None:
        """Keeps a few things taken by lot, repairs and improves, again and again from the best, while there is work."""
        best = state.seconds, frozenset(state.dropped)
        drawn: set[frozenset[int]] = set()  # since the best was met; what follows is the same each time
        while not self.over:
            dear = self._dear(state)
            if not dear or best[0] <= self.floor * (1 + 1e-9):
                return
            keep = frozenset(dear[int(numbers.random() * len(dear))] for _ in range(1 + int(numbers.random() * SHAKEN)))
            if keep in drawn:
                self.left -= AGAIN
                continue
            drawn.add(keep)
            self._change(state, (), tuple(sorted(keep)))
            if self.repair(state, [], 1 << 30, best[0] * 1.2):
                self.fill(state)
                if state.seconds < best[0] * 1.05:
                    self.exchange(state)
            if state.seconds < best[0] * (1 - 1e-9) and not state.excess(self.budget):
                best = state.seconds, frozenset(state.dropped)
                drawn.clear()
            else:
                state.move_to(best[1])

    # -- moves ------------------------------------------------------------------------------------------------------

    def repair(self, state: State, done: list[Undo], most: int, limit: float = float("inf"), held: int = -1) -> bool:
        """Changes what frees most for its time until the budget is kept; whether it then is.

        Args:
            state: is changed in place.
            done: every change is noted here, in order.
            most: how many changes, at most.
            limit: seconds at which to give up.
            held: a storage that is left as it is.
        """
        excess = state.excess(self.budget)
        tried: dict[int, float] = {}
        changed = False
        while len(done) < most:
            if not excess:
                return True
            if state.seconds >= limit or self.over:
                return False
            best: tuple[float, Move] = (0.0, ((), ()))
            last: tuple[float, Move] = (float("inf"), ((), ()))  # the cheapest after which nothing is left to do
            exhausted = True
            for s in self._promising(state, tried, held):
                exhausted = False
                for move in self._moves(state, s):
                    before = state.seconds
                    undo = self._change(state, *move)
                    gain, cost = excess - state.excess(self.budget), state.seconds - before
                    state.undo(undo)
                    ratio = gain / max(TINY, cost) if gain > 0 else 0.0
                    if gain == excess and cost < last[0]:
                        last = cost, move
                    if ratio > best[0]:
                        best = ratio, move
                    tried[s] = max(tried.get(s, 0.0), ratio)
            if best[0] and last[0] <= 1.5 * excess / best[0]:
                done.append(self._change(state, *last[1]))
                return True
            if best[0]:
                done.append(self._change(state, *best[1]))
                excess = state.excess(self.budget)
                tried = {s: ratio for s, ratio in tried.items() if ratio < best[0] / 3}
                changed = True
            elif exhausted and changed:
                tried, changed = {}, False  # what was no help before may be one now
            elif exhausted:
                return False
        return not excess

    def fill(self, state: State) -> None:
        """Keeps whole groups, then single storages, dearest first, wherever the budget is still kept."""
        for g in sorted(state.groups, key=lambda g: (-state.groups[g].seconds, state.groups[g].ops)):
            if self.over:
                return
            if g in state.groups:
                self._accept(state, tuple(s for i in state.groups[g].ops for s in self.t.meets[i]))
        for s in self._dear(state):
            if self.over:
                return
            if s in state.dropped:
                self._accept(state, (s,))

    def lower(self, state: State) -> None:
        """Goes on repairing for smaller and smaller budgets, as far as that leads."""
        budget, step = self.budget, 0.1
        room = state.peak_bytes() - self.t.resident
        while step > 1e-3 and room > 0 and not self.over:
            peak, done = state.peak_bytes(), list[Undo]()
            self.budget = peak - max(1, int(step * room))
            if not self.repair(state, done, 1 << 30) and state.peak_bytes() >= peak:
                for undo in reversed(done):
                    state.undo(undo)
                step /= 2
        self.budget = budget

    def descend(self, state: State) -> None:
        """Drops or keeps single storages as long as that makes the peak smaller, or as large for less time."""
        improving = True
        while improving:
            improving = False
            for s in self.candidates:
                if self.over:
                    return
                before = state.peak_bytes(), state.seconds
                undo = self._change(state, *(((), (s,)) if s in state.dropped else ((s,), ())))
                if (state.peak_bytes(), state.seconds) < before:
                    improving = True
                else:
                    state.undo(undo)

    def exchange(self, state: State) -> None:
        """Keeps something dear, drops cheaper things until it fits, and takes it back where that was not cheaper."""
        for s in self._dear(state)[: EXCHANGED + self.t.n // EACH]:
            if self.over:
                return
            if s not in state.dropped:
                continue
            before = state.seconds
            done = [self._change(state, (), (s,))]
            cheaper = state.seconds < before and self.repair(state, done, LONGEST, before, s)
            if not cheaper or state.seconds >= before * (1 - 1e-9):
                for undo in reversed(done):
                    state.undo(undo)

    # -- what they are made of --------------------------------------------------------------------------------------

    def _change(self, state: State, drop: tuple[int, ...], keep: tuple[int, ...]) -> Undo:
        undo = state.change(drop, keep)
        self.left -= 20 + self.t.n // 40 + 2 * sum(len(group.ops) for _, group in undo.removed)
        self.left -= sum(len(state.groups[g].ops) for g in undo.added)
        return undo

    def _accept(self, state: State, keep: tuple[int, ...]) -> None:
        before = state.seconds
        undo = self._change(state, (), keep)
        if state.seconds >= before or state.peak_bytes() > self.budget:
            state.undo(undo)

    def _dear(self, state: State) -> list[int]:
        """What is dropped, the most seconds for a byte first."""
        made = {s for group in state.groups.values() for i in group.ops for s in self.t.meets[i] if s in state.dropped}
        made |= {s for group in state.groups.values() for s in group.saved}

        def price(s: int) -> tuple[float, int]:
            return -self.t.cost[self.t.birth[s]] / max(1, self.t.size[s]), s

        return sorted(made, key=price)

    def _promising(self, state: State, tried: dict[int, float], held: int) -> list[int]:
        """Storages that seem to free most, where memory is short, for the time that they cost; untried ones."""
        forward, backward = state.forward() > self.budget, state.backward() > self.budget
        before_op = np.concatenate(([0], np.cumsum(forward)))
        before_step = np.concatenate(([0], np.cumsum(backward)))
        moments = before_op[-1] - before_op[self._death] + before_step[self._first]
        worth = self._size * moments / self._cost
        found: list[int] = []
        for k in np.argsort(-worth, kind="stable"):
            s = int(self.saved[k])
            if len(found) >= TRIALS:
                break
            if s not in state.dropped and s not in tried and s != held:
                found.append(s)
        # Where a replay takes too much, keeping a value inside makes two of it.
        inside: list[int] = []
        for step in np.flatnonzero(backward):
            for g in state.started(int(step)):
                inside += [s for s in self._inside(state, g) if s not in tried and s != held]
                if len(inside) >= TRIALS:
                    return found + inside[:TRIALS]
        return found + inside

    def _inside(self, state: State, g: int) -> list[int]:
        """Dropped values that a group makes and reads, the smallest first."""
        made = {s for i in state.groups[g].ops for s in self.t.makes[i] if s in state.dropped}
        return sorted(made, key=lambda s: (self.t.size[s], s))

    def _moves(self, state: State, s: int) -> list[Move]:
        """Ways to change one storage: keep it, or drop it: alone, with the values without slots that it is made of, or
        with whatever else the operations make that then run again anyway.
        """
        if s in state.dropped:
            return [((), (s,))]
        t, chain, stack = self.t, [s], list(self.t.seeds[s])
        seen = set(stack)
        while stack and len(chain) <= CHAIN:
            for source, producer in t.reads[stack.pop()]:
                if source not in state.dropped and t.droppable[source] and t.last_step[source] < 0:
                    chain.append(source)
                    if producer not in seen:
                        seen.add(producer)
                        stack.append(producer)
        made = (x for i in sorted(seen) for x in (*t.makes[i], *t.hides[i]))
        riders = [x for x in made if t.droppable[x] and x not in state.dropped]
        drops = dict.fromkeys(((s,), tuple(dict.fromkeys(chain)), tuple(dict.fromkeys((*chain, *riders)))))
        return [(drop, ()) for drop in drops]
