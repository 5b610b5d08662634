"""Groups of operations that run again together, in decisions with inner boundaries, kept up to date change by change.

The rules are those of `ckpt_planner.schedule`, in code of its own. There are two kinds of groups. *Plain* ones serve
the slots of dropped storages; an inner boundary is to them as if it were kept. *Lenders* make inner boundaries, and
what leads to them unless it is a boundary itself.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..facts import Facts
from .tables import Tables


class Invalid(Exception):
    """These inner boundaries cannot be."""


class NestedGroup:
    """One group; figures in bytes and seconds.

    Attributes:
        ops: the operations, in order.
        anchors: storages because of which there is the group: with slots that it fills, or inner boundaries.
        inside: dropped storages that it makes itself.
        lends, borrows: inner boundaries that it makes, and that it reads from other groups, in the order of reading.
        sources: storages from outside that are kept.
        looks: looks by which it reads what it borrows.
        trigger, opener, end: as its own slots have it; see `ckpt_planner.schedule.Group`.
        seconds: what it costs where backward starts it.
        ends: the last step of each storage that waits in its slots.
        extra: (operation, bytes) noted in forward.
    """

    __slots__ = (
        "_captured", "_peaks", "anchors", "borrows", "end", "ends", "extra", "inside", "last_use", "lends", "looks",
        "opener", "ops", "seconds", "sources", "trigger",
    )  # fmt: skip

    def __init__(self, t: Tables, facts: Facts, ops: tuple[int, ...], own: bool, dropped: set[int], inner: set[int]):
        self.ops = ops
        self.trigger, self.opener, self.end, self.seconds = -1, -1, -1, t.group_cost
        self.ends: dict[int, int] = {}
        self.extra: list[tuple[int, int]] = []
        self.last_use: dict[int, int] = {}
        self._peaks: dict[tuple[frozenset[int], frozenset[int]], tuple[int, int]] = {}
        anchors: dict[int, None] = {}
        self._captured = set[int]()
        inside, read = set[int](), dict[int, None]()
        for i in ops:
            self.seconds += t.cost[i]
            if t.extra[i]:
                self.extra.append((i, t.extra[i]))
            for s, begin, slot, last, unread in t.fills[i]:
                if s in dropped and (s in inner) is own:
                    anchors[s] = None
                    if t.hidden[s]:
                        self._captured.add(i)
                    self._serve(s, begin, slot, t.m if unread else last, last)
            for s in facts.makes[i]:
                if s in dropped and (own or s not in inner):
                    inside.add(s)
            for s, _, looks in facts.reads[i]:
                read[s] = None
                if s in dropped and (s not in inner or (own and looks)):
                    inside.add(s)
            self.last_use.update(t.meets_at[i])
        self.inside = frozenset(inside)
        self.lends = tuple(sorted(self.inside & inner)) if own else ()
        anchors.update(dict.fromkeys(self.lends))
        self.anchors = tuple(anchors)
        self.sources = tuple(s for s in read if s not in dropped)
        self.borrows = tuple(s for s in read if s in dropped and s not in inside)
        reads = (read for i in ops for read in facts.reads[i]) if self.borrows else ()
        self.looks = tuple({p for s, p, _ in reads if s in self.borrows and facts.look_of.get(p) == s})
        for i in ops if self.lends else ():
            if any(s in inner and s in inside and not looks for s, _, looks in facts.reads[i]):
                raise Invalid

    def _serve(self, s: int, begin: int, slot: int, end: int, last: int) -> None:
        if begin >= 0:
            self.ends[s] = max(last, self.ends.get(s, -1))
            if self.trigger < 0 or (begin, slot) < (self.trigger, self.opener):
                self.trigger, self.opener = begin, slot
        self.end = max(self.end, end)

    def peak_and_left(self, t: Tables, waits: frozenset[int], lets_go: frozenset[int]) -> tuple[int, int]:
        """Bytes above what was live before, at most while it runs and afterwards.

        Args:
            t: the tables of the problem.
            waits: what stays when it has run.
            lets_go: what it has borrowed and nothing needs after it.
        """
        key = waits, lets_go
        if key not in self._peaks:
            self._peaks[key] = self._run(t, waits, lets_go)
        return self._peaks[key]

    def _run(self, t: Tables, waits: frozenset[int], lets_go: frozenset[int]) -> tuple[int, int]:
        ending: dict[int, list[int]] = {}
        for s, i in self.last_use.items():
            if s not in waits and (s in self.inside or s in lets_go):
                ending.setdefault(i, []).append(s)
        live = peak = states = 0
        held = set(lets_go)
        size = t.size
        for i in self.ops:
            if t.random[i]:
                states = t.rng
            peak = max(peak, live + states + t.workspace[i])
            for s in t.makes[i]:
                if s in self.inside and s not in held:
                    held.add(s)
                    live += size[s]
            if i in self._captured:
                for s in t.hides[i]:
                    if s in waits and s not in held:
                        held.add(s)
                        live += size[s]
            for s in ending.get(i, ()):
                if s in held:
                    held.discard(s)
                    live -= size[s]
        return peak, live


class Regrouped(NamedTuple):
    """What `Grouping.undo` needs."""

    removed: tuple[tuple[int, NestedGroup], ...]
    added: tuple[int, ...]


class Grouping:
    """All groups of one kind.

    Args:
        t, facts: of the profile.
        own: the kind; lenders where it is set.
        dropped, inner: the decision; whoever holds them changes them, and then has the groups changed.
    """

    def __init__(self, t: Tables, facts: Facts, own: bool, dropped: set[int], inner: set[int]) -> None:
        self._t, self._facts, self._own, self._dropped, self._inner = t, facts, own, dropped, inner
        self.groups: dict[int, NestedGroup] = {}
        self.group_of: dict[int, int] = {}
        self._next = 0

    def change(self, touched: Iterable[int]) -> Regrouped:
        """After storages have become something else: works out again the groups that have to do with them.

        Raises:
            Invalid: the decision cannot be carried out; the groups are as before.
        """
        region, again = self._reach(touched)
        parts = [
            NestedGroup(self._t, self._facts, part, self._own, self._dropped, self._inner)
            for part in self._components(again)
        ]
        removed = tuple((g, self._remove(g)) for g in sorted(region))
        added = []
        for group in parts:
            self._next += 1
            self._add(self._next, group)
            added.append(self._next)
        return Regrouped(removed, tuple(added))

    def undo(self, done: Regrouped) -> None:
        """Takes back the latest change, once the storages are what they were before."""
        for g in done.added:
            self._remove(g)
        for g, group in done.removed:
            self._add(g, group)

    def _add(self, g: int, group: NestedGroup) -> None:
        self.groups[g] = group
        self.group_of.update(dict.fromkeys(group.ops, g))

    def _remove(self, g: int) -> NestedGroup:
        group = self.groups.pop(g)
        for i in group.ops:
            del self.group_of[i]
        return group

    def _seeds(self, s: int) -> tuple[int, ...]:
        """Operations that have to run again in groups of this kind because of a storage."""
        t = self._t
        if s not in self._dropped or (s in self._inner) is not self._own:
            return ()
        return (t.birth[s], *t.touching[s], *t.seeds[s]) if self._own else t.seeds[s]

    def _reach(self, touched: Iterable[int]) -> tuple[set[int], set[int]]:
        """The groups that a change makes other ones, and the operations that are in those then."""
        t, facts, own, dropped, inner = self._t, self._facts, self._own, self._dropped, self._inner
        group_of, region, again = self.group_of, set[int](), set[int]()
        stack: list[int] = []

        def join(i: int) -> None:
            g = group_of.get(i)
            if g is not None and g not in region:
                region.add(g)
                for s in self.groups[g].anchors:
                    stack.extend(self._seeds(s))

        for s in touched:
            for i in t.around[s]:
                join(i)
            stack.extend(self._seeds(s))
        while stack:
            i = stack.pop()
            if i in again:
                continue
            again.add(i)
            join(i)
            for s in t.needs[i]:
                if s not in dropped or (s in inner and not (own and s in facts.makes[i])):
                    raise Invalid
            for s, producer, looks in facts.reads[i]:
                if s in dropped and (s not in inner or (own and looks)):
                    stack.append(producer)
                    stack.extend(t.touching[s])
            for s in t.touched_output[i]:
                if s in dropped and (own or s not in inner):
                    stack.extend(t.touching[s])
        return region, again

    def _components(self, again: set[int]) -> list[tuple[int, ...]]:
        """Operations in one part where they have a storage in common that they make again."""
        own, dropped, inner, facts = self._own, self._dropped, self._inner, self._facts
        parent: dict[int, int] = {}
        first: dict[int, int] = {}

        def root(i: int) -> int:
            while parent[i] != i:
                parent[i] = i = parent[parent[i]]
            return i

        order = sorted(again)
        for i in order:
            parent[i] = here = i
            makes = facts.makes[i]
            for s in (*makes, *(s for s, _, looks in facts.reads[i] if s not in inner or (own and looks))):
                if s in dropped and (own or s not in inner):
                    other = root(first.setdefault(s, i))
                    here, there = min(here, other), max(here, other)
                    parent[there] = here
        parts: dict[int, list[int]] = {}
        for i in order:
            parts.setdefault(root(i), []).append(i)
        return [tuple(part) for part in parts.values()]
