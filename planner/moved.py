"""What moved between two plans: segments that came, went or changed, and modules whose bytes did. Free of torch."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Literal, TypeVar

import msgspec

from .lockfile import LockedSegment
from .profile import UNSEEN, Profile

Kind = Literal["came", "went", "changed"]
T = TypeVar("T")


class SegmentChange(msgspec.Struct, frozen=True):
    """A segment that is in one plan only, or in both with other operations, bytes or time.

    Attributes:
        kind: "came", "went", or "changed".
        modules: paths of its modules.
        before, after: None where it is not there.
        same_operations: whether it runs the same operations in both.
    """

    kind: Kind
    modules: tuple[str, ...]
    before: LockedSegment | None
    after: LockedSegment | None
    same_operations: bool = False


class ModuleChange(msgspec.Struct, frozen=True):
    """A module whose own operations or parameters are not what they were; those of its children are theirs.

    Attributes:
        module: its path; "" for the model itself.
        saved_before, saved_after: bytes that its operations make and that are saved for backward in the plain step.
        parameters_before, parameters_after: bytes of its parameters and buffers.
        operations_before, operations_after: how many operations it runs.
    """

    module: str
    saved_before: int
    saved_after: int
    parameters_before: int
    parameters_after: int
    operations_before: int
    operations_after: int

    @property
    def saved(self) -> int:
        """Bytes more that are saved for backward."""
        return self.saved_after - self.saved_before

    @property
    def parameters(self) -> int:
        """Bytes more of parameters and buffers."""
        return self.parameters_after - self.parameters_before


def moved_segments(before: Sequence[LockedSegment], after: Sequence[LockedSegment]) -> tuple[SegmentChange, ...]:
    """What differs between two lists of segments; nothing where they are equal.

    Segments are the same where they have the same modules and operations; else where they have the same modules.
    """
    left, right = list(before), list(after)
    pairs = _paired(left, right, lambda s: (s.modules, s.operations))
    pairs += _paired(left, right, lambda s: s.modules)
    changes = [
        SegmentChange("changed", old.modules, old, new, old.operations == new.operations)
        for old, new in pairs
        if old != new
    ]
    changes += [SegmentChange("came", new.modules, None, new) for new in right]
    changes += [SegmentChange("went", old.modules, old, None) for old in left]
    return tuple(changes)


def _paired(left: list[T], right: list[T], key: Callable[[T], Hashable]) -> list[tuple[T, T]]:
    """Takes equal ones out of both lists, in order."""
    waiting: dict[Hashable, list[T]] = defaultdict(list)
    for item in right:
        waiting[key(item)].append(item)
    pairs = []
    for item in list(left):
        if waiting[key(item)]:
            other = waiting[key(item)].pop(0)
            left.remove(item)
            right.remove(other)
            pairs.append((item, other))
    return pairs


def moved_modules(before: Profile, after: Profile, *, kernels: bool = True) -> tuple[ModuleChange, ...]:
    """The modules whose own operations or bytes differ, those with the most bytes first.

    Args:
        before, after: the two steps.
        kernels: whether what only kernels save counts, too; another device's save other things for the same call.
    """
    old, new = _by_module(before, kernels), _by_module(after, kernels)
    changes = []
    for module in dict.fromkeys([*new, *old]):
        a, b = old.get(module, _Module()), new.get(module, _Module())
        if (a.work, a.saved, a.parameters) != (b.work, b.saved, b.parameters):
            sizes = a.saved, b.saved, a.parameters, b.parameters
            changes.append(ModuleChange(module, *sizes, a.work.total(), b.work.total()))
    return tuple(sorted(changes, key=lambda c: -max(abs(c.saved), abs(c.parameters))))


class _Module:
    """What one module does, without its children."""

    def __init__(self) -> None:
        self.work: Counter[str] = Counter()
        self.saved = 0
        self.parameters = 0


def _by_module(profile: Profile, kernels: bool) -> dict[str, _Module]:
    found: dict[str, _Module] = defaultdict(_Module)
    saved = {slot.storage for slot in profile.slots if slot.position != UNSEEN}
    for op in profile.ops:
        module = found[op.module]
        module.work[op.signature] += 1
        made = (*op.makes, *op.hides) if kernels else op.makes
        module.saved += sum(profile.storages[s].bytes for s in _unique(made) if s in saved)
    for storage in profile.storages:
        if storage.kind in ("parameter", "buffer"):
            found[storage.name.rpartition(".")[0]].parameters += storage.bytes
    return dict(found)


def _unique(items: Iterable[T]) -> list[T]:
    return list(dict.fromkeys(items))
