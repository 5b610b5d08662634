"""What one step has noted so far, and what autograd is given to hold in place of what it saves."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Iterable
from typing import Any

import torch

from .calls import StorageNames, plain_layout, storage_key, tensors_in, version_of
from .directions import HIDDEN, Direction, Directions, Lent
from .group import Group
from .handles import Handle, Kept, Overwritten
from .noting import Accounts, Made, MadeAgain
from .program import Programs
from .protect import writes_in_place, written_by
from .takers import Takers

Covered = tuple[torch.Tensor, int, int, list[Handle]]  # with its version, and the name of its storage
Slots = tuple[tuple[int, int, int, bool] | None, ...]


class Step:
    """The state of one forward pass of a planned step.

    Attributes:
        position: how many operations have passed.
        groups: those of the plan that this step has begun.
        takers: what the groups have taken from outside.
        made: results that a replay makes again, by `id`.
        made_inside: the same of the replays that make inner boundaries again. A call is noted in at most one group of
            either kind, so one entry each is enough.
        accounted: the version of each storage as far as replays account for it.
        overwritten: storages into which something wrote that no replay repeats.
        observer: told before and after each replay, if set before forward.
        slots, saved: of the call that is being made, and how many tensors it has saved.
        watched: nobody has seen yet what this call does.
        hooks_below: saved-tensor hooks under which the plan may still act.
    """

    def __init__(self, directions: Directions) -> None:
        self.hooks_below: Any = None
        self.groups: list[Group | None] = [None] * directions.groups
        self._programs = directions.programs
        self.takers = Takers()
        self.made: Made = {}
        self.made_inside: Made = {}
        # (operation, output) -> (storage, key in its group, what was made), for results that fill slots
        self._filling: dict[tuple[int, int], tuple[int, tuple[int, int, int], MadeAgain]] = {}
        self.accounted = Accounts()
        self.overwritten: set[int] = set()
        self._makers: dict[int, set[int]] = {}  # of storages of which two groups may make a copy each, those groups
        self._lent: set[int] = set()  # storages that calls of other groups have noted as they are now
        self._handles: dict[int, list[Handle]] = {}  # given to autograd in place of what lies in a storage
        self._names = StorageNames()  # of the storages in all of these
        self.unsettled: list[tuple[Handle, int, int]] = []  # and the operation and output that fill it
        self.slots: Slots = ()
        self.saved = 0
        self.watched = False
        self.position = 0
        self.observer: Callable[[Group, bool], None] | None = None

    def group(self, number: int) -> Group:
        """A group of the plan, begun if it was not."""
        group = self.groups[number]
        if group is None:
            group = self.groups[number] = Group(self.observer, self._programs.setdefault(number, Programs()))
        return group

    def withdraw(self, group: Group, index: int, taken: int) -> None:
        """Take a call that is not as planned out of its group, and what it took after the first `taken` entries."""
        group.withdraw(index, taken)
        self.takers.withdrawn(group, taken)
        self.unsettled.clear()

    def unrepeated(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a call that no replay repeats: what it overwrites is not what a replay makes from then on."""
        if writes_in_place(name, kwargs):
            written = written_by(name, args, kwargs)
            self.protect(written)
            for tensor in written:
                # A property may have given it another look into its storage.
                self.made.pop(id(tensor), None)
                self.made_inside.pop(id(tensor), None)
                if (key := self._names.hold(tensor)) is not None:
                    self.overwritten.add(key)

    def protect(self, written: list[torch.Tensor]) -> None:
        """Before a call that writes into these tensors: have groups copy what they noted of their storages."""
        self.takers.protect(self.groups, written)

    def may_write(self, tensor: torch.Tensor, groups: set[int]) -> bool:
        """Whether a write that these groups repeat is repeated by all that make its storage again, for all to come.

        What was lent is what a group noted before the write: there it would be seen too early.
        """
        key = storage_key(tensor)
        return key not in self._lent and self._makers.get(key or 0, groups) <= groups

    def before_write(self, written: Iterable[torch.Tensor]) -> list[Covered]:
        """Before a call that a replay repeats: what autograd was given in place of what it may write into."""
        keys = ((tensor, storage_key(tensor) or 0) for tensor in written)
        return [
            (tensor, version_of(tensor), key, self._handles.pop(key)) for tensor, key in keys if key in self._handles
        ]

    def after_write(self, name: str, covered: list[Covered]) -> None:
        """After it, also where it has failed: what it has written into cannot be given to backward any more."""
        for tensor, version, key, handles in covered:
            if version_of(tensor) == version:
                self._handles.setdefault(key, [])[:0] = handles
                continue
            for handle in handles:
                handle.kept = Overwritten(name)

    def bind(self, direction: Direction, index: int, result: Any, given: Collection[int | None]) -> None:
        """Note which results of this call, number `index` in its group, a replay will make again.

        Not those that are but a look into a tensor from outside the group, of which `given` has the storages: what is
        written through it is seen outside, and a replay may have a copy of that tensor.
        """
        dropped, made = direction.dropped_outputs, self.made_inside if direction.inner else self.made
        count = len(dropped)
        for output, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            if output < count and dropped[output] and storage_key(tensor) not in given:
                version = version_of(tensor)
                if direction.nested and (key := self._names.hold(tensor)) is not None:
                    self._makers.setdefault(key, set()).add(direction.group)
                entry = made[id(tensor)] = (weakref.ref(tensor), direction.group, version, (index, output))
                if output in direction.fills:
                    self.fill(tensor, output, entry)
            else:  # an in-place call can return what was made again before, and no longer is
                made.pop(id(tensor), None)

    def fill(self, tensor: torch.Tensor, output: int, entry: MadeAgain) -> None:
        """Note that slots are filled from this result of the call that is being made."""
        if (key := self._names.hold(tensor)) is not None:
            self._filling[self.position, output] = (key, (*entry[3], -1), entry)
            self.accounted[key] = entry[2]

    def lent(self, tensor: torch.Tensor, lent: Lent) -> Handle | None:
        """What a call may note in place of an inner boundary; None where its group does not make this very tensor."""
        number, op, output, read = lent
        filling, storage = self._filling.get((op, output)), storage_key(tensor)
        if (
            filling is None
            or filling[0] != storage
            or storage in self.overwritten
            or self.accounted.get(storage) != version_of(tensor)
            or not plain_layout(tensor)
        ):
            return None
        self._lent.add(storage)
        group = self.group(number)
        if read:
            group.expect(filling[1])
        return Handle(group, filling[1], tensor)

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to hold of a tensor that the call saves."""
        position = self.saved
        self.saved = position + 1
        action = self.slots[position] if position < len(self.slots) else None
        if action is None or (storage := storage_key(tensor)) is None:
            return Kept(tensor)
        number, op, output, read = action
        filling = self._filling.get((op, output))
        if filling is not None:
            if filling[0] != storage or storage in self.overwritten:
                return Kept(tensor)
            # Another version than the last that a replay accounts for: this very call may have written, or something
            # that does not run again.
            unsure = self.watched or self.accounted.get(storage) != tensor._version
            group, key, entry = self.group(number), filling[1], filling[2]
            whole = not unsure and self.made.get(id(tensor)) is entry and entry[0]() is tensor
        elif output == HIDDEN:
            group, unsure, whole = self.group(number), self.watched, False
            key = (len(group.calls) - 1, position, 0)
        elif op == self.position:  # it is a result of this very call, which has not returned yet
            group, unsure, whole = self.group(number), True, False
            key = (len(group.calls) - 1, output, -1)
        else:
            return Kept(tensor)
        if not whole and not plain_layout(tensor):
            return Kept(tensor)
        if read:
            group.expected[key] = group.expected.get(key, 0) + 1
        handle = Handle(group, key, None if whole else tensor)
        if unsure:  # until the call has returned
            handle.kept = Kept(tensor)
            self.unsettled.append((handle, op, output))
        elif output != HIDDEN:  # nobody else has what is hidden, and its name may be another's soon
            self._handles.setdefault(storage, []).append(handle)
        return handle

    @staticmethod
    def unpack(packed: Kept | Handle) -> torch.Tensor:
        """The tensor that autograd saved."""
        if isinstance(packed, Kept):
            return packed.value()
        return packed.group.fetch(packed) if packed.kept is None else packed.kept.value()

    def settle(self) -> None:
        """Let the tensors go whose calls have done what was expected of them."""
        for handle, op, output in self.unsettled:
            assert isinstance(handle.kept, Kept)
            filling = self._filling.get((op, output))
            if output == HIDDEN:
                handle.kept = None
            elif (
                filling is not None
                and filling[0] == storage_key(handle.kept.tensor)
                and self.accounted.get(filling[0]) == handle.kept.version
            ):
                handle.kept = None
                self._handles.setdefault(filling[0], []).append(handle)
        self.unsettled.clear()

    def finish(self) -> None:
        """Forward has ended: let go of all that only following needs."""
        self.takers.clear()
        self.made.clear()
        self.made_inside.clear()
        self._makers.clear()
        self._lent.clear()
        self._handles.clear()
        self._filling.clear()
        self.groups.clear()
        self.accounted = Accounts()
        self.overwritten.clear()
        self._names.release()
