"""A profile and a budget, reduced to what deciding needs: sizes, costs, who reads what and until when.

The unknown of every solver is a set of storages to drop. `Problem` says which ones may be dropped at all, completes any
wish to a set that can be carried out (`repaired`), and has candidates judged by the simulation (`judge`). Sizes are
bytes, times seconds.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import msgspec

from .profile import Profile
from .schedule import EXTERNAL, Schedule, undroppable, writers
from .simulate import Timeline, simulate


class Judged(msgspec.Struct, frozen=True):
    """A decision and what the simulation says of it.

    Attributes:
        dropped: storages that are not kept, sorted; those without any effect are left out.
        seconds: time of everything that runs again.
        peak_bytes: most bytes live at any moment of the step.
        timeline: bytes at each moment.
        again: operations that run again.
        groups: the dropped storages of each group of operations that are replayed together.
        inner: dropped storages that are inner boundaries, sorted.
    """

    dropped: tuple[int, ...]
    seconds: float
    peak_bytes: int
    timeline: Timeline
    again: frozenset[int]
    groups: tuple[tuple[int, ...], ...]
    inner: tuple[int, ...] = ()


class Problem:
    """What deciding needs of one profile under one budget.

    Args:
        profile: the measured step.
        budget_bytes: most bytes that may be live at any moment.

    Attributes:
        made: whether a storage is made during the step, one entry per storage.
        final: how many operations write into a storage in place.
        touching: those operations, for the storages that have any.
        seed: for each slot, the operation that has to run again to fill it.
        slots_of: slots that lie in a storage.
        readers: operations that read a storage, each once, in order.
        last_step: last backward step that reads one of a storage's slots; -1 if it has no slot; len(steps) where a
            slot is never read, so that it stays until backward has ended.
        cost: seconds of running an operation again, the replay's own overhead included.
        smallest, smallest_unnested: the decision with the smallest peak, once it has been looked for; the second has
            no inner boundaries.
        tables, positions, decisions, floors, floored: what the solvers have prepared from the profile,
            for all budgets alike.
        proven: what they have proven for single budgets.
    """

    def __init__(self, profile: Profile, budget_bytes: int) -> None:
        self.profile, self.budget_bytes = profile, budget_bytes
        storages, ops, m = profile.storages, profile.ops, len(profile.steps)
        self.made = tuple(s.kind not in EXTERNAL for s in storages)
        self.touching = writers(profile)
        self.final = tuple(len(self.touching.get(s, ())) for s in range(len(storages)))
        self.seed = tuple(s.op if storages[s.storage].kind == "hidden" else s.producer for s in profile.slots)
        self.cost = tuple(op.seconds + profile.replay_op_seconds for op in ops)
        slots_of: list[list[int]] = [[] for _ in storages]
        last_step = [-1] * len(storages)
        for index, slot in enumerate(profile.slots):
            slots_of[slot.storage].append(index)
            last_step[slot.storage] = max(last_step[slot.storage], slot.step if slot.step >= 0 else m)
        readers: list[list[int]] = [[] for _ in storages]
        for i, op in enumerate(ops):
            for s in sorted({r.storage for r in op.reads}):
                readers[s].append(i)
        self.slots_of = tuple(tuple(x) for x in slots_of)
        self.readers = tuple(tuple(x) for x in readers)
        self.last_step = tuple(last_step)
        self.smallest: Judged | None = None
        self.smallest_unnested: Judged | None = None
        self.tables: Any = None
        self.positions: Any = None
        self.decisions: Any = None
        self.floors: Any = None
        self.floored: Any = None
        self.proven: dict[int, Any] = {}
        self._judged: dict[tuple[tuple[int, ...], tuple[int, ...]], Judged] = {}

    @cached_property
    def touched(self) -> tuple[tuple[int, ...], ...]:
        """For each storage, every operation that makes it, writes into it or returns a view of it, in order."""
        found: list[set[int]] = [set() for _ in self.made]
        for i, op in enumerate(self.profile.ops):
            for s in (*op.makes, *op.hides, *op.writes, *op.output):
                found[s].add(i)
        return tuple(tuple(sorted(x)) for x in found)

    @cached_property
    def needs_dropped(self) -> tuple[tuple[int, ...], ...]:
        """For each operation, the storages that must be computed again if it is: older versions read, writes."""
        found = []
        for op in self.profile.ops:
            old = {
                r.storage for p, r in enumerate(op.reads) if p not in op.snapshot and r.version != self.final[r.storage]
            }
            found.append(tuple(sorted(old | {s for s in op.writes if self.made[s]})))
        return tuple(found)

    @cached_property
    def droppable(self) -> tuple[bool, ...]:
        """Whether a storage may be dropped: nothing that would have to run again is barred from it."""
        allowed = [s not in undroppable(self.profile) for s in range(len(self.made))]
        barred = [op.replay == "never" or not op.inside for op in self.profile.ops]
        changed = True
        while changed:
            changed = False
            for i, needed in enumerate(self.needs_dropped):
                if not barred[i] and not all(allowed[s] for s in needed):
                    barred[i] = changed = True
            for s, ok in enumerate(allowed):
                seeds = {self.seed[x] for x in self.slots_of[s]}
                if ok and any(barred[i] for i in {*self.touched[s], *seeds} if i >= 0):
                    allowed[s], changed = False, True
        return tuple(allowed)

    @cached_property
    def candidates(self) -> tuple[int, ...]:
        """The storages that may be dropped, in order."""
        return tuple(s for s, ok in enumerate(self.droppable) if ok)

    def repaired(self, wish: Iterable[int]) -> tuple[int, ...]:
        """The smallest decision that contains the droppable part of `wish` and can be carried out.

        Storages that then have no effect, because no slot lies in them and nothing that runs again reads them, are
        left out, so that equal plans are equal decisions.
        """
        dropped = {s for s in wish if self.droppable[s]}
        ops = self.profile.ops
        stack = [self.seed[x] for s in dropped for x in self.slots_of[s]]
        again: set[int] = set()

        def drop(s: int) -> None:
            # What already runs again and reads s now needs it computed, too.
            dropped.add(s)
            stack.extend(self.seed[x] for x in self.slots_of[s])
            again.difference_update(reader := [i for i in (*self.readers[s], *self.touched[s]) if i in again])
            stack.extend(reader)

        while stack:
            i = stack.pop()
            if i in again:
                continue
            again.add(i)
            for s in self.needs_dropped[i]:
                if s not in dropped:
                    drop(s)
            for read in ops[i].reads:
                if read.storage in dropped:
                    stack.append(read.producer)
                    stack.extend(self.touching.get(read.storage, ()))
            for s in ops[i].output:
                if s in dropped:
                    stack.extend(self.touching.get(s, ()))
        read_again = {r.storage for i in again for r in ops[i].reads} | {s for i in again for s in ops[i].writes}
        return tuple(sorted(s for s in dropped if self.slots_of[s] or s in read_again))

    def with_budget(self, budget_bytes: int) -> Problem:
        """The same problem under another budget; what was judged stays known."""
        other = copy.copy(self)
        other.budget_bytes = budget_bytes
        return other

    def judge(self, wish: Iterable[int], inner: Iterable[int] = ()) -> Judged:
        """What the simulation says of a decision, completed to one that can be carried out. Answers are remembered.

        Args:
            wish: storages to drop.
            inner: those of them that are to be inner boundaries; see `Schedule`.

        Raises:
            ValueError: these inner boundaries cannot be; none does without.
        """
        key = self.completed(wish, inner)
        if key not in self._judged:
            self._judged[key] = self.judged(*key)
        return self._judged[key]

    def completed(self, wish: Iterable[int], inner: Iterable[int] = ()) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The storages to drop, and the inner boundaries, of a wish that is completed to what can be carried out."""
        dropped = self.repaired(wish)
        return dropped, tuple(sorted(set(inner) & set(dropped))) if inner else ()

    def judged(self, dropped: tuple[int, ...], inner: tuple[int, ...]) -> Judged:
        """The same as `judge` for a completed decision, without remembering it: timelines of thousands are large.

        Raises:
            ValueError: these inner boundaries cannot be.
        """
        schedule = Schedule(self.profile, dropped, inner)
        timeline = simulate(self.profile, schedule)
        groups = tuple(tuple(sorted({self.profile.slots[x].storage for x in g.slots})) for g in schedule.groups)
        return Judged(dropped, schedule.recompute_seconds, timeline.peak_bytes, timeline, schedule.again, groups, inner)

    def cheapest_known(self) -> Judged:
        """Of all decisions judged so far, under any budget, the cheapest that keeps this one.

        Raises:
            ValueError: none does.
        """
        fitting = [j for j in self._judged.values() if j.peak_bytes <= self.budget_bytes]
        return min(fitting, key=lambda j: (j.seconds, j.peak_bytes, j.dropped, j.inner))


def make_problem(profile: Profile, budget_bytes: int) -> Problem:
    """The problem of keeping `profile`'s step within `budget_bytes`."""
    return Problem(profile, budget_bytes)
