"""A decision that can be changed a little at a time, with its cost and the bytes live at every moment kept up to date.

Local search tries thousands of small changes. Simulating the whole step for each would take most of the time, so a
`State` works out again only what a change touches: the groups of operations that are replayed together and next to the
changed storages. It follows the rules of `ckpt_planner.simulate`, in code of its own; what it finds is judged by the
simulation in the end.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from .replays import Replayed, components, replayed
from .tables import tables_of

NEVER = -(1 << 60)  # in place of the bytes of a replay where a step starts none


class Undo(NamedTuple):
    """What `State.undo` needs to take a change back."""

    dropped: frozenset[int]
    kept: frozenset[int]
    removed: tuple[tuple[int, Replayed], ...]
    added: tuple[int, ...]


class State:
    """A decision under way. It starts with nothing dropped.

    Attributes:
        dropped: storages that are not kept; some of them may be without effect.
        groups: what runs again, by number.
        seconds: time of everything that runs again.
    """

    def __init__(self, problem: Problem, dropped: Iterable[int] = ()) -> None:
        self.problem, self.t = problem, tables_of(problem)
        self.dropped: set[int] = set()
        self.groups: dict[int, Replayed] = {}
        self.seconds = 0.0
        self._next = 0
        self._group_of: dict[int, int] = {}
        self._reading: dict[int, list[int]] = {}  # for each storage, the ends of the groups that read it from outside
        self._started: dict[int, list[int]] = {}  # for each step, the groups that it starts
        t = self.t
        self._forward = np.zeros(t.n + 2, dtype=np.int64)  # differences of live bytes
        self._backward = np.zeros(t.m + 1, dtype=np.int64)
        self._replay = np.full(t.m, NEVER, dtype=np.int64)
        # Single entries are read and written faster through a view than through the array.
        self._forward_at, self._backward_at = self._forward.data, self._backward.data
        self._until = [t.m if t.death[s] > t.n else t.last_step[s] for s in range(len(t.size))]
        for s in range(len(t.size)):
            if t.made[s]:
                self._forward_at[t.birth[s] + 1] += t.size[s]
                self._place(s, self._until[s], 1)
        if dropped:
            self.change(dropped, ())

    # -- what it costs ----------------------------------------------------------------------------------------------

    def forward(self) -> NDArray[np.int64]:
        """Most bytes live during each operation."""
        t = self.t
        found: NDArray[np.int64] = np.cumsum(self._forward[: t.n])
        found += t.forward_base
        return found

    def backward(self) -> NDArray[np.int64]:
        """Most bytes live during each backward step."""
        t = self.t
        kept: NDArray[np.int64] = np.cumsum(self._backward[: t.m])
        found: NDArray[np.int64] = kept + np.maximum(t.step_peak, t.step_live + self._replay)
        found += t.resident
        return found

    def peak_bytes(self) -> int:
        """Most bytes live at any moment of the step."""
        t = self.t
        return max(int(self.forward().max(initial=0)), int(self.backward().max(initial=0)), t.optimizer)

    def excess(self, budget_bytes: int) -> int:
        """Bytes over the budget, summed over every operation and every step."""
        over = np.maximum(self.forward() - budget_bytes, 0).sum() + np.maximum(self.backward() - budget_bytes, 0).sum()
        return int(over) + max(0, self.t.optimizer - budget_bytes)

    def again(self, i: int) -> bool:
        """Whether an operation runs again."""
        return i in self._group_of

    def effective(self) -> tuple[int, ...]:
        """The dropped storages without those that have no effect, sorted, as `Problem.repaired` gives them."""
        readers, t = self.problem.readers, self.t
        found = (s for s in self.dropped if t.seeds[s] or any(map(self.again, (*readers[s], *t.touching[s]))))
        return tuple(sorted(found))

    def started(self, step: int) -> list[int]:
        """The groups that a step starts."""
        return self._started.get(step, [])

    # -- changing it ------------------------------------------------------------------------------------------------

    def move_to(self, dropped: Iterable[int]) -> Undo:
        """Changes to another decision, completed to one that can be carried out."""
        wish = {s for s in dropped if self.t.droppable[s]}
        return self.change(wish - self.dropped, self.dropped - wish)

    def change(self, drop: Iterable[int], keep: Iterable[int]) -> Undo:
        """Drops some storages and keeps others, with whatever has to follow; those that must stay dropped do."""
        t, dropped = self.t, self.dropped
        drop = {s for s in drop if t.droppable[s] and s not in dropped}
        keep = {s for s in keep if s in dropped}
        dropped |= drop
        dropped -= keep
        region: set[int] = set()  # groups that are worked out again
        stack: list[int] = []

        group_of = self._group_of

        def join(i: int) -> None:
            g = group_of.get(i)
            if g is not None and g not in region:
                region.add(g)
                for s in self.groups[g].saved:
                    if s in dropped:
                        stack.extend(t.seeds[s])

        for s in (*drop, *keep):
            for i in t.around[s]:
                join(i)
        for s in drop:
            stack.extend(t.seeds[s])
        again: set[int] = set()
        while stack:
            i = stack.pop()
            if i in again:
                continue
            again.add(i)
            if i in group_of:
                join(i)
            for s in t.needs[i]:
                if s not in dropped:
                    dropped.add(s)
                    if s in keep:
                        keep.discard(s)
                    else:
                        drop.add(s)
                    stack.extend(t.seeds[s])
                    for j in t.around[s]:
                        join(j)
                        if j in again:
                            again.discard(j)
                            stack.append(j)
            for s, producer in t.reads[i]:
                if s in dropped:
                    stack.append(producer)
                    if t.touching[s]:
                        stack.extend(t.touching[s])
            for s in t.touched_output[i]:
                if s in dropped:
                    stack.extend(t.touching[s])
        removed = tuple((g, self._remove(g)) for g in sorted(region))
        added = []
        for ops in components(t, dropped, again):
            self._next += 1
            added.append(self._next)
            self._add(self._next, replayed(t, dropped, ops))
        done = Undo(frozenset(drop), frozenset(keep), removed, tuple(added))
        self._settle_all(done, (self.groups[g] for g in added))
        return done

    def undo(self, done: Undo) -> None:
        """Takes back the latest change."""
        self.dropped -= done.dropped
        self.dropped |= done.kept
        added = [self._remove(g) for g in done.added]
        for g, group in done.removed:
            self._add(g, group)
        self._settle_all(done, added)

    # -- groups -----------------------------------------------------------------------------------------------------

    def _add(self, g: int, group: Replayed) -> None:
        self.groups[g] = group
        self._group_of.update(dict.fromkeys(group.ops, g))
        self._count(group, 1)
        for s in group.sources:
            self._reading.setdefault(s, []).append(group.end)
        if group.trigger >= 0:
            self._started.setdefault(group.trigger, []).append(g)
            self._set_replay(group.trigger)

    def _remove(self, g: int) -> Replayed:
        group = self.groups.pop(g)
        for i in group.ops:
            del self._group_of[i]
        self._count(group, -1)
        for s in group.sources:
            self._reading[s].remove(group.end)
        if group.trigger >= 0:
            self._started[group.trigger].remove(g)
            self._set_replay(group.trigger)
        return group

    def _count(self, group: Replayed, sign: int) -> None:
        """Adds or takes away what a group costs and holds."""
        self.seconds += sign * group.seconds
        for i, size in group.extra:
            self._forward_at[i] += sign * size
            if group.end >= 0:
                self._span(0, group.end, sign * size)
        if group.trigger >= 0:
            at = self._backward_at
            at[group.trigger] += sign * group.own
            if group.ends is not None:
                self._backward[group.ends[0]] -= sign * group.ends[1]
                return
            for size, step in group.spans:
                at[step + 1] -= sign * size

    def _span(self, first: int, last: int, size: int) -> None:
        self._backward_at[first] += size
        if last < self.t.m:
            self._backward_at[last + 1] -= size

    def _set_replay(self, step: int) -> None:
        """Bytes of the replays that a step starts, one after another, above what is live with all of them done."""
        started = [self.groups[g] for g in self._started[step]]
        if not started:
            self._replay[step] = NEVER
            return
        before, most = -sum(group.own for group in started), NEVER
        for group in sorted(started, key=lambda group: group.opener):
            most = max(most, before + group.peak)
            before += group.left
        self._replay[step] = most

    # -- storages ---------------------------------------------------------------------------------------------------

    def _settle_all(self, done: Undo, added: Iterable[Replayed]) -> None:
        """Sets until when each storage that a change has touched is live since forward."""
        t, until, dropped, reading = self.t, self._until, self.dropped, self._reading
        touched = {*done.dropped, *done.kept}.union(*(x.sources for _, x in done.removed), *(x.sources for x in added))
        for s in touched:
            if t.death[s] > t.n or not t.made[s]:
                continue
            last = -1 if s in dropped else t.last_step[s]
            for end in reading.get(s, ()):
                if end > last:
                    last = end
            if last != until[s]:
                self._place(s, until[s], -1)
                until[s] = last
                self._place(s, last, 1)

    def _place(self, s: int, until: int, sign: int) -> None:
        t, size = self.t, sign * self.t.size[s]
        if until < 0:
            self._forward_at[min(t.death[s], t.n + 1)] -= size
        else:
            self._span(0, until, size)
