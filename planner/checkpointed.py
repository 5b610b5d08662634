"""What a step takes in which regions are checkpointed: live bytes at every moment, by the rules of `checkpoint`.

The rules. *Forward*: the graph lets each value go after its last use; what a region takes is held while it runs, and
for backward: a region keeps its inputs, whatever it saves goes. *Backward*: at the first read of something that a
region would have saved, the region runs again from its beginning, with gradients, until all that it saved is there;
while it runs, whatever it saved so far is held. Each saved tensor goes when it has been read for the last time, the
inputs when all have been. Buffers that forward changes are copied for a region, and again when it runs again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .regions import Region, Regional, remembered
from .simulate import Timeline
from .steparrays import Ints, ints


class _Effect(NamedTuple):
    """What one region does to the step, whatever the others are.

    Attributes:
        region: it.
        needs, until: storages that it keeps for backward, and the last step that needs each for it.
        holds: storages that it takes from outside and is the last to use; they are held while it runs.
        trigger: the first step that reads one of its slots; -1 if none does.
        state_bytes, state_until: of the copies and states that it keeps, and the last step that needs them.
        waiting_bytes: what running it again leaves for its slots.
        steps, changes: where that comes and goes: differences of live bytes at those steps.
        again_bytes: the most that is live while it runs again, above what is live before.
    """

    region: Region
    needs: Ints
    until: Ints
    holds: Ints
    trigger: int
    state_bytes: int
    state_until: int
    waiting_bytes: int
    steps: Ints
    changes: Ints
    again_bytes: int


@remembered
def _effect(regional: Regional, region: Region) -> _Effect:
    """What a region does to the step."""
    needed = _needed_until(regional, region)
    trigger, end = regional.trigger_and_end(region)
    waiting = _waiting(regional, region) if trigger >= 0 else []
    total = sum(size for size, _ in waiting)
    ending = [(last + 1, -size) for size, last in waiting if last < len(regional.profile.steps)]
    return _Effect(
        region=region,
        needs=ints(list(needed)),
        until=ints(list(needed.values())),
        holds=ints(_held_while_it_runs(regional, region)),
        trigger=trigger,
        state_bytes=regional.state_bytes(region),
        state_until=end,
        waiting_bytes=total,
        steps=ints([trigger, *(step for step, _ in ending)]),
        changes=ints([total, *(change for _, change in ending)]),
        again_bytes=_run_again(regional, region),
    )


def simulate_regions(regional: Regional, regions: Sequence[Region]) -> Timeline:
    """Live bytes at every moment of the step with these regions, which are in order and apart."""
    profile, arrays = regional.profile, regional.arrays
    n, m, resident = len(profile.ops), len(profile.steps), profile.resident_bytes
    effects = [_effect(regional, region) for region in regions]
    step = np.where(arrays.stays, m, _last_needed(regional, effects)[arrays.made])
    forward = arrays.births.copy()  # differences of live bytes at the start of each operation
    backward = np.zeros(m + 1, dtype=np.int64)  # differences of kept bytes at each backward step
    unneeded = step < 0
    np.subtract.at(forward, _leaves(regional, effects)[arrays.made[unneeded]], arrays.made_bytes[unneeded])
    _until(backward, step[~unneeded], arrays.made_bytes[~unneeded])
    states = ints([effect.state_bytes for effect in effects])
    forward[[effect.region.first for effect in effects]] += states
    _until(backward, ints([effect.state_until for effect in effects]), states)
    forward_peak = np.cumsum(forward)[:n] + resident + arrays.workspace
    since_forward = np.cumsum(backward)[:m] + resident
    running = [effect for effect in effects if effect.trigger >= 0]
    if running:
        steps, changes = (np.concatenate([getattr(e, name) for e in running]) for name in ("steps", "changes"))
        np.add.at(backward, steps, changes)
    kept = np.cumsum(backward)[:m] + resident
    replay = np.zeros(m, dtype=np.int64)
    before = kept + arrays.step_live
    for effect in running:
        t = effect.trigger
        replay[t] = max(replay[t], before[t] - effect.waiting_bytes + effect.again_bytes)
    return Timeline(
        forward=tuple(forward_peak.tolist()),
        backward=tuple(np.maximum(kept + arrays.step_peaks, replay).tolist()),
        optimizer_bytes=resident + arrays.held_bytes + profile.gradient_bytes + profile.optimizer_workspace_bytes,
        replay=tuple(replay.tolist()),
        saved=int(since_forward[0]) - resident if m else 0,
        kept=tuple(since_forward.tolist()),
    )


def _until(differences: Ints, lasts: Ints, sizes: Ints) -> None:
    """Adds each size to the steps up to its last, -1 for none; the array holds differences."""
    differences[0] += sizes[lasts >= 0].sum()
    ending = (lasts >= 0) & (lasts + 1 < len(differences))
    np.subtract.at(differences, lasts[ending] + 1, sizes[ending])


def kept_until(regional: Regional, regions: Sequence[Region]) -> dict[int, int]:
    """For each storage that is kept for backward, the last step that needs it.

    Example:
        >>> kept_until(Regional(profile), [Region(0, 12)])  # doctest: +SKIP
        {0: 40, 17: 3}
    """
    effects = [_effect(regional, region) for region in regions]
    return {s: step for s, step in enumerate(_last_needed(regional, effects).tolist()) if step >= 0}


def let_go(regional: Regional, regions: Sequence[Region]) -> tuple[int, ...]:
    """For each storage, the operation before which the graph lets go of it where backward does not need it.

    Example:
        >>> let_go(Regional(profile), [Region(0, 12)])  # doctest: +SKIP
        (4, 12, 13)
    """
    return tuple(_leaves(regional, [_effect(regional, region) for region in regions]).tolist())


def _last_needed(regional: Regional, effects: Sequence[_Effect]) -> Ints:
    """For each storage, the last step that needs it kept; -1 where none does."""
    profile, arrays = regional.profile, regional.arrays
    outside = np.ones(len(profile.ops) + 1, dtype=np.bool_)
    for effect in effects:
        outside[effect.region.first : effect.region.stop] = False
    plain = outside[arrays.slot_ops]
    needs = np.concatenate([arrays.slot_storages[plain], *(effect.needs for effect in effects)])
    steps = np.concatenate([arrays.slot_steps[plain], *(effect.until for effect in effects)])
    until = np.full(len(profile.storages), -1, dtype=np.int64)
    np.maximum.at(until, needs, steps)
    return until


def _leaves(regional: Regional, effects: Sequence[_Effect]) -> Ints:
    """For each storage, the operation before which the graph lets it go."""
    leaves = regional.arrays.leaves.copy()
    for effect in effects:
        leaves[effect.holds] = effect.region.stop
    return leaves


def _needed_until(regional: Regional, region: Region) -> dict[int, int]:
    """What a region keeps for backward: its inputs and the results within it that are kept, each with its last step."""
    profile, m = regional.profile, len(regional.profile.steps)
    trigger, end = regional.trigger_and_end(region)
    kept, passing, last = _kept(regional, region), _passing(regional, region), regional.last_run(region)[0]
    until = dict.fromkeys(regional.inputs(region), end)
    for s in kept:
        step = trigger - 1 if s in passing else end if profile.storages[s].birth > last else trigger
        until[s] = max(until.get(s, -1), step)
    for x in regional.slots(region):
        slot = profile.slots[x]
        if slot.storage in kept:
            until[slot.storage] = max(until[slot.storage], slot.step if slot.step >= 0 else m)
    return until


def _held_while_it_runs(regional: Regional, region: Region) -> list[int]:
    """Storages that a region takes from outside and is the last to use."""
    storages, span = regional.profile.storages, range(region.first, region.stop)
    return [
        s
        for s in regional.inputs(region)
        if not regional.outlives[s] and storages[s].kind != "hidden" and regional.touches[s][-1] in span
    ]


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


def _run_again(regional: Regional, region: Region) -> int:
    """The most bytes that are live while the region runs again, above those live before."""
    profile = regional.profile
    kept, passing = _kept(regional, region), _passing(regional, region)
    last, runs = regional.last_run(region)
    live = peak = regional.state_bytes(region) + sum(profile.storages[s].bytes for s in passing)
    saved: set[int] = set()
    held: set[int] = set()
    going: dict[int, list[int]] = defaultdict(list)  # for each operation, what goes after it unless it is saved
    for i in range(region.first, last + 1):
        if i == last and not runs:
            break
        op = profile.ops[i]
        if i not in region.kept:
            peak = max(peak, live + op.workspace_bytes)
        saved |= {profile.slots[x].storage for x in regional.slots_of_op[i]}
        for s in _made_again(regional, region, i):
            if s not in held and (s not in kept or s in passing):
                held.add(s)
                touches = regional.touches[s]
                inner = touches[bisect_left(touches, region.stop) - 1]
                end = last if op.makes and regional.used_later(s, region) else inner
                if end < last:
                    going[max(end, i)].append(s)
                live += profile.storages[s].bytes * (s not in passing)
        peak = max(peak, live)
        live -= sum(profile.storages[s].bytes for s in going.pop(i, ()) if s not in saved)
    return peak
