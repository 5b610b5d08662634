"""From a decision (which storages to drop) to what follows from it: which operations run again, in which groups.

A *group* is a set of operations that are replayed together: it is started by the first backward step that reads one of
its dropped slots, and everything it needs from outside is kept until its last slot has been read. Two operations are
in one group when one reads what the other makes and that is dropped. Values that are kept separate groups, so cutting
a model into segments is nothing but keeping the values that cross the cut.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable
from functools import cached_property

import networkx as nx

from .profile import Op, Profile, Slot

EXTERNAL = ("parameter", "buffer", "input", "constant")


class Group:
    """Operations that are replayed together.

    Attributes:
        ops: their indices, in order.
        slots: indices of the dropped slots that they serve.
        sources: storages made during the step, not dropped, that they read.
        trigger: the backward step that starts the replay; -1 if none does.
        end: the backward step after which nothing of the group is needed; len(steps) if a slot is never read.
    """

    def __init__(self, profile: Profile, ops: Iterable[int], slots: Iterable[int], dropped: frozenset[int]) -> None:
        self.ops = tuple(sorted(ops))
        self.slots = tuple(sorted(slots))
        steps = [profile.slots[s].step for s in self.slots]
        self.trigger = min((t for t in steps if t >= 0), default=-1)
        self.end = len(profile.steps) if any(t < 0 for t in steps) else max(steps, default=-1)
        self.sources = frozenset(
            read.storage
            for i in self.ops
            for read in profile.ops[i].reads
            if read.storage not in dropped and profile.storages[read.storage].kind not in EXTERNAL
        )


class Schedule:
    """What dropping `dropped` means for the step that `profile` describes.

    Args:
        profile: the measured step.
        dropped: indices of the storages that are not kept for backward but computed again.

    Raises:
        ValueError: the decision cannot be carried out; the message names the storage and the operation.
    """

    def __init__(self, profile: Profile, dropped: Iterable[int]) -> None:
        self.profile = profile
        self.dropped = frozenset(dropped)
        self._check_droppable()
        self.slots = tuple(i for i, s in enumerate(profile.slots) if s.storage in self.dropped)
        self.captured = frozenset(
            profile.slots[i].op for i in self.slots if profile.storages[profile.slots[i].storage].kind == "hidden"
        )
        self.again = self._closure()
        self._check_sources()

    def _check_droppable(self) -> None:
        for s in self.dropped:
            why = undroppable(self.profile).get(s)
            if why:
                raise ValueError(f"storage {s} cannot be dropped: {why}")

    def _seed(self, slot: Slot) -> int:
        return slot.op if self.profile.storages[slot.storage].kind == "hidden" else slot.producer

    def _closure(self) -> frozenset[int]:
        """Every operation that has to run again to fill the dropped slots."""
        ops, touching = self.profile.ops, writers(self.profile)
        stack = [self._seed(self.profile.slots[i]) for i in self.slots]
        again: set[int] = set()
        while stack:
            i = stack.pop()
            if i in again:
                continue
            again.add(i)
            for read in ops[i].reads:
                if read.storage in self.dropped:
                    stack.append(read.producer)
                    stack.extend(touching.get(read.storage, ()))
            for s in ops[i].output:
                if s in self.dropped:
                    stack.extend(touching.get(s, ()))
        return frozenset(again)

    def _check_sources(self) -> None:
        final = {s: len(w) for s, w in writers(self.profile).items()}
        for i in self.again:
            op = self.profile.ops[i]
            if op.replay == "never":
                raise ValueError(f"operation {i} ({op.name}) would run again, but cannot: {op.reason}")
            for position, read in enumerate(op.reads):
                if read.storage in self.dropped or position in op.snapshot:
                    continue
                if read.version != final.get(read.storage, 0):
                    raise ValueError(
                        f"operation {i} ({op.name}) would run again, but storage {read.storage} that it reads is "
                        "overwritten later and not computed again"
                    )
            for s in op.writes:
                external = self.profile.storages[s].kind in EXTERNAL
                if s not in self.dropped and not external:
                    raise ValueError(f"operation {i} ({op.name}) would write into storage {s} again, which is kept")

    @cached_property
    def groups(self) -> tuple[Group, ...]:
        """The groups, in the order in which forward runs them."""
        ops, graph = self.profile.ops, nx.Graph()
        graph.add_nodes_from(self.again)
        members: dict[int, list[int]] = defaultdict(list)
        for i in self.again:
            for s in {*(r.storage for r in ops[i].reads), *ops[i].makes, *ops[i].output, *ops[i].writes} & self.dropped:
                members[s].append(i)
        for indices in members.values():
            nx.add_path(graph, indices)
        slots_of: dict[int, list[int]] = defaultdict(list)
        for index in self.slots:
            slots_of[self._seed(self.profile.slots[index])].append(index)
        found = [
            Group(self.profile, part, [s for i in part for s in slots_of.get(i, ())], self.dropped)
            for part in nx.connected_components(graph)
        ]
        return tuple(sorted(found, key=lambda g: g.ops))

    @property
    def recompute_seconds(self) -> float:
        """Time of everything that runs again, with the cost of replaying itself."""
        p = self.profile
        # Exactly rounded: `sum` of floats is not the same in every version of Python.
        again = math.fsum(p.ops[i].seconds + p.replay_op_seconds for g in self.groups if g.trigger >= 0 for i in g.ops)
        return again + p.replay_group_seconds * sum(g.trigger >= 0 for g in self.groups)


def writers(profile: Profile) -> dict[int, tuple[int, ...]]:
    """For each storage that is changed in place during forward, the operations that do it, in order."""
    found: dict[int, list[int]] = defaultdict(list)
    for i, op in enumerate(profile.ops):
        for s in op.writes:
            found[s].append(i)
    return {s: tuple(w) for s, w in found.items()}


def undroppable(profile: Profile) -> dict[int, str]:
    """The storages that every plan keeps, each with the reason."""
    cached = _CACHE.get(id(profile))
    if cached is not None and cached[0] is profile:
        return cached[1]
    reasons: dict[int, str] = {}
    touching = writers(profile)
    for s, storage in enumerate(profile.storages):
        if storage.kind in EXTERNAL:
            reasons[s] = "it exists before the step"
            continue
        op: Op = profile.ops[storage.birth]
        for i in (storage.birth, *touching.get(s, ())):
            if profile.ops[i].replay == "never":
                reasons[s] = f"{profile.ops[i].name}: {profile.ops[i].reason}"
            elif not profile.ops[i].inside:
                reasons[s] = "it is made outside the model's forward"
        if storage.kind == "hidden" and op.random and op.replay == "never":
            reasons[s] = op.reason
    for op in profile.ops:
        for s in op.choices:
            reasons.setdefault(s, f"{op.name}: it holds a choice, which is kept")
        for read in op.reads:
            if read.producer < 0 and profile.storages[read.storage].kind == "value":
                reasons.setdefault(read.storage, f"{op.name} reads it by a tensor that no call returned")
    for i, slot in enumerate(profile.slots):
        if slot.fixed or (slot.producer < 0 and profile.storages[slot.storage].kind == "value"):
            reasons.setdefault(slot.storage, f"slot {i} holds it as it is")
    _CACHE.clear()
    _CACHE[id(profile)] = (profile, reasons)
    return reasons


_CACHE: dict[int, tuple[Profile, dict[int, str]]] = {}
