"""Groups of operations that run again together: which they are, what they cost and what they hold.

The rules are those of `ckpt_planner.schedule` and `ckpt_planner.simulate`, in code of its own.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from .tables import Tables

MANY = 24  # from so many spans on, arrays are faster than one after another


class Replayed(NamedTuple):
    """One group of operations that run again together.

    Attributes:
        ops: the operations, in order.
        saved: dropped storages with slots that it fills.
        sources: storages that it reads from outside.
        trigger: the step that starts it; -1 if none does.
        opener: the first of its slots that is read then.
        end: the last step that needs it.
        seconds: what it costs; nothing where no step starts it.
        spans: (bytes, last step) of each storage that waits after the replay.
        own: their bytes in all.
        peak, left: bytes above what was live before, at most and afterwards.
        extra: bytes noted in forward for its random operations and snapshots: (operation, bytes).
        ends: where there are many spans, the steps after their last ones, each once, and the bytes that end there.
    """

    ops: tuple[int, ...]
    saved: tuple[int, ...]
    sources: tuple[int, ...]
    trigger: int
    opener: int
    end: int
    seconds: float
    spans: tuple[tuple[int, int], ...]
    own: int
    peak: int
    left: int
    extra: tuple[tuple[int, int], ...]
    ends: tuple[NDArray[np.int64], NDArray[np.int64]] | None


def components(t: Tables, dropped: set[int], again: set[int]) -> list[tuple[int, ...]]:
    """Operations in one part where they have a dropped storage in common."""
    parent: dict[int, int] = {}
    first: dict[int, int] = {}
    order, meets = sorted(again), t.meets
    for i in order:
        parent[i] = here = i  # the first operation of the part that i is in by now
        for s in meets[i]:
            if s in dropped:
                j = first.setdefault(s, i)
                while (above := parent[j]) != j:
                    parent[j] = j = parent[above]
                if j < here:
                    parent[here] = here = j
                elif here < j:
                    parent[j] = here
    parts: dict[int, list[int]] = {}
    for i in order:
        j = i
        while (above := parent[j]) != j:
            parent[j] = j = parent[above]
        parts.setdefault(j, []).append(i)
    return [tuple(part) for part in parts.values()]


def _ends(spans: tuple[tuple[int, int], ...]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    at: dict[int, int] = {}
    for amount, step in spans:
        at[step + 1] = at.get(step + 1, 0) + amount
    return np.array(list(at), dtype=np.int64), np.array(list(at.values()), dtype=np.int64)


def replayed(t: Tables, dropped: set[int], ops: tuple[int, ...]) -> Replayed:
    """What it means that these operations run again together."""
    waits: dict[int, int] = {}  # storage: last step
    saved: dict[int, None] = {}
    trigger, opener, end = -1, -1, -1
    captured: set[int] = set()
    reads: set[int] = set()
    last_use: dict[int, int] = {}
    seconds, cost, fills, read_of, meets_at = t.group_cost, t.cost, t.fills, t.read_of, t.meets_at
    extra = []
    for i in ops:
        seconds += cost[i]
        for s, begin, slot, last, unread in fills[i]:
            if s in dropped:
                saved[s] = None
                if t.hidden[s]:
                    captured.add(i)
                if unread:
                    end = t.m
                if begin >= 0:
                    if last > waits.get(s, -1):
                        waits[s] = last
                    if begin < trigger or trigger < 0 or (begin == trigger and slot < opener):
                        trigger, opener = begin, slot
                    if last > end:
                        end = last
        reads |= read_of[i]
        last_use.update(meets_at[i])
        if t.extra[i]:
            extra.append((i, t.extra[i]))
    live, peak, states = 0, 0, 0
    ending: dict[int, list[int]] = {}
    for s, i in last_use.items():
        if s in dropped and s not in waits:
            ending.setdefault(i, []).append(s)
    held: set[int] = set()
    size, makes, workspace, random = t.size, t.makes, t.workspace, t.random
    for i in ops:
        if random[i]:
            states = t.rng
        most = live + states + workspace[i]
        if most > peak:
            peak = most
        for s in makes[i]:
            if s in dropped and s not in held:
                held.add(s)
                live += size[s]
        if i in captured:
            for s in t.hides[i]:
                if s in waits and s not in held:
                    held.add(s)
                    live += size[s]
        if i in ending:
            for s in ending[i]:
                if s in held:
                    held.discard(s)
                    live -= size[s]
    spans = tuple((size[s], step) for s, step in waits.items())
    ends = None
    if len(spans) >= MANY:
        ends = _ends(spans)
    return Replayed(
        ops, tuple(saved), tuple(sorted(reads - dropped)), trigger, opener, end,
        seconds if trigger >= 0 else 0.0, spans, sum(amount for amount, _ in spans), peak, live, tuple(extra), ends,
    )  # fmt: skip
