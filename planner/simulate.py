"""Replays a decision over a profile and returns what is live at every moment of the step.

This is the judge of every plan. It shares nothing with the solvers: it walks the step operation by operation, with the
mechanism's own rules, and adds up what is there.

The rules. *Forward*: a storage is live from its birth until Python lets go of it, or, where it is kept for backward,
until the last backward step that needs it. *Backward*: autograd runs its nodes in the plain step's order; a node frees
what it saved once it has run. *Replay*: when the first dropped slot of a group is read, the group's operations run
again in order; a value is let go after its last use in the replay, unless a slot waits for it; such a slot is let go
once its step has run. What a group reads from outside stays until its last slot has been read.
"""

from __future__ import annotations

from collections import defaultdict

import msgspec
import numpy as np
from numpy.typing import NDArray

from .profile import Profile
from .schedule import EXTERNAL, Group, Schedule


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
    until = needed_until(profile, schedule)
    forward = np.zeros(n + 2, dtype=np.int64)  # differences of live bytes at the start of each operation
    backward = np.zeros(m + 1, dtype=np.int64)  # differences of kept bytes at each backward step
    for s, storage in enumerate(profile.storages):
        if storage.kind in EXTERNAL:
            continue
        step = m if storage.death > n else until.get(s, -1)
        forward[storage.birth + 1] += storage.bytes
        if step < 0:
            forward[min(storage.death, n + 1)] -= storage.bytes
        else:
            _span(backward, 0, step, storage.bytes)
    for group in schedule.groups:
        for i in group.ops:
            extra = profile.rng_state_bytes * profile.ops[i].random
            extra += sum(profile.storages[profile.ops[i].reads[p].storage].bytes for p in profile.ops[i].snapshot)
            forward[i] += extra
            _span(backward, 0, group.end, extra)
    live = np.cumsum(forward)[:n] + resident
    forward_peak = live + np.array([op.workspace_bytes for op in profile.ops], dtype=np.int64)
    since_forward = np.cumsum(backward)[:m] + resident
    starts = defaultdict(list)
    for group in schedule.groups:
        if group.trigger >= 0:
            starts[group.trigger].append(group)
            for slot_bytes, end in _slot_spans(profile, schedule, group):
                _span(backward, group.trigger, end, slot_bytes)
    kept = np.cumsum(backward)[:m] + resident
    replay = np.zeros(m, dtype=np.int64)
    peaks = kept + np.array([step.peak_bytes for step in profile.steps], dtype=np.int64)
    for step_index, groups in starts.items():
        # Live before this step's replays: all but what they are about to make.
        before = int(kept[step_index]) + profile.steps[step_index].live_bytes
        before -= sum(size for g in groups for size, _ in _slot_spans(profile, schedule, g))
        for group in groups:
            peak, left = _replay(profile, schedule, group)
            replay[step_index] = max(int(replay[step_index]), before + peak)
            before += left
        peaks[step_index] = max(int(peaks[step_index]), int(replay[step_index]))
    held = sum(s.bytes for s in profile.storages if s.death > n and s.kind not in EXTERNAL)
    optimizer = resident + held + profile.gradient_bytes + profile.optimizer_workspace_bytes
    return Timeline(
        forward=tuple(int(b) for b in forward_peak),
        backward=tuple(int(b) for b in peaks),
        optimizer_bytes=optimizer,
        replay=tuple(int(b) for b in replay),
        saved=int(since_forward[0]) - resident if m else 0,
        kept=tuple(int(b) for b in since_forward),
    )


def _span(differences: NDArray[np.int64], first: int, last: int, size: int) -> None:
    """Adds `size` to steps first..last; the array holds differences."""
    if last >= first:
        differences[first] += size
        if last + 1 < len(differences):
            differences[last + 1] -= size


def needed_until(profile: Profile, schedule: Schedule) -> dict[int, int]:
    """For each storage that is kept for backward, the last step that needs it."""
    m = len(profile.steps)
    until: dict[int, int] = {}
    for slot in profile.slots:
        if slot.storage not in schedule.dropped:
            until[slot.storage] = max(until.get(slot.storage, -1), slot.step if slot.step >= 0 else m)
    for group in schedule.groups:
        for s in group.sources:
            until[s] = max(until.get(s, -1), group.end)
    return until


def _slot_spans(profile: Profile, schedule: Schedule, group: Group) -> list[tuple[int, int]]:
    """(bytes, last step) of each storage that waits in the group's slots after the replay."""
    last: dict[int, int] = {}
    for index in group.slots:
        slot = profile.slots[index]
        if slot.step >= 0:
            last[slot.storage] = max(last.get(slot.storage, -1), slot.step)
    return [(profile.storages[s].bytes, end) for s, end in last.items()]


def _replay(profile: Profile, schedule: Schedule, group: Group) -> tuple[int, int]:
    """(peak, what is left afterwards) of running a group's operations again, in bytes above what was live before."""
    waits = {profile.slots[i].storage for i in group.slots if profile.slots[i].step >= 0}
    last_use: dict[int, int] = {}
    for i in group.ops:
        op = profile.ops[i]
        for s in (*op.makes, *op.output, *op.writes, *(r.storage for r in op.reads)):
            if s in schedule.dropped:
                last_use[s] = i
    ending: dict[int, list[int]] = defaultdict(list)
    for s, i in last_use.items():
        if s not in waits:
            ending[i].append(s)
    live, peak, states = 0, 0, 0
    held: set[int] = set()
    for i in group.ops:
        op = profile.ops[i]
        if op.random:  # from the first draw on, the generators' states are kept to be put back at the end
            states = profile.rng_state_bytes
        peak = max(peak, live + states + op.workspace_bytes)
        made = [s for s in op.makes if s in schedule.dropped]
        if i in schedule.captured:
            made += [s for s in op.hides if s in waits]
        for s in made:
            if s not in held:
                held.add(s)
                live += profile.storages[s].bytes
        for s in ending.get(i, ()):
            if s in held:
                held.discard(s)
                live -= profile.storages[s].bytes
    return peak, live
