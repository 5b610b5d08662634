"""A schedule, turned into what the follower has to do at each operation. Plain data, free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..profile import Profile
from ..schedule import Group, Schedule

if TYPE_CHECKING:
    from .familiar import Familiar
    from .program import Programs

KEEP = None
Lent = tuple[int, int, int, bool]  # a group, and the operation, the output and whether backward is known to read it
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
        learns: there may be such. Not where inner boundaries come in: each call is noted in full.
        inner: the group makes inner boundaries again, for other groups.
        second: the same for a second group that runs it again, one of inner boundaries.
        borrowed: for positions of tensor arguments that are inner boundaries of another group, what makes them.
    """

    __slots__ = (
        "borrowed", "captured", "dropped_outputs", "familiar", "fills", "graded", "group", "in_place", "inner", "known",
        "learns", "name", "random", "second", "slots", "snapshot", "writes",
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
        self.learns = True
        self.inner = False
        self.second: Direction | None = None
        self.borrowed: dict[int, Lent] = {}

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        return None, {name: () if name == "familiar" else getattr(self, name) for name in self.__slots__}

    @property
    def idle(self) -> bool:
        """Nothing to do here but to go on."""
        return self.group < 0 and not self.slots

    @property
    def nested(self) -> bool:
        """It has to do with inner boundaries."""
        return self.inner or self.second is not None or bool(self.borrowed)

    def of_group(self, number: int) -> Direction:
        """What to do for one of its groups: this, or the second, which is made if there is none."""
        if self.group in (-1, number):
            return self
        if self.second is None:
            self.second = Direction(self.name)
            self.second.known = self.known
        return self.second


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
    """Directions that carry out `schedule`: the groups that some slot waits for, and those that they borrow from."""
    directions = [Direction(op.name) for op in profile.ops if op.inside]
    slots: list[list[tuple[int, int, int, bool] | None]] = [[] for _ in directions]
    for slot in profile.slots:
        if 0 <= slot.op < len(directions) and slot.position >= 0:
            row = slots[slot.op]
            row.extend([KEEP] * (slot.position + 1 - len(row)))
    lender = {s: number for number, group in enumerate(schedule.groups) for s in group.lends}
    for number, group in _carried_out(schedule, lender):
        for i in group.ops:
            op, d = profile.ops[i], directions[i].of_group(number)
            d.group, d.random, d.snapshot, d.graded = number, op.random, op.snapshot, op.replay == "grad"
            d.inner = bool(group.lends)
            d.writes = tuple(p for p, read in enumerate(op.reads) if read.storage in op.writes)
            d.dropped_outputs = tuple(s in group.inside for s in op.output)
            for position, read in enumerate(op.reads):
                if (s := read.storage) in group.borrows:
                    known = group.trigger >= 0 or not profile.steps
                    d.borrowed[position] = (lender[s], *_made_by(profile, s), known)
        for s in group.lends:
            birth, output = _made_by(profile, s)
            directions[birth].of_group(number).fills |= {output}
        for index in group.slots:
            slot = profile.slots[index]
            read_by = slot.step >= 0 or not profile.steps  # before backward was measured, every slot may be
            if profile.storages[slot.storage].kind == "hidden":
                slots[slot.op][slot.position] = (number, slot.op, HIDDEN, read_by)
                directions[slot.op].of_group(number).captured += (slot.position,)
            else:
                birth, output = _made_by(profile, slot.storage)
                slots[slot.op][slot.position] = (number, birth, output, read_by)
                directions[birth].of_group(number).fills |= {output}
    for d, row in zip(directions, slots, strict=True):
        d.slots = tuple(row) if any(action is not KEEP for action in row) else ()
        # A write may one day land on what two groups make.
        d.learns = not d.nested and not (d.writes and schedule.inner)
    return Directions(tuple(directions), len(schedule.groups))


def _made_by(profile: Profile, storage: int) -> tuple[int, int]:
    """The operation that makes a storage, and which of its results."""
    birth = profile.storages[storage].birth
    return birth, profile.ops[birth].output.index(storage)


def _carried_out(schedule: Schedule, lender: dict[int, int]) -> list[tuple[int, Group]]:
    """The groups that some slot waits for and those that they borrow from, with their numbers; first those without."""
    todo = [number for number, group in enumerate(schedule.groups) if group.slots]
    wanted = set(todo)
    while todo:
        more = {lender[s] for s in schedule.groups[todo.pop()].borrows} - wanted
        wanted |= more
        todo.extend(sorted(more))
    found = [(number, schedule.groups[number]) for number in sorted(wanted)]
    return sorted(found, key=lambda pair: bool(pair[1].lends))
