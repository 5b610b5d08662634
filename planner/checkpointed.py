"""What a step takes in which regions are checkpointed: live bytes at every moment, by the rules of `checkpoint`.

The rules. *Forward*: the graph lets each value go after its last use; what a region takes is held while it runs, and
for backward: a region keeps its inputs, whatever it saves goes. *Backward*: at the first read of something that a
region would have saved, the region runs again from its beginning, with gradients, until all that it saved is there;
while it runs, whatever it saved so far is held. Each saved tensor goes when it has been read for the last time, the
inputs when all have been. Buffers that forward changes are copied for a region, and again when it runs again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .profile import UNSEEN
from .regions import Region, Regional, remembered
from .schedule import EXTERNAL
from .simulate import Timeline


def simulate_regions(regional: Regional, regions: Sequence[Region]) -> Timeline:
    """Live bytes at every moment of the step with these regions, which are in order and apart."""
    profile = regional.profile
    n, m, resident = len(profile.ops), len(profile.steps), profile.resident_bytes
    until = kept_until(regional, regions)
    gone = let_go(regional, regions)
    forward = np.zeros(n + 2, dtype=np.int64)  # differences of live bytes at the start of each operation
    backward = np.zeros(m + 1, dtype=np.int64)  # differences of kept bytes at each backward step
    for s, storage in enumerate(profile.storages):
        if storage.kind in EXTERNAL:
            continue
        step = m if storage.death > n else until.get(s, -1)
        forward[storage.birth + 1] += storage.bytes
        if step < 0:
            forward[min(gone[s], n + 1)] -= storage.bytes
        else:
            _span(backward, 0, step, storage.bytes)
    for region in regions:
        forward[region.first] += regional.state_bytes(region)
        _span(backward, 0, regional.trigger_and_end(region)[1], regional.state_bytes(region))
    live = np.cumsum(forward)[:n] + resident
    forward_peak = live + np.array([op.workspace_bytes for op in profile.ops], dtype=np.int64)
    since_forward = np.cumsum(backward)[:m] + resident
    waiting = {region: _waiting(regional, region) for region in regions}
    for region in regions:
        trigger = regional.trigger_and_end(region)[0]
        for size, end in waiting[region] if trigger >= 0 else ():
            _span(backward, trigger, end, size)
    kept = np.cumsum(backward)[:m] + resident
    replay = np.zeros(m, dtype=np.int64)
    peaks = kept + np.array([step.peak_bytes for step in profile.steps], dtype=np.int64)
    for region in regions:
        t = regional.trigger_and_end(region)[0]
        if t < 0:
            continue
        before = int(kept[t]) + profile.steps[t].live_bytes - sum(size for size, _ in waiting[region])
        replay[t] = max(int(replay[t]), before + _run_again(regional, region))
        peaks[t] = max(int(peaks[t]), int(replay[t]))
    held = sum(s.bytes for s in profile.storages if s.death > n and s.kind not in EXTERNAL)
    return Timeline(
        forward=tuple(int(b) for b in forward_peak),
        backward=tuple(int(b) for b in peaks),
        optimizer_bytes=resident + held + profile.gradient_bytes + profile.optimizer_workspace_bytes,
        replay=tuple(int(b) for b in replay),
        saved=int(since_forward[0]) - resident if m else 0,
        kept=tuple(int(b) for b in since_forward),
    )


def _span(differences: np.ndarray, first: int, last: int, size: int) -> None:
    """Adds `size` to steps first..last; the array holds differences."""
    if last >= first:
        differences[first] += size
        if last + 1 < len(differences):
            differences[last + 1] -= size


def kept_until(regional: Regional, regions: Sequence[Region]) -> dict[int, int]:
    """For each storage that is kept for backward, the last step that needs it; -1 where none does."""
    profile, m = regional.profile, len(regional.profile.steps)
    where = _region_of(regions)
    until: dict[int, int] = {}

    def need(s: int, step: int) -> None:
        until[s] = max(until.get(s, -1), step)

    for slot in profile.slots:
        if slot.position == UNSEEN or slot.op not in where:
            need(slot.storage, slot.step if slot.step >= 0 else m)
    for region in regions:
        trigger, end = regional.trigger_and_end(region)
        for s in regional.inputs(region):
            need(s, end)
        kept, passing = _kept(regional, region), _passing(regional, region)
        for s in kept:
            need(
                s,
                trigger - 1
                if s in passing
                else end
                if profile.storages[s].birth > regional.last_run(region)[0]
                else trigger,
            )
        for x in regional.slots(region):
            slot = profile.slots[x]
            if slot.storage in kept:
                need(slot.storage, slot.step if slot.step >= 0 else m)
    return until


def _region_of(regions: Sequence[Region]) -> dict[int, Region]:
    """The region that an operation lies in, for those that lie in one."""
    return {i: region for region in regions for i in range(region.first, region.stop)}


def let_go(regional: Regional, regions: Sequence[Region]) -> tuple[int, ...]:
    """For each storage, the operation before which the graph lets go of it where backward does not need it."""
    where = _region_of(regions)
    return tuple(
        storage.death if storage.kind in EXTERNAL else _let_go(regional, s, where)
        for s, storage in enumerate(regional.profile.storages)
    )


def _let_go(regional: Regional, s: int, where: dict[int, Region]) -> int:
    """The operation before which the graph lets go of a storage that is made in the step."""
    storage = regional.profile.storages[s]
    if regional.outlives[s] or storage.kind == "hidden":
        return storage.death
    last = regional.touches[s][-1]
    region = where.get(last)
    if region is not None and storage.birth < region.first:  # it is held while the region runs
        return region.stop
    return last + 1


@remembered
def _kept(regional: Regional, region: Region) -> set[int]:
    """What is kept of the results within a region."""
    ops = regional.profile.ops
    return {s for i in region.kept for s in (*ops[i].makes, *ops[i].hides)}


@remembered
def _passing(regional: Regional, region: Region) -> set[int]:
    """What is kept for nothing but running the region again, and goes on the way."""
    last, trigger = regional.last_run(region)[0], regional.trigger_and_end(region)[0]
    if trigger < 1:
        return set()
    saved = {regional.profile.slots[x].storage for x in regional.slots(region)}
    storages = regional.profile.storages
    return {
        s for s in _kept(regional, region) - saved if storages[s].birth <= last and not regional.used_later(s, region)
    }


def _made_again(regional: Regional, region: Region, i: int) -> list[int]:
    """Storages that operation i makes when the region runs again; a cast that autocast remembered is made anew."""
    profile = regional.profile
    op = profile.ops[i]
    slots = {profile.slots[x].storage for x in regional.slots_of_op[i]}
    casts = {s for s in slots if profile.storages[s].kind == "hidden" and profile.storages[s].birth < region.first}
    return [*op.makes, *op.hides, *sorted(casts)]


@remembered
def _waiting(regional: Regional, region: Region) -> list[tuple[int, int]]:
    """(bytes, last step) of each storage that running the region again leaves for its slots."""
    profile, kept = regional.profile, _kept(regional, region)
    last: dict[int, int] = {}
    for x in regional.slots(region):
        slot = profile.slots[x]
        storage = profile.storages[slot.storage]
        again = storage.birth >= region.first or storage.kind == "hidden"
        if slot.step >= 0 and again and slot.storage not in kept:
            last[slot.storage] = max(last.get(slot.storage, -1), slot.step)
    return [(profile.storages[s].bytes, end) for s, end in last.items()]


@remembered
def _run_again(regional: Regional, region: Region) -> int:
    """The most bytes that are live while the region runs again, above those live before."""
    profile = regional.profile
    kept, passing = _kept(regional, region), _passing(regional, region)
    last, runs = regional.last_run(region)
    live = peak = regional.state_bytes(region) + sum(profile.storages[s].bytes for s in passing)
    saved: set[int] = set()
    held: dict[int, int] = {}  # storages and the operation after which they go
    for i in range(region.first, last + 1):
        if i == last and not runs:
            break
        op = profile.ops[i]
        if i not in region.kept:
            peak = max(peak, live + op.workspace_bytes)
        saved |= {profile.slots[x].storage for x in regional.slots_of_op[i]}
        for s in _made_again(regional, region, i):
            if s not in held and (s not in kept or s in passing):
                inner = max(t for t in regional.touches[s] if t < region.stop)
                held[s] = last if op.makes and regional.used_later(s, region) else inner
                live += profile.storages[s].bytes * (s not in passing)
        peak = max(peak, live)
        for s in [s for s, end in held.items() if end <= i and s not in saved and end < last]:
            live -= profile.storages[s].bytes
            held[s] = len(profile.ops)  # gone
    return peak
