"""Groups of operations that run again together: which they are, what they cost and what they hold.

The rules are those of `ckpt_planner.schedule` and `ckpt_planner.simulate`, in code of its own.
"""

from __future__ import annotations

from typing import NamedTuple

from .tables import Tables


class Replayed(NamedTuple):
    """One group of operations that run again together.

    Attributes:
        ops: the operations, in order.
        saved: dropped storages with slots that it fills.
        sources: storages that it reads from outside.
        trigger: the step that starts it; -1 if none does.
        end: the last step that needs it.
        seconds: what it costs; nothing where no step starts it.
        spans: (bytes, last step) of each storage that waits after the replay.
        own: their bytes in all.
        peak, left: bytes above what was live before, at most and afterwards.
        extra: bytes noted in forward for its random operations and snapshots: (operation, bytes).
    """

    ops: tuple[int, ...]
    saved: tuple[int, ...]
    sources: tuple[int, ...]
    trigger: int
    end: int
    seconds: float
    spans: tuple[tuple[int, int], ...]
    own: int
    peak: int
    left: int
    extra: tuple[tuple[int, int], ...]


def components(t: Tables, dropped: set[int], again: set[int]) -> list[tuple[int, ...]]:
    """Operations in one part where they have a dropped storage in common."""
    parent = {i: i for i in again}

    def root(i: int) -> int:
        while parent[i] != i:
            parent[i] = parent[parent[i]]
            i = parent[i]
        return i

    first: dict[int, int] = {}
    order = sorted(again)
    for i in order:
        for s in t.meets[i]:
            if s in dropped:
                j = first.setdefault(s, i)
                if j != i and (a := root(i)) != (b := root(j)):
                    parent[max(a, b)] = min(a, b)
    parts: dict[int, list[int]] = {}
    for i in order:
        parts.setdefault(root(i), []).append(i)
    return [tuple(part) for part in parts.values()]


def replayed(t: Tables, dropped: set[int], ops: tuple[int, ...]) -> Replayed:
    """What it means that these operations run again together."""
    waits: dict[int, int] = {}  # storage: last step
    saved: dict[int, None] = {}
    trigger, end = -1, -1
    captured: set[int] = set()
    sources: set[int] = set()
    last_use: dict[int, int] = {}
    seconds = t.group_cost
    extra = []
    for i in ops:
        seconds += t.cost[i]
        for s, step in t.fills[i]:
            if s in dropped:
                saved[s] = None
                if t.hidden[s]:
                    captured.add(i)
                if step < 0:
                    end = t.m
                    continue
                waits[s] = max(waits.get(s, -1), step)
                trigger = step if trigger < 0 else min(trigger, step)
                end = max(end, step)
        for s, _ in t.reads[i]:
            if s not in dropped:
                sources.add(s)
        for s in t.meets[i]:
            if s in dropped:
                last_use[s] = i
        if t.extra[i]:
            extra.append((i, t.extra[i]))
    live, peak, states = 0, 0, 0
    ending: dict[int, list[int]] = {}
    for s, i in last_use.items():
        if s not in waits:
            ending.setdefault(i, []).append(s)
    held: set[int] = set()
    for i in ops:
        if t.random[i]:
            states = t.rng
        peak = max(peak, live + states + t.workspace[i])
        for s in t.makes[i]:
            if s in dropped and s not in held:
                held.add(s)
                live += t.size[s]
        if i in captured:
            for s in t.hides[i]:
                if s in waits and s not in held:
                    held.add(s)
                    live += t.size[s]
        for s in ending.get(i, ()):
            if s in held:
                held.discard(s)
                live -= t.size[s]
    spans = tuple((t.size[s], step) for s, step in waits.items())
    return Replayed(
        ops, tuple(saved), tuple(sorted(sources)), trigger, end, seconds if trigger >= 0 else 0.0, spans,
        sum(size for size, _ in spans), peak, live, tuple(extra),
    )  # fmt: skip
