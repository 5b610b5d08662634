"""From a decision (which storages to drop) to what follows from it: which operations run again, in which groups.

A *group* is a set of operations that are replayed together: it is started by the first backward step that reads one of
its dropped slots, and everything it needs from outside is kept until its last slot has been read. Two operations are
in one group when one reads what the other makes and that is dropped. Values that are kept separate groups, so cutting
a model into segments is nothing but keeping the values that cross the cut.

*Nesting.* A dropped storage may be an *inner boundary*: it separates groups as if it were kept, but a group of its own
computes it again, in time for the first group that reads it, and lets go of it after the last. The operations that
lead to it then run once more than others: once for the boundary, and once for what lies before it.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Iterator
from functools import cached_property

import networkx as nx
from networkx.utils import UnionFind

from .facts import EXTERNAL, facts_of
from .profile import Profile, Slot


class Group:
    """Operations that are replayed together.

    Attributes:
        ops: their indices, in order.
        slots: indices of the dropped slots that they serve.
        inside: dropped storages that are theirs: what they read of these they make themselves.
        lends: inner boundaries among them, which other groups may read.
        sources: storages made during the step, not dropped, that they read.
        borrows: inner boundaries that they read from the groups that make them, in the order in which they read them.
        trigger: the backward step that starts the replay; -1 if none does.
        opener: index of the first of its slots that is read; -1 if none is.
        end: the backward step after which nothing of the group is needed; len(steps) if a slot is never read.
    """

    def __init__(
        self,
        profile: Profile,
        ops: Iterable[int],
        slots: Iterable[int],
        inside: frozenset[int],
        lends: Iterable[int],
        dropped: frozenset[int],
    ) -> None:
        self.ops = tuple(sorted(ops))
        self.slots = tuple(sorted(slots))
        self.inside, self.lends = inside, tuple(sorted(lends))
        steps = [profile.slots[s].step for s in self.slots]
        # A step reads its slots in their order.
        self.trigger, self.opener = min(
            ((t, s) for t, s in zip(steps, self.slots, strict=True) if t >= 0), default=(-1, -1)
        )
        self.end = len(profile.steps) if any(t < 0 for t in steps) else max(steps, default=-1)
        reads = facts_of(profile).reads
        read = list(dict.fromkeys(s for i in self.ops for s, _, _ in reads[i]))
        self.sources = frozenset(s for s in read if s not in dropped)
        self.borrows = tuple(s for s in read if s in dropped and s not in inside)


class Schedule:
    """What dropping `dropped` means for the step that `profile` describes.

    Args:
        profile: the measured step.
        dropped: indices of the storages that are not kept for backward but computed again.
        inner: those of them that are inner boundaries.

    Raises:
        ValueError: the decision cannot be carried out; the message names the storage and the operation.
    """

    def __init__(self, profile: Profile, dropped: Iterable[int], inner: Iterable[int] = ()) -> None:
        self.profile, self._facts = profile, facts_of(profile)
        self.dropped, self.inner = frozenset(dropped), frozenset(inner)
        self._check_droppable()
        self.slots = tuple(i for i, s in enumerate(profile.slots) if s.storage in self.dropped)
        self.captured = frozenset(
            profile.slots[i].op for i in self.slots if profile.storages[profile.slots[i].storage].kind == "hidden"
        )
        plain = (self._seed(profile.slots[i]) for i in self.slots if profile.slots[i].storage not in self.inner)
        self._again = self._closure(plain, own=False)
        self._again_inside = self._closure(self._inner_seeds(), own=True)
        self.again = self._again | self._again_inside
        self._check_sources(self._again, own=False)
        self._check_sources(self._again_inside, own=True)

    def _check_droppable(self) -> None:
        for s in sorted(self.dropped & self._facts.undroppable.keys()):
            raise ValueError(f"storage {s} cannot be dropped: {self._facts.undroppable[s]}")
        for s in self.inner:
            if s not in self.dropped or self.profile.storages[s].kind == "hidden":
                raise ValueError(f"storage {s} cannot be an inner boundary: it is kept, or no operation returns it")

    def _seed(self, slot: Slot) -> int:
        return slot.op if self.profile.storages[slot.storage].kind == "hidden" else slot.producer

    def _inner_seeds(self) -> Iterator[int]:
        """What makes the inner boundaries, and fills their slots."""
        for s in self.inner:
            yield self.profile.storages[s].birth
            yield from self._facts.writers.get(s, ())
        slots = (self.profile.slots[i] for i in self.slots)
        yield from (self._seed(slot) for slot in slots if slot.storage in self.inner)

    def _inside(self, s: int, looks: bool, own: bool) -> bool:
        """Whether an operation that runs again makes storage `s`, which it reads, in its own group.

        Args:
            s: the storage.
            looks: the operation returns a look into it or writes into it.
            own: the operation runs for an inner boundary; those that look into one are in the group that makes it.
        """
        return s in self.dropped and (s not in self.inner or (own and looks))

    def _closure(self, seeds: Iterable[int], own: bool) -> frozenset[int]:
        """Every operation that has to run again for these to."""
        facts, stack, again = self._facts, list(seeds), set[int]()
        while stack:
            i = stack.pop()
            if i in again:
                continue
            again.add(i)
            for s, producer, looks in facts.reads[i]:
                if self._inside(s, looks, own):
                    stack.append(producer)
                    stack.extend(facts.writers.get(s, ()))
            for s in self.profile.ops[i].output:
                if s in self.dropped and (own or s not in self.inner):
                    stack.extend(facts.writers.get(s, ()))
        return frozenset(again)

    def _check_sources(self, again: frozenset[int], own: bool) -> None:
        facts = self._facts
        for i in again:
            op = self.profile.ops[i]
            if op.replay == "never":
                raise ValueError(f"operation {i} ({op.name}) would run again, but cannot: {op.reason}")
            for s in facts.old[i]:
                if not self._inside(s, s in facts.makes[i], own):
                    raise ValueError(
                        f"operation {i} ({op.name}) would run again, but storage {s} that it reads is overwritten "
                        "later and not computed again"
                    )
            for s in op.writes:
                external = self.profile.storages[s].kind in EXTERNAL
                if not external and (s not in self.dropped or (s in self.inner and not own)):
                    raise ValueError(f"operation {i} ({op.name}) would write into storage {s} again, which is kept")

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in the order in which forward runs them.

        Raises:
            ValueError: an inner boundary separates nothing, or two of them need each other.
        """
        found = self._parts(self._again, own=False) + self._parts(self._again_inside, own=True)
        lender = {s: group for group in found for s in group.lends}
        order: nx.DiGraph[Group] = nx.DiGraph()
        order.add_nodes_from(found)
        order.add_edges_from((group, lender[s]) for group in found for s in group.borrows)
        try:
            borrowers_first = list(nx.topological_sort(order))
        except nx.NetworkXUnfeasible:
            raise ValueError("inner boundaries cannot be made again: two of them need each other first") from None
        for group in borrowers_first:
            for other in order.successors(group):
                if group.trigger >= 0:
                    other.trigger = group.trigger if other.trigger < 0 else min(other.trigger, group.trigger)
                other.end = max(other.end, group.end)
        return tuple(sorted(found, key=lambda g: (g.ops, g.lends)))

    def _parts(self, again: frozenset[int], own: bool) -> list[Group]:
        facts = self._facts
        theirs = self.dropped if own else self.dropped - self.inner
        members: dict[int, list[int]] = defaultdict(list)
        for i in sorted(again):
            for s in {s for s in facts.makes[i] if s in theirs}.union(
                s for s, _, looks in facts.reads[i] if s in theirs and self._inside(s, looks, own)
            ):
                members[s].append(i)
        slots_of: dict[int, list[int]] = defaultdict(list)
        for index in self.slots:
            if (self.profile.slots[index].storage in self.inner) is own:
                slots_of[self._seed(self.profile.slots[index])].append(index)
        joined = UnionFind(again)
        first: dict[int, list[int]] = defaultdict(list)
        for s, indices in members.items():
            first[indices[0]].append(s)
            if len(indices) > 1:
                joined.union(*indices)
        found = []
        for part in joined.to_sets():
            inside = frozenset(s for i in part for s in first.get(i, ()))
            for i in part if own else ():
                for s, _, looks in facts.reads[i]:
                    if s in inside and not self._inside(s, looks, own):
                        raise ValueError(
                            f"storage {s} cannot be an inner boundary: operation {i} ({self.profile.ops[i].name}), "
                            "which reads it, runs again together with what makes it"
                        )
            slots = [s for i in part for s in slots_of.get(i, ())]
            found.append(Group(self.profile, part, slots, inside, inside & self.inner, self.dropped))
        return found

    @property
    def recompute_seconds(self) -> float:
        """Time of everything that runs again, with the cost of replaying itself."""
        p, started = self.profile, [g for g in self.groups if g.trigger >= 0]
        again = [i for g in started for i in g.ops]
        if self.inner:
            again += self._looks(again)
        # Exactly rounded: `sum` of floats is not the same in every version of Python.
        return math.fsum(p.ops[i].seconds + p.replay_op_seconds for i in again) + p.replay_group_seconds * len(started)

    def _looks(self, again: Iterable[int]) -> set[int]:
        """Looks by which operations read inner boundaries; whoever borrows a boundary makes such a look by itself."""
        facts, found, todo = self._facts, set[int](), list(again)
        while todo:
            for s, producer, _ in facts.reads[todo.pop()]:
                known = producer in found or producer in self.again
                if s in self.inner and facts.look_of.get(producer) == s and not known:
                    found.add(producer)
                    todo.append(producer)
        return found


def writers(profile: Profile) -> dict[int, tuple[int, ...]]:
    """For each storage that is changed in place during forward, the operations that do it, in order."""
    return facts_of(profile).writers


def undroppable(profile: Profile) -> dict[int, str]:
    """The storages that every plan keeps, each with the reason."""
    return facts_of(profile).undroppable


__all__ = ["EXTERNAL", "Group", "Schedule", "undroppable", "writers"]
