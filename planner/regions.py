"""Contiguous parts of forward that run again as a whole, as `torch.utils.checkpoint` does. Free of torch."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from functools import cached_property
from typing import Any, TypeVar, cast

import msgspec

from .profile import UNSEEN, Profile
from .released import released, touched
from .schedule import EXTERNAL, writers
from .steparrays import StepArrays, step_arrays

# Measured on a CPU, forward and backward together: what a checkpoint costs beyond the kernels that run again.
REGION_SECONDS = 190e-6
OP_SECONDS = 20e-6
SELECTIVE_OP_SECONDS = 51e-6
MOST_COPIED = 1 << 20  # bytes: running statistics and counters are far below, caches and tables above


class Region(msgspec.Struct, frozen=True):
    """Operations `first` to `stop` - 1, run in one checkpoint.

    Attributes:
        first, stop: the span, as indices of operations.
        kept: operations within it whose results are kept, so that they do not run again.
    """

    first: int
    stop: int
    kept: tuple[int, ...] = ()


T = TypeVar("T")


def remembered(function: Callable[[Regional, Region], T]) -> Callable[[Regional, Region], T]:
    """A function of a region that is worked out once for each; its result is not to be changed."""

    def recall(regional: Regional, region: Region) -> T:
        key = (function.__qualname__, region)
        if key not in regional.known:
            regional.known[key] = function(regional, region)
        return cast(T, regional.known[key])

    recall.__doc__ = function.__doc__
    return recall


class Regional:
    """What regions mean for a profile: which may be, what each keeps, frees and costs.

    Args:
        profile: the measured step.
        barriers: positions that no region may lie across (a change of autocast lies before that operation).
        whole: operations that are part of something that cannot be run again by itself (a custom function).
    """

    def __init__(self, profile: Profile, barriers: Iterable[int] = (), whole: Iterable[int] = ()) -> None:
        self.known: dict[tuple[str, Region], Any] = {}
        self.profile, self.barriers, self.whole = profile, frozenset(barriers), frozenset(whole)
        self.final = {s: len(w) for s, w in writers(profile).items()}
        self.inside = sum(op.inside for op in profile.ops)
        self.touches = touched(profile)
        self.slots_of_op: list[list[int]] = [[] for _ in profile.ops]
        # The first and the last operation that saves a storage; a region cannot hold what no hook sees.
        self.saved_by = [(len(profile.ops), -1) for _ in profile.storages]
        for index, slot in enumerate(profile.slots):
            if slot.position != UNSEEN:
                self.slots_of_op[slot.op].append(index)
            ops = (slot.op, slot.op) if slot.position != UNSEEN else (-1, len(profile.ops))
            first, last = self.saved_by[slot.storage]
            self.saved_by[slot.storage] = min(first, ops[0]), max(last, ops[1])
        # Buffers that forward changes: a region takes copies, so that running again changes and finds the copies.
        self.copied = [
            storage.kind == "buffer"
            and bool(storage.name)
            and self.final.get(s, 0) > 0
            and storage.bytes <= MOST_COPIED
            for s, storage in enumerate(profile.storages)
        ]
        self.outlives = [s.death > self.inside for s in profile.storages]

    @cached_property
    def arrays(self) -> StepArrays:
        """The profile's numbers, with the operation before which the graph lets each storage go."""
        return step_arrays(self.profile, released(self.profile))

    @cached_property
    def eligible(self) -> tuple[bool, ...]:
        """Whether an operation may run again at all."""
        profile = self.profile
        return tuple(
            op.inside
            and op.replay != "never"
            and not op.choices
            and all(self.copied[op.reads[p].storage] for p in op.snapshot)
            and "set_grad_enabled" not in op.name
            and i not in self.whole
            and all(self.copied[s] or profile.storages[s].kind not in EXTERNAL for s in op.writes)
            for i, op in enumerate(profile.ops)
        )

    def within(self, first: int, stop: int) -> Iterator[Region]:
        """The regions that a span can be covered with: as long as can be, and only those that free something."""
        begin = first
        for i in range(first, stop):
            if i in self.barriers and i > begin:
                yield from self._worth(begin, i)
                begin = i
            if not (self.eligible[i] and self._joins(i, begin)):
                yield from self._worth(begin, i)
                begin = i + 1
        yield from self._worth(begin, stop)

    def _joins(self, i: int, begin: int) -> bool:
        """Whether operation i finds the same again in a region from `begin` on: nothing older is written or changes."""
        op, storages = self.profile.ops[i], self.profile.storages
        if any(storages[s].birth < begin and not self.copied[s] for s in op.writes):
            return False
        for read in op.reads:
            birth, final = storages[read.storage].birth, self.final.get(read.storage, 0)
            # Of a buffer that changes it has a copy, since another forward may come before backward.
            changes = birth < 0 and final and self.copied[read.storage]
            if birth >= begin or (read.version == final and not changes):
                continue
            if not self.copied[read.storage] or 0 <= read.producer < begin:
                return False
        return True

    def _worth(self, begin: int, stop: int) -> Iterator[Region]:
        while stop > begin and not self.slots_of_op[stop - 1]:
            stop -= 1  # nothing is saved there, so nothing of it would run again
        while begin < stop and self._does_nothing(begin):
            begin += 1
        if stop > begin and self.freed(Region(begin, stop)):
            yield Region(begin, stop)

    def _does_nothing(self, i: int) -> bool:
        """Whether an operation is but a look at something that exists."""
        op = self.profile.ops[i]
        return not (op.makes or op.writes or self.slots_of_op[i] or any(self.copied[s] for s in op.output))

    # -- what a region does -----------------------------------------------------------------------------------------

    @remembered
    def slots(self, region: Region) -> list[int]:
        """Slots that its operations save."""
        return [x for i in range(region.first, region.stop) for x in self.slots_of_op[i]]

    @remembered
    def inputs(self, region: Region) -> set[int]:
        """Storages made before it in this step that its operations touch."""
        profile, found = self.profile, set()
        for i in range(region.first, region.stop):
            found |= {*profile.ops[i].output, *(r.storage for r in profile.ops[i].reads)}
        storages = profile.storages
        return {s for s in found if storages[s].birth < region.first and storages[s].kind not in EXTERNAL}

    @remembered
    def own(self, region: Region) -> set[int]:
        """Storages that it makes and that some of its slots lie in."""
        profile = self.profile
        found = {profile.slots[x].storage for x in self.slots(region)}
        return {s for s in found if region.first <= profile.storages[s].birth < region.stop}

    def used_later(self, s: int, region: Region) -> bool:
        """Whether something after the region needs a storage that it makes."""
        return self.outlives[s] or self.touches[s][-1] >= region.stop

    @remembered
    def freed(self, region: Region) -> int:
        """Bytes that are not kept for backward because of it."""
        profile = self.profile
        kept = {s for i in region.kept for s in (*profile.ops[i].makes, *profile.ops[i].hides)}
        return sum(
            profile.storages[s].bytes
            for s in self.own(region) - kept
            if not self.outlives[s] and region.first <= self.saved_by[s][0] and self.saved_by[s][1] < region.stop
        )

    @remembered
    def trigger_and_end(self, region: Region) -> tuple[int, int]:
        """The first backward step that reads one of its slots, and the last; len(steps) where one is never read."""
        steps = [self.profile.slots[x].step for x in self.slots(region)]
        read = [t for t in steps if t >= 0]
        return min(read, default=-1), len(self.profile.steps) if len(read) < len(steps) else max(read, default=-1)

    @remembered
    def last_run(self, region: Region) -> tuple[int, bool]:
        """The operation in which running again stops, and whether its kernel runs.

        A checkpoint stops as soon as all that was saved is there: an operation that saves only what it reads, and is
        the last that saves, does not run.
        """
        last = max((i for i in range(region.first, region.stop) if self.slots_of_op[i]), default=region.first)
        op, slots = self.profile.ops[last], self.slots_of_op[last]
        own = {*op.makes, *op.hides}
        return last, any(self.profile.slots[x].storage in own for x in slots)

    @remembered
    def again(self, region: Region) -> list[int]:
        """Operations that backward runs again."""
        last, runs = self.last_run(region)
        return [i for i in range(region.first, last + runs) if i not in region.kept]

    @remembered
    def seconds(self, region: Region) -> float:
        """What it costs: its operations again, and the checkpoint itself."""
        count = self.last_run(region)[0] + 1 - region.first
        again = sum(self.profile.ops[i].seconds for i in self.again(region))
        return again + REGION_SECONDS + self.op_seconds(region) * count

    def op_seconds(self, region: Region) -> float:
        """What the checkpoint costs for each operation that it passes again."""
        return SELECTIVE_OP_SECONDS if region.kept else OP_SECONDS

    @remembered
    def state(self, region: Region) -> set[int]:
        """Buffers that it has copies of, because forward changes them."""
        found = set()
        for op in self.profile.ops[region.first : region.stop]:
            found |= {*op.writes, *(r.storage for r in op.reads if self.final.get(r.storage, 0))}
        return {s for s in found if self.copied[s]}

    @remembered
    def state_bytes(self, region: Region) -> int:
        """Bytes of those copies and of the generators' states that it keeps."""
        copies = sum(self.profile.storages[s].bytes for s in self.state(region))
        return copies + self.profile.rng_state_bytes * self.random(region)

    @remembered
    def random(self, region: Region) -> bool:
        """Whether it draws random numbers."""
        return any(self.profile.ops[i].random for i in range(region.first, region.stop))
