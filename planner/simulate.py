"""Replays a decision over a profile and returns what is live at every moment of the step.

This is the judge of every plan. It shares nothing with the solvers: it walks the step operation by operation, with the
mechanism's own rules, and adds up what is there.

The rules. *Forward*: a storage is live from its birth until Python lets go of it, or, where it is kept for backward,
until the last backward step that needs it. *Backward*: autograd runs its nodes in the plain step's order; a node reads
what it saved in the order in which it saved it, and frees it once it has run. *Replay*: when the first dropped slot of
a group is read, the group's operations run again in order; a value is let go after its last use in the replay, unless
a slot waits for it; such a slot is let go once its step has run. What a group reads from outside stays until its last
slot has been read.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from .facts import facts_of
from .profile import Profile
from .schedule import Group, Schedule


class Timeline(msgspec.Struct, frozen=True):
    """Peak of live bytes during each operation of forward and each step of backward, and during the optimizer's step.

    Attributes:
        forward: one entry per operation, bytes.
        backward: one entry per backward step, bytes, the replay that it starts included.
        optimizer_bytes: during the optimizer's step.
        replay: one entry per backward step, bytes: the peak of the replay alone that the step starts, 0 if none.
        saved: bytes saved for backward when forward has ended.
        kept: one entry per backward step, bytes: resident, and kept since forward; without what is replayed.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]
    optimizer_bytes: int
    replay: tuple[int, ...]
    saved: int
    kept: tuple[int, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at any moment of the step."""
        return max(max(self.forward, default=0), max(self.backward, default=0), self.optimizer_bytes)


def simulate(profile: Profile, schedule: Schedule) -> Timeline:
    """Live bytes at every moment of the step that `schedule` makes of `profile`."""
    n, m, resident = len(profile.ops), len(profile.steps), profile.resident_bytes
    facts = facts_of(profile)
    until = _until(profile, schedule)[facts.made]
    until[facts.deaths > n] = m
    forward = np.zeros(n + 2, dtype=np.int64)  # differences of live bytes at the start of each operation
    backward = np.zeros(m + 2, dtype=np.int64)  # differences of kept bytes at each backward step
    np.add.at(forward, facts.births + 1, facts.sizes)
    gone = until < 0
    np.subtract.at(forward, facts.deaths[gone], facts.sizes[gone])
    backward[0] = facts.sizes[~gone].sum()
    np.subtract.at(backward, until[~gone] + 1, facts.sizes[~gone])
    for group in schedule.groups:
        for i in group.ops:
            op = profile.ops[i]
            if not op.random and not op.snapshot:
                continue
            extra = profile.rng_state_bytes * op.random
            extra += sum(profile.storages[op.reads[p].storage].bytes for p in op.snapshot)
            forward[i] += extra
            _span(backward, 0, group.end, extra)
    live = np.cumsum(forward)[:n] + resident
    forward_peak = live + facts.workspace
    since_forward = np.cumsum(backward)[:m] + resident
    replays = _replays(profile, schedule)
    for step_index, replay in ((t, r) for t, started in replays.items() for r in started):
        for slot_bytes, end in replay.spans:
            _span(backward, step_index, end, slot_bytes)
    kept = np.cumsum(backward)[:m] + resident
    replay_peaks = np.zeros(m, dtype=np.int64)
    peaks = kept + facts.step_peaks
    for step_index, started in replays.items():
        # Live before this step's replays: all but what they are about to make, and with what the last of them lets go.
        before = int(kept[step_index]) + profile.steps[step_index].live_bytes
        before += sum(profile.storages[s].bytes for replay in started for s in replay.lets_go)
        before -= sum(size for replay in started for size, _ in replay.spans)
        for replay in started:
            peak, left = _replay(profile, schedule, replay)
            replay_peaks[step_index] = max(int(replay_peaks[step_index]), before + peak)
            before += left
        peaks[step_index] = max(int(peaks[step_index]), int(replay_peaks[step_index]))
    held = int(facts.sizes[facts.deaths > n].sum())
    optimizer = resident + held + profile.gradient_bytes + profile.optimizer_workspace_bytes
    return Timeline(
        forward=tuple(forward_peak.tolist()),
        backward=tuple(peaks.tolist()),
        optimizer_bytes=optimizer,
        replay=tuple(replay_peaks.tolist()),
        saved=int(since_forward[0]) - resident if m else 0,
        kept=tuple(since_forward.tolist()),
    )


def _span(differences: NDArray[np.int64], first: int, last: int, size: int) -> None:
    """Adds `size` to steps first..last; the array holds differences."""
    if last >= first:
        differences[first] += size
        differences[last + 1] -= size


def needed_until(profile: Profile, schedule: Schedule) -> dict[int, int]:
    """For each storage that is kept for backward, the last step that needs it."""
    return {s: t for s, t in enumerate(_until(profile, schedule).tolist()) if t >= 0}


def _until(profile: Profile, schedule: Schedule) -> NDArray[np.int64]:
    """The same for every storage; -1 where backward does not need it."""
    facts = facts_of(profile)
    dropped = np.zeros(len(profile.storages), dtype=np.bool_)
    dropped[list(schedule.dropped)] = True
    until = np.full(len(profile.storages), -1, dtype=np.int64)
    kept = ~dropped[facts.slot_storages]
    np.maximum.at(until, facts.slot_storages[kept], facts.slot_steps[kept])
    for group in schedule.groups:
        for s in group.sources:
            until[s] = max(until[s], group.end)
    return until


class Replay(NamedTuple):
    """One group's replay.

    Attributes:
        group: what runs again.
        waits: what stays when it has run: storages that slots or other replays wait for.
        lets_go: inner boundaries of other groups that nothing needs after it.
        spans: (bytes, last step) of each of what stays; a step before its own where another replay of it lets it go.
    """

    group: Group
    waits: frozenset[int]
    lets_go: frozenset[int]
    spans: tuple[tuple[int, int], ...]


def _replays(profile: Profile, schedule: Schedule) -> dict[int, list[Replay]]:
    """The replays that each step starts, in order: what a group borrows is made right before it, if it is not there."""
    lender = {s: group for group in schedule.groups for s in group.lends}
    order: list[tuple[int, Group]] = []
    done: set[int] = set()
    by_step: dict[int, list[Group]] = defaultdict(list)
    for group in sorted(schedule.groups, key=lambda group: group.opener):
        if group.opener >= 0:  # the others are started by those that borrow from them
            by_step[profile.slots[group.opener].step].append(group)
    for step in sorted(by_step):
        stack = by_step[step][::-1]
        while stack:
            group = stack[-1]
            missing = {id(lender[s]): lender[s] for s in group.borrows if id(lender[s]) not in done}
            if missing:
                stack.extend(reversed(missing.values()))
                continue
            stack.pop()
            if id(group) not in done:
                done.add(id(group))
                order.append((step, group))
    last_replay = {s: place for place, (_, group) in enumerate(order) for s in group.borrows}
    found: dict[int, list[Replay]] = defaultdict(list)
    for place, (step, group) in enumerate(order):
        ends = _ends(profile, group)
        lets_go = frozenset(
            s for s in group.borrows if last_replay[s] == place and _ends(profile, lender[s]).get(s, -1) < step
        )
        waits = frozenset({*ends, *(s for s in group.lends if s in last_replay)})
        spans = []
        for s in sorted(waits):
            end, borrowed = ends.get(s, -1), order[last_replay[s]][0] if s in last_replay else -1
            # A replay that is the last to need it lets it go before its step runs.
            spans.append((profile.storages[s].bytes, end if end >= borrowed else borrowed - 1))
        found[step].append(Replay(group, waits, lets_go, tuple(spans)))
    return found


def _ends(profile: Profile, group: Group) -> dict[int, int]:
    """The last step of each storage that waits in the group's slots after the replay."""
    last: dict[int, int] = {}
    for index in group.slots:
        slot = profile.slots[index]
        if slot.step >= 0:
            last[slot.storage] = max(last.get(slot.storage, -1), slot.step)
    return last


def _replay(profile: Profile, schedule: Schedule, replay: Replay) -> tuple[int, int]:
    """(peak, what is left afterwards) of running a group's operations again, in bytes above what was live before."""
    group = replay.group
    last_use: dict[int, int] = {}
    for i in group.ops:
        op = profile.ops[i]
        for s in (*op.makes, *op.output, *op.writes, *(r.storage for r in op.reads)):
            if s in group.inside or s in replay.lets_go:
                last_use[s] = i
    ending: dict[int, list[int]] = defaultdict(list)
    for s, i in last_use.items():
        if s not in replay.waits:
            ending[i].append(s)
    live, peak, states = 0, 0, 0
    held: set[int] = set(replay.lets_go)
    for i in group.ops:
        op = profile.ops[i]
        if op.random:  # from the first draw on, the generators' states are kept to be put back at the end
            states = profile.rng_state_bytes
        peak = max(peak, live + states + op.workspace_bytes)
        made = [s for s in op.makes if s in group.inside]
        if i in schedule.captured:
            made += [s for s in op.hides if s in replay.waits]
        for s in made:
            if s not in held:
                held.add(s)
                live += profile.storages[s].bytes
        for s in ending.get(i, ()):
            if s in held:
                held.discard(s)
                live -= profile.storages[s].bytes
    return peak, live
