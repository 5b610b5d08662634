"""What is noted of saved tensors, and of what replays need a copy of."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import torch

from ckpt_planner.profile import Op, Read, Storage
from ckpt_planner.replay.calls import plain_layout, storage_key, storage_ref, version_of
from ckpt_planner.replay.directions import base_name, has_statistics
from ckpt_planner.replay.protect import writes_in_place, written_by

MOST_SNAPSHOT = 1 << 20  # bytes: running statistics and counters are far below, caches and tables above


class Saved:
    """What is noted of a tensor that autograd saves, until its operation has ended."""

    __slots__ = ("bytes", "key", "plain", "ref", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, size: int) -> None:
        self.key = storage_key(tensor)
        self.plain = self.key is not None and plain_layout(tensor)
        self.version = version_of(tensor)
        self.bytes = size
        self.ref = storage_ref(tensor) if self.key is not None else None
        self.tensor: torch.Tensor | None = tensor


def writes_repeatably(name: str, kwargs: dict[str, Any], args: Any, changed: Sequence[torch.Tensor]) -> bool:
    """Whether a call that changed these saves the same when it runs again under autograd: it changed only its operand.

    A replay gives such a call another tensor in the same memory. Through a view autograd would save by other rules, and
    statistics are written beside what the call is about.
    """
    if not changed:
        return True
    if not writes_in_place(name, kwargs) or has_statistics(base_name(name)):
        return False
    written = [id(t) for t in written_by(name, args, kwargs)]
    return all(id(t) in written and not t._is_view() for t in changed)


def with_snapshots(ops: Sequence[Op], storages: Sequence[Storage], writes: Mapping[int, int]) -> tuple[Op, ...]:
    """Operations with what they read that exists before the step and changes during it: a replay needs a copy.

    So it does of what has changed for the last time: another forward may come before this one's backward. An input is
    another tensor then.

    Args:
        ops: as recorded.
        storages: as recorded.
        writes: how often each storage was written in place, by index.
    """

    def changes(read: Read) -> bool:
        storage, final = storages[read.storage], writes.get(read.storage, 0)
        return storage.birth < 0 and final > (read.version if storage.kind == "input" else 0)

    done = []
    for op in ops:
        changing = tuple(p for p, read in enumerate(op.reads) if changes(read))
        if sum(storages[op.reads[p].storage].bytes for p in changing) > MOST_SNAPSHOT:
            reason = op.reason or "it reads a large tensor from outside the model that forward changes"
            done.append(msgspec.structs.replace(op, replay="never", reason=reason))
        else:
            done.append(msgspec.structs.replace(op, snapshot=changing))
    return tuple(done)
