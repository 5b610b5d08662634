"""A schedule, turned into what the follower has to do at each operation. Plain data, free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..profile import Profile
from ..schedule import Schedule

if TYPE_CHECKING:
    from .familiar import Familiar
    from .program import Programs

KEEP = None
MEETING = 4  # calls in a row that tell where in the plan a step is
HIDDEN = -1  # the slot is filled from what the operation saves when it runs again


class Direction:
    """What to do when one operation passes by.

    Attributes:
        name: the operation's name; another one means that the model took another path.
        group: number of the group that runs it again; -1 if none does.
        random: note the generator's state, because it draws from it and runs again.
        snapshot: positions of the tensor arguments to copy before it runs.
        dropped_outputs: for each tensor that it returns, whether a replay makes it (else it is kept if needed).
        fills: outputs from which slots are filled.
        in_place: by its name it writes into an argument.
        slots: for each tensor that it saves: KEEP, or (group, operation, output, read) that fills it, with HIDDEN for
            the output of one that is only saved; `read` is whether backward is known to read it.
        captured: positions of its saved tensors that its replay has to deliver.
        graded: its replay has to record gradients even where it delivers nothing that it saves.
        writes: positions of the tensor arguments that it writes into.
        known: options (arguments that are no tensors) under which it was seen to draw and to write as planned.
        familiar: calls of it that were noted in an earlier step. Not carried into another process.
    """

    __slots__ = (
        "captured", "dropped_outputs", "familiar", "fills", "graded", "group", "in_place", "known", "name", "random",
        "slots", "snapshot", "writes",
    )  # fmt: skip

    def __init__(self, name: str) -> None:
        self.name = name
        self.in_place = in_place(name)
        self.group = -1
        self.random = False
        self.snapshot: tuple[int, ...] = ()
        self.dropped_outputs: tuple[bool, ...] = ()
        self.fills: frozenset[int] = frozenset()
        self.slots: tuple[tuple[int, int, int, bool] | None, ...] = ()
        self.captured: tuple[int, ...] = ()
        self.graded = False
        self.writes: tuple[int, ...] = ()
        self.known: set[tuple[Any, ...]] = set()
        self.familiar: tuple[Familiar, ...] = ()

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {name: () if name == "familiar" else getattr(self, name) for name in self.__slots__}

    @property
    def idle(self) -> bool:
        """Nothing to do here but to go on."""
        return self.group < 0 and not self.slots


class Directions:
    """The directions for every operation inside the model's forward, in order, and the number of groups.

    What replays have learnt about the groups is in `programs`.
    """

    __slots__ = ("_after", "groups", "ops", "programs")

    def __init__(self, ops: tuple[Direction, ...], groups: int) -> None:
        self.ops = ops
        self.groups = groups
        self.programs: dict[int, Programs] = {}
        self._after: dict[tuple[str, ...], list[int]] | None = None

    def after(self, names: tuple[str, ...]) -> list[int]:
        """The positions, in order, that follow MEETING operations of these names; none for fewer names."""
        if self._after is None:  # most steps follow the plan from start to end
            self._after = {}
            for end in range(MEETING, len(self.ops)):
                run = tuple(d.name for d in self.ops[end - MEETING : end])
                self._after.setdefault(run, []).append(end)
        return self._after.get(names, [])


def in_place(name: str) -> bool:
    """Whether a call of that name writes into an argument."""
    base = base_name(name)
    return (
        (base.endswith("_") and not base.endswith("__"))
        or (base.startswith("__i") and base not in ("__invert__", "__index__", "__int__"))
        or base in ("__setitem__", "__set__")  # the last: a property, such as `x.data = y`
        or has_statistics(base)
    )


def base_name(name: str) -> str:
    """The last part of a call's name without an operator's overload: "relu_" of "torch.ops.aten.relu_.default"."""
    parts = name.split(".")
    return parts[3] if len(parts) > 3 and name.startswith("torch.ops.") else parts[-1]


def has_statistics(base: str) -> bool:
    """Whether a call of that name may write running statistics, which some kernels do without counting it."""
    return "batch_norm" in base or "instance_norm" in base


def direct(profile: Profile, schedule: Schedule) -> Directions:
    """Directions that carry out `schedule`. Only groups that some slot waits for are carried out."""
    directions = [Direction(op.name) for op in profile.ops if op.inside]
    slots: list[list[tuple[int, int, int, bool] | None]] = [[] for _ in directions]
    for slot in profile.slots:
        if 0 <= slot.op < len(directions) and slot.position >= 0:
            row = slots[slot.op]
            row.extend([KEEP] * (slot.position + 1 - len(row)))
    for number, group in enumerate(schedule.groups):
        if not group.slots:
            continue
        for i in group.ops:
            op, d = profile.ops[i], directions[i]
            d.group, d.random, d.snapshot, d.graded = number, op.random, op.snapshot, op.replay == "grad"
            d.writes = tuple(p for p, read in enumerate(op.reads) if read.storage in op.writes)
            d.dropped_outputs = tuple(s in schedule.dropped for s in op.output)
        for index in group.slots:
            slot = profile.slots[index]
            read = slot.step >= 0 or not profile.steps  # before backward was measured, every slot may be
            storage = profile.storages[slot.storage]
            if storage.kind == "hidden":
                slots[slot.op][slot.position] = (number, slot.op, HIDDEN, read)
                directions[slot.op].captured += (slot.position,)
            else:
                output = profile.ops[storage.birth].output.index(slot.storage)
                slots[slot.op][slot.position] = (number, storage.birth, output, read)
                directions[storage.birth].fills |= {output}
    for d, row in zip(directions, slots, strict=True):
        d.slots = tuple(row) if any(action is not KEEP for action in row) else ()
    return Directions(tuple(directions), len(schedule.groups))
