"""Groups whose calls are the same in every run of a captured graph, but for the numbers in their tensors.

Following a forward looks at each call before it takes it for the one of the step before. A graph makes the same calls
on the results of the same calls, and its guards say that the rest is as it was. So for a group of calls that were all
noted in full once, what a step notes is known beforehand: where each tensor comes from, and which saved tensor is
filled from which result. Other groups are noted as when a forward is followed.
"""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple

from ..replay.ambient import Choices
from ..replay.directions import HIDDEN, Directions
from ..replay.familiar import Familiar
from ..replay.follow import Follower
from ..replay.group import Group

Key = tuple[int, int, int]  # as groups name what they make again


class Slot(NamedTuple):
    """A saved tensor that is dropped, and filled by a fixed group.

    Attributes:
        group, key: where it comes from in backward.
        op, output: the result that it looks into; output HIDDEN for what an operation saves and does not return.
        read: backward is known to read it.
    """

    group: int
    key: Key
    op: int
    output: int
    read: bool


class FixedGroups:
    """The fixed groups of a plan, with what is known of their calls.

    Args:
        directions: after a step in which the captured graph was followed.
        followed: operations that are followed in any case.

    Attributes:
        calls: for each fixed group, its calls in order.
        expected: for each, how often backward reads what it makes.
        followed: operations that are followed.
        choices: the settings under which all calls were made; None if there are none.
    """

    def __init__(self, directions: Directions, followed: Collection[int]) -> None:
        self._directions = directions.ops
        self.followed = {*followed, *(i for i, direction in enumerate(directions.ops) if direction.nested)}
        self.calls: dict[int, list[Familiar]] = {}
        members: dict[int, list[int]] = {}
        for i, direction in enumerate(directions.ops):
            if direction.group >= 0:
                members.setdefault(direction.group, []).append(i)
        self._members = members
        for number, ops in members.items():
            if self._repeatable(ops):
                self.calls[number] = [directions.ops[i].familiar[0] for i in ops]
        chosen = {call.choices for calls in self.calls.values() for call in calls}
        self.choices: Choices | None = next(iter(chosen), None)
        if len(chosen) > 1:  # switched within forward
            self.calls.clear()
        self._part()
        self.expected: dict[int, dict[Key, int]] = {number: {} for number in self.calls}
        for i in range(len(directions.ops)):
            for slot in self.slots(i):
                if slot is not None and slot.read:
                    counts = self.expected[slot.group]
                    counts[slot.key] = counts.get(slot.key, 0) + 1

    def _repeatable(self, ops: list[int]) -> bool:
        """Whether a group's calls were all noted in full once, and are in order."""
        directions = [self._directions[i] for i in ops]
        if not all(d.familiar for d in directions):
            return False
        calls = [d.familiar[0] for d in directions]
        return [call.index for call in calls] == list(range(len(calls)))

    def _part(self) -> None:
        """Follow what belongs with something that is followed: a group's operations, and what it fills slots of."""
        while True:
            before = len(self.followed), len(self.calls)
            for number in [n for n in self.calls if not self.followed.isdisjoint(self._members[n])]:
                del self.calls[number]
            for i, direction in enumerate(self._directions):
                filled = {slot[0] for slot in direction.slots if slot is not None}
                if (direction.group >= 0 and direction.group not in self.calls) or not filled <= self.calls.keys():
                    self.followed.add(i)
                if i in self.followed:
                    for number in filled:
                        self.calls.pop(number, None)
            if before == (len(self.followed), len(self.calls)):
                return

    def slots(self, position: int) -> list[Slot | None]:
        """The slots of an operation; none of one that is followed."""
        if position in self.followed:
            return []
        found: list[Slot | None] = []
        for at, action in enumerate(self._directions[position].slots):
            if action is None:
                found.append(None)
                continue
            group, op, output, read = action
            index = self._directions[op].familiar[0].index
            key = (index, at, 0) if output == HIDDEN else (index, output, -1)
            found.append(Slot(group, key, op, output, read))
        return found


class GraphStep(Follower):
    """The state of one run of a captured graph.

    What is not fixed is followed call by call; this is never entered as a mode but for that.

    Args:
        directions, fixed: what to do.

    Attributes:
        hold: names the storage of a tensor until forward has ended.
    """

    def __init__(self, directions: Directions, fixed: FixedGroups) -> None:
        super().__init__(directions)
        self._fixed = fixed
        self.hold = self._names.hold

    def begin(self, number: int) -> Group:
        """A fixed group at its first call."""
        group = self.group(number)
        group.calls = self._fixed.calls[number]  # type: ignore[assignment]
        group.expected = dict(self._fixed.expected[number])
        return group
