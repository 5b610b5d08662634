"""The model as a tree of modules and operations, with what the plan keeps and computes again of each. Free of torch."""

from __future__ import annotations

from typing import Literal

import msgspec

from .decision import Decision
from .schedule import EXTERNAL

LOSS = "(loss)"


class Node(msgspec.Struct, frozen=True):
    """A module, with everything inside it, or one operation.

    Attributes:
        parent: index of the node that it lies in; -1 for the model itself.
        kind: "module" or "op".
        name: the last part of a module's path, or the operation's name.
        place: an operation's line, "model.py:12".
        ops: how many operations it holds; 1 for an operation.
        ops_again: how many of them run again in backward.
        kept_bytes: what the planned step keeps of its results for backward.
        freed_bytes: what the plain step keeps of them and the planned one does not.
        forward_seconds, backward_seconds: its time in the plain step.
        again_seconds: time of running it again.
    """

    parent: int
    kind: Literal["module", "op"]
    name: str
    place: str
    ops: int
    ops_again: int
    kept_bytes: int
    freed_bytes: int
    forward_seconds: float
    backward_seconds: float
    again_seconds: float


class _Row:
    """A node while it is being added up."""

    __slots__ = ("kind", "name", "parent", "place", "sums")

    def __init__(self, parent: int, kind: Literal["module", "op"], name: str, place: str = "") -> None:
        self.parent, self.kind, self.name, self.place = parent, kind, name, place
        self.sums = (0, 0, 0, 0, 0.0, 0.0, 0.0)

    def node(self) -> Node:
        return Node(self.parent, self.kind, self.name, self.place, *self.sums)


def tree(decision: Decision) -> tuple[Node, ...]:
    """The model's modules and operations, each after the module that it lies in; the model itself first.

    Modules stand in the order of their first operation. The loss is a module of its own.
    """
    profile, again = decision.profile, decision.again_seconds
    kept, freed = [0] * len(profile.ops), [0] * len(profile.ops)
    for s, storage in enumerate(profile.storages):
        if storage.kind in EXTERNAL:
            continue
        if decision.needed_until.get(s, -1) >= 0:
            kept[storage.birth] += storage.bytes
        elif s in decision.freed:
            freed[storage.birth] += storage.bytes
    backward = [0.0] * len(profile.ops)
    for step in profile.steps:
        if step.op >= 0:
            backward[step.op] += step.seconds
    rows = [_Row(-1, "module", profile.model)]
    index: dict[tuple[str, ...], int] = {(): 0}
    for i, op in enumerate(profile.ops):
        parts = (*op.module.split("."),) if op.module else () if op.inside else (LOSS,)
        for depth in range(1, len(parts) + 1):
            if parts[:depth] not in index:
                index[parts[:depth]] = len(rows)
                rows.append(_Row(index[parts[: depth - 1]], "module", parts[depth - 1]))
        row = _Row(index[parts], "op", op.name, op.place)
        row.sums = (1, int(i in again), kept[i], freed[i], op.seconds, backward[i], again.get(i, 0.0))
        rows.append(row)
    # A node stands after its parent, so that from the last to the first each sum is complete before it is passed on.
    for row in reversed(rows):
        if row.parent >= 0:
            a, b = rows[row.parent].sums, row.sums
            rows[row.parent].sums = (
                a[0] + b[0], a[1] + b[1], a[2] + b[2], a[3] + b[3], a[4] + b[4], a[5] + b[5], a[6] + b[6],
            )  # fmt: skip
    return tuple(row.node() for row in rows)
