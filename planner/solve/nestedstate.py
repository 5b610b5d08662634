"""A decision with inner boundaries that can be changed a little at a time, with its cost and its bytes at every moment.

What `State` is for decisions without them. Groups are kept up to date change by change (`nestedgroups`); when they run
and what is live then is put together anew each time it is asked for. It follows the rules of `ckpt_planner.simulate`,
in code of its own; what is found is judged by the simulation in the end.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..facts import facts_of
from ..problem import Problem
from .nestedgroups import Grouping, Invalid, NestedGroup, Regrouped
from .state import State
from .tables import tables_of

Ints = NDArray[np.int64]


class Moments(NamedTuple):
    """What a decision costs, and the most bytes that are live during each operation, each step, and the optimizer's."""

    seconds: float
    forward: Ints
    backward: Ints
    optimizer: int

    @property
    def peak_bytes(self) -> int:
        """The most of them."""
        return max(int(self.forward.max(initial=0)), int(self.backward.max(initial=0)), self.optimizer)

    def excess(self, budget_bytes: int) -> int:
        """Bytes over a budget, summed over all moments."""
        over = sum(int(np.maximum(moments - budget_bytes, 0).sum()) for moments in (self.forward, self.backward))
        return over + max(0, self.optimizer - budget_bytes)


class NestedState:
    """A decision under way. It starts with nothing dropped.

    Attributes:
        dropped: storages that are not kept, completed to what can be carried out.
        inner: those of them that are inner boundaries.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem, self.t, self._facts = problem, tables_of(problem), facts_of(problem.profile)
        self._base = State(problem)  # the same without inner boundaries, which says what has to be dropped as well
        self.dropped = self._base.dropped
        self.inner: set[int] = set()
        self._born = np.zeros(self.t.n + 2, dtype=np.int64)  # differences of live bytes, without any end
        np.add.at(self._born, self._facts.births + 1, self._facts.sizes)
        self._plain = Grouping(self.t, self._facts, False, self.dropped, self.inner)
        self._lenders = Grouping(self.t, self._facts, True, self.dropped, self.inner)

    def move_to(self, dropped: Iterable[int], inner: Iterable[int]) -> bool:
        """Changes to another decision, completed to one that can be carried out; False, and no change, for none."""
        wish = {s for s in dropped if self.t.droppable[s]}
        was, done = set(self.inner), self._base.change(wish - self.dropped, self.dropped - wish)
        self._set_inner({s for s in inner if self._separates(s)})
        touched = {*done.dropped, *done.kept, *(self.inner ^ was)}
        plain: Regrouped | None = None
        try:
            plain = self._plain.change(touched)
            self._lenders.change(touched)
        except Invalid:
            self._set_inner(was)
            self._base.undo(done)
            if plain is not None:
                self._plain.undo(plain)
            return False
        return True

    def _set_inner(self, inner: set[int]) -> None:
        self.inner.clear()  # the groups look at this very set
        self.inner.update(inner)

    def _separates(self, s: int) -> bool:
        """Whether a storage may be an inner boundary: it is dropped, and something waits for it."""
        t, base = self.t, self._base
        if s not in self.dropped or t.hidden[s]:
            return False
        return bool(self.problem.slots_of[s]) or any(base.again(i) for i in (*self.problem.readers[s], *t.touching[s]))

    # -- what it costs ----------------------------------------------------------------------------------------------

    def moments(self) -> Moments | None:
        """What it costs and holds; None where two inner boundaries need each other first."""
        t = self.t
        groups = [*self._plain.groups.values(), *self._lenders.groups.values()]
        lender = {s: group for group in self._lenders.groups.values() for s in group.lends}
        if (spans := self._when(groups, lender)) is None:
            return None
        started = [group for group in groups if spans[id(group)][0] >= 0]
        seconds = math.fsum(group.seconds for group in started) + self._looks(started)
        until = [-1 if s in self.dropped else last for s, last in enumerate(t.last_step)]
        forward, backward = self._born.copy(), np.zeros(t.m + 2, dtype=np.int64)
        forward_at, backward_at = forward.data, backward.data
        for group in groups:
            end = spans[id(group)][1]
            for s in group.sources:
                until[s] = max(until[s], end)
            for i, size in group.extra:
                forward_at[i] += size
                if end >= 0:
                    backward_at[0] += size
                    backward_at[end + 1] -= size
        self._since_forward(until, forward, backward)
        replay = self._replays(groups, lender, backward_at)
        kept = np.cumsum(backward[: t.m])
        most = np.maximum(kept + t.step_peak, replay.over(kept + t.step_live)) + t.resident
        return Moments(seconds, np.cumsum(forward[: t.n]) + t.forward_base, most, t.optimizer)

    def _when(self, groups: list[NestedGroup], lender: dict[int, NestedGroup]) -> dict[int, tuple[int, int]] | None:
        """For each group by its id, the step that starts it and the last that needs it; None for a circle."""
        found = {id(group): (group.trigger, group.end) for group in groups}
        waiting = dict.fromkeys(map(id, lender.values()), 0)
        for group in groups:
            for s in group.borrows:
                waiting[id(lender[s])] += 1
        ready = [group for group in groups if not waiting.get(id(group))]
        for group in ready:  # it grows: whoever borrows comes first
            trigger, end = found[id(group)]
            for s in group.borrows:
                other = lender[s]
                its, last = found[id(other)]
                if trigger >= 0:
                    its = trigger if its < 0 else min(its, trigger)
                found[id(other)] = its, max(last, end)
                waiting[id(other)] -= 1
                if not waiting[id(other)]:
                    ready.append(other)
        return found if len(ready) == len(groups) else None

    def _looks(self, started: list[NestedGroup]) -> float:
        """Seconds of looks by which inner boundaries are read, and that no group makes."""
        look_of, again, found = self._facts.look_of, (self._plain.group_of, self._lenders.group_of), set[int]()
        todo = [look for group in started for look in group.looks]
        while todo:
            look = todo.pop()
            if look in found or any(look in groups for groups in again):
                continue
            found.add(look)
            todo += [p for s, p, _ in self._facts.reads[look] if look_of.get(p) == s]  # a look at a look
        return math.fsum(self.t.cost[i] for i in found)

    def _since_forward(self, until: list[int], forward: Ints, backward: Ints) -> None:
        """Has what is live since forward end: each storage with the last that needs it."""
        facts, t = self._facts, self.t
        last = np.array(until, dtype=np.int64)[facts.made]
        last[facts.deaths > t.n] = t.m
        gone = last < 0
        np.subtract.at(forward, facts.deaths[gone], facts.sizes[gone])
        backward[0] += facts.sizes[~gone].sum()
        np.subtract.at(backward, last[~gone] + 1, facts.sizes[~gone])

    def _replays(self, groups: list[NestedGroup], lender: dict[int, NestedGroup], backward_at: memoryview) -> Replays:
        """The replays of each step; adds what waits after them to `backward_at`."""
        t, order = self.t, list(_order(groups, lender))
        last_borrowed = {s: place for place, (_, group) in enumerate(order) for s in group.borrows}
        found = Replays()
        for place, (step, group) in enumerate(order):
            lets_go = frozenset(
                s for s in group.borrows if last_borrowed[s] == place and lender[s].ends.get(s, -1) < step
            )
            waits = frozenset({*group.ends, *(s for s in group.lends if s in last_borrowed)})
            for s in waits:
                end = group.ends.get(s, -1)
                if s in last_borrowed and (borrowed := order[last_borrowed[s]][0]) > end:
                    end = borrowed - 1  # a replay that is the last to need it lets it go before its step runs
                if end >= step:
                    backward_at[step] += t.size[s]
                    backward_at[end + 1] -= t.size[s]
            later = sum(t.size[s] for s in waits) - sum(t.size[s] for s in lets_go)
            found.add(step, later, *group.peak_and_left(t, waits, lets_go))
        return found


class Replays:
    """Bytes of the replays that steps start, above what was live before."""

    def __init__(self) -> None:
        self._steps: dict[int, list[tuple[int, int, int]]] = {}

    def add(self, step: int, later: int, peak: int, left: int) -> None:
        """One more: what is live only after it, less what it lets go; what is live at most, and what it leaves."""
        self._steps.setdefault(step, []).append((later, peak, left))

    def over(self, kept: Ints) -> Ints:
        """The most that is live during each step's replays; `kept` has what waits after them in it already."""
        found = np.zeros_like(kept)
        for step, replays in self._steps.items():
            before = int(kept[step]) - sum(later for later, _, _ in replays)
            for _, peak, left in replays:
                found[step] = max(int(found[step]), before + peak)
                before += left
        return found


def _order(groups: list[NestedGroup], lender: dict[int, NestedGroup]) -> Iterator[tuple[int, NestedGroup]]:
    """The replays in order, each with its step: what a group borrows is made right before it, if it is not there."""
    done = set[int]()
    for first in sorted((group for group in groups if group.opener >= 0), key=lambda g: (g.trigger, g.opener)):
        stack = [first]
        while stack:
            group = stack[-1]
            missing = {id(lender[s]): lender[s] for s in group.borrows if id(lender[s]) not in done}
            if missing:
                stack.extend(reversed(missing.values()))
                continue
            stack.pop()
            if id(group) not in done:
                done.add(id(group))
                yield first.trigger, group
