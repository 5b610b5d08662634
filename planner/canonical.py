"""Profiles in one form, so that the same step is the same bytes: for files that are compared, and for telling steps
apart. Free of torch.

Two records of one step differ in times, in the order in which parameters were registered and in line numbers. None of
these is in the canonical form's way: storages are numbered as the operations mention them, places are left out, and
times are whole nanoseconds.
"""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec

from .profile import UNSEEN, Op, Profile, Slot, Storage


class Fingerprints(msgspec.Struct, frozen=True):
    """What a recorded forward pass has to have in common with another for the same profile to stand for both.

    Attributes:
        calls: of what the model's code decides: calls, shapes, who reads what, how long Python holds each result.
        record: of that, and of what the device's kernels save for backward.
    """

    calls: str
    record: str


def rounded(seconds: float) -> float:
    """A time as a whole number of nanoseconds, in seconds."""
    return round(seconds * 1e9) / 1e9


def canonical(profile: Profile) -> Profile:
    """The same step with storages numbered by first mention, without places, times in whole nanoseconds."""
    number = _numbers(profile)
    order = sorted(number, key=lambda s: number[s])

    def of(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[s] for s in storages)

    ops = tuple(
        msgspec.structs.replace(
            op,
            place="",
            seconds=rounded(op.seconds),
            reads=tuple(msgspec.structs.replace(r, storage=number[r.storage]) for r in op.reads),
            makes=of(op.makes),
            hides=of(op.hides),
            writes=tuple(sorted(of(op.writes))),
            output=of(op.output),
            choices=of(op.choices),
        )
        for op in profile.ops
    )
    return msgspec.structs.replace(
        profile,
        storages=tuple(profile.storages[s] for s in order),
        ops=ops,
        slots=tuple(msgspec.structs.replace(x, storage=number[x.storage]) for x in profile.slots),
        steps=tuple(msgspec.structs.replace(step, seconds=rounded(step.seconds)) for step in profile.steps),
        replay_op_seconds=rounded(profile.replay_op_seconds),
        replay_group_seconds=rounded(profile.replay_group_seconds),
        follow_op_seconds=rounded(profile.follow_op_seconds),
    )


def _numbers(profile: Profile) -> dict[int, int]:
    """The new number of each storage."""
    number: dict[int, int] = {}
    for op in profile.ops:
        for s in (*(r.storage for r in op.reads), *op.makes, *op.output, *op.hides, *op.writes):
            number.setdefault(s, len(number))
    for slot in profile.slots:
        number.setdefault(slot.storage, len(number))
    rest = [(x.kind, x.name, x.bytes, s) for s, x in enumerate(profile.storages) if s not in number]
    for *_, s in sorted(rest):
        number[s] = len(number)
    return number


def fingerprints(draft: Profile) -> Fingerprints:
    """Digests of a recorded forward pass (a profile without steps, or one whose steps do not matter).

    Times, working memory and names of parameters do not enter. Nor does what no hook sees: small numbers that autograd
    wraps, which come and go between runs.
    """
    profile = canonical(draft)
    hidden = {s for op in profile.ops for s in op.hides}
    hidden |= {slot.storage for slot in profile.slots if profile.storages[slot.storage].kind == "hidden"}
    number = {s: i for i, s in enumerate(s for s in range(len(profile.storages)) if s not in hidden)}
    calls: list[Any] = [_call(op, number) for op in profile.ops]
    calls.append([_held(profile.storages[s]) for s in number])
    kernels = [[profile.storages[s].bytes for s in op.hides] for op in profile.ops]
    slots = [_slot(slot, number) for slot in profile.slots if slot.position != UNSEEN]
    return Fingerprints(digest(calls), digest([calls, kernels, slots]))


def _call(op: Op, number: dict[int, int]) -> list[Any]:
    reads = [[number.get(r.storage, -1), r.producer, r.version] for r in op.reads]
    stores = [[number[s] for s in group if s in number] for group in (op.makes, op.writes, op.output, op.choices)]
    return [op.module, op.signature, op.inside, op.random, reads, *stores]


def _held(storage: Storage) -> list[Any]:
    return [storage.bytes, storage.kind, storage.birth, storage.death]


def _slot(slot: Slot, number: dict[int, int]) -> list[Any]:
    return [slot.op, slot.position, number.get(slot.storage, -1), slot.producer, slot.fixed]


def digest(value: Any) -> str:
    """A short digest of plain data; the order of keys does not matter."""
    return hashlib.blake2b(msgspec.json.encode(value, order="sorted"), digest_size=12).hexdigest()
