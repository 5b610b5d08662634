"""What a changed model's step costs by a committed profile: bytes from a fresh record, times from the profile. Free of
torch.

Operations that the profile knows keep its times, so that a check has no noise. The others were timed on the machine
that checks; that time is multiplied by how much slower or faster the profile's machine was on the operations that both
know.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

import msgspec

from .canonical import canonical, fingerprints, rounded
from .lockfile import LockedProfile
from .profile import Profile, Step


class Priced(msgspec.Struct, frozen=True):
    """A profile whose times are the committed profile's as far as that knows them.

    Attributes:
        source: the profile, ready to be committed.
        new: operations whose time is scaled because the committed profile has none of their kind, by index.
        scale: committed time over fresh time of what both know; None where they have nothing in common, so that the
            fresh times stand as they are.
    """

    source: LockedProfile
    new: tuple[int, ...]
    scale: float | None


def priced(committed: LockedProfile, fresh: Profile, draft: Profile) -> Priced:
    """The fresh profile at the committed one's prices.

    Args:
        committed: the profile file.
        fresh: measured now, of the changed model.
        draft: the recorded forward pass that `fresh` was measured from.
    """
    now, old = canonical(fresh), committed.profile
    known = _means((op.signature, op.seconds) for op in old.ops)
    scale = _scale([(known[op.signature], op.seconds) for op in now.ops if op.signature in known])
    new = tuple(i for i, op in enumerate(now.ops) if op.signature not in known)
    ops = tuple(
        msgspec.structs.replace(op, seconds=rounded(known.get(op.signature, op.seconds * (scale or 1.0))))
        for op in now.ops
    )
    of_steps = _means((_kind(old, step), step.seconds) for step in old.steps)
    matched = [(of_steps[k], s.seconds) for s in now.steps if (k := _kind(now, s)) in of_steps]
    step_scale = _scale(matched) or scale or 1.0
    steps = tuple(
        msgspec.structs.replace(step, seconds=rounded(of_steps.get(_kind(now, step), step.seconds * step_scale)))
        for step in now.steps
    )
    there = {op.signature for op in now.ops}
    estimated = (there & set(committed.estimated)) | {now.ops[i].signature for i in new}
    profile = msgspec.structs.replace(
        now,
        ops=ops,
        steps=steps,
        replay_op_seconds=old.replay_op_seconds,
        replay_group_seconds=old.replay_group_seconds,
        follow_op_seconds=old.follow_op_seconds,
    )
    return Priced(LockedProfile(profile, fingerprints(draft), tuple(sorted(estimated))), new, scale)


def _kind(profile: Profile, step: Step) -> tuple[str, str]:
    """What decides a backward step's time: its name, and which operation it belongs to."""
    return step.name, profile.ops[step.op].signature if step.op >= 0 else ""


def _means(pairs: Iterable[tuple[object, float]]) -> dict[object, float]:
    found: dict[object, list[float]] = defaultdict(list)
    for key, seconds in pairs:
        found[key].append(seconds)
    return {key: math.fsum(times) / len(times) for key, times in found.items()}


def _scale(pairs: list[tuple[float, float]]) -> float | None:
    fresh = math.fsum(b for _, b in pairs)
    return math.fsum(a for a, _ in pairs) / fresh if fresh > 0 else None
