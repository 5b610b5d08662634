"""The forward pass of a planned step: the model's own Python runs, and a light mode follows it.

Nothing is traced and nothing is frozen. Each torch call is compared with the plan by its name; where the plan says so,
the call is noted down (its arguments are this step's own), and what autograd saves is replaced by a handle. From a call
that differs from the plan on, everything is kept, until a few calls in a row are again those of a later place in the
plan. Such a step costs memory, never a wrong gradient: a value is dropped only if this very step has noted the calls
that make it again, wherever in the plan the follower takes itself to be.
"""

from __future__ import annotations

import bisect
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .calls import StorageNames, call_name, is_operation, plain_layout, storage_key, tensors_in, version_of
from .directions import HIDDEN, MEETING, Direction, Directions
from .familiar import Familiar, learn
from .group import Group
from .handles import Handle, Kept
from .noting import Accounts, Made, MadeAgain, Noting, Watch
from .program import Programs
from .protect import writes_in_place, written_by

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


Slots = tuple[tuple[int, int, int, bool] | None, ...]


class Follower(TorchFunctionMode):
    """Follows one forward pass.

    Attributes:
        position: how many operations have passed.
        diverged: the first operation that differed from the plan, as (position, expected, found), or None.
        lost: whether the plan was not met again since.
        observer: told before and after each replay, if set before forward.

    Args:
        directions: what to do.
        trusting: the step is the one that was profiled, so what a call does for the first time is as planned.
    """

    def __init__(self, directions: Directions, trusting: bool = False) -> None:
        super().__init__()
        self._hooks_below: Any = None  # saved-tensor hooks under which the plan may still act
        self._directions, self._meeting_points, self._trusting = directions.ops, directions.after, trusting
        self._groups: list[Group | None] = [None] * directions.groups
        self._programs = directions.programs
        self._made: Made = {}  # results made again
        # (operation, output) -> (storage, key in its group, what was made), for results that fill slots
        self._filling: dict[tuple[int, int], tuple[int, tuple[int, int, int], MadeAgain]] = {}
        # storage -> its version as far as replays account for it
        self._accounted = Accounts()
        self._overwritten: set[int] = set()  # storages into which something wrote that no replay repeats
        self._names = StorageNames()  # of the storages in all of these
        self._unsettled: list[tuple[Handle, int, int]] = []  # and the operation and output that fill it
        self._slots: Slots = ()  # of the call that is being made, and how many tensors it has saved
        self._saved = 0
        self._watched = False
        self.position = 0
        self.diverged: tuple[int, str, str] | None = None
        self.lost = False
        self._recent: tuple[str, ...] = ()
        self.observer: Callable[[Group, bool], None] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.lost:
            return self._search(func, args, kwargs)
        position = self.position
        direction = self._directions[position] if position < len(self._directions) else None
        if direction is not None and direction.familiar:
            group = self._group(direction.group)
            for familiar in direction.familiar:
                if familiar.function == func:  # a property's is another object each time
                    taken = len(group.taken)
                    try:
                        again = familiar.note(group, self._made, self._overwritten, args, kwargs)
                    except RuntimeError:  # an inference tensor, which has no version
                        again = False
                    if again:
                        return self._repeat(direction, group, familiar, taken, args, kwargs)
        name = call_name(func)
        if direction is None or direction.name != name:
            self._unrepeated(name, args, kwargs)
            result = func(*args, **kwargs)
            if is_operation(result):
                self._lose(direction.name if direction else "the end of forward", name)
            return result
        if direction.idle:
            if direction.in_place or kwargs:
                self._unrepeated(name, args, kwargs)
            result = func(*args, **kwargs)
            if type(result) is torch.Tensor or is_operation(result):
                self.position = position + 1
            return result
        return self._carry_out(direction, func, args, kwargs)

    def _repeat(
        self, direction: Direction, group: Group, familiar: Familiar, taken: int, args: Any, kwargs: Any
    ) -> Any:
        """Make a familiar call that is in its group already."""
        self._watched = False
        try:
            result = self._call(direction, familiar.function, args, kwargs)
        except BaseException:
            self._withdraw(group, familiar.index, taken)
            raise
        if not is_operation(result):
            self._withdraw(group, familiar.index, taken)
            self._lose(direction.name, "a call of that name that does something else")
            return result
        if (type(result) is torch.Tensor) is not familiar.single:
            group.strange = True  # made again with nothing taken for granted
        self._bind(direction, familiar.index, result)
        if self._unsettled:
            self._settle()
        self.position += 1
        return result

    def _call(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call, and do as planned with what it saves."""
        # A saved-tensor hook of the model's own (its own checkpoint, offloading) is on top: leave it to it.
        if direction.slots and _top_hooks(True) == self._hooks_below:
            self._slots, self._saved = direction.slots, 0
            _push_hooks(self._pack, self._unpack)  # saved_tensors_hooks, without its object
            try:
                return func(*args, **kwargs)
            finally:
                _pop_hooks()
        return func(*args, **kwargs)

    def _withdraw(self, group: Group, index: int, taken: int) -> None:
        group.withdraw(index, taken)
        self._unsettled.clear()

    def _carry_out(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        noting = watch = None
        if direction.group >= 0:
            group = self._group(direction.group)
            noting = Noting(direction, group, self._made, self._accounted, self._overwritten)
            noting.note(func, args, kwargs, self._trusting)
            if not noting.sound:
                noting.withdraw()
                self._unrepeated(direction.name, args, kwargs)
                self._lose(direction.name, "a call of that name on other tensors")
                return func(*args, **kwargs)
            if not noting.known:
                watch = Watch(noting)
            if direction.in_place or writes_in_place(direction.name, kwargs):
                self._protect(written_by(direction.name, args, kwargs))
        elif direction.in_place or kwargs:
            self._unrepeated(direction.name, args, kwargs)
        self._watched = watch is not None
        try:
            result = self._call(direction, func, args, kwargs)
        except BaseException:
            if noting is not None:
                noting.withdraw()
            self._unsettled.clear()
            raise
        if (type(result) is not torch.Tensor and not is_operation(result)) or (
            watch is not None and not watch.as_planned()
        ):
            if noting is not None:
                noting.withdraw()
            self._unsettled.clear()
            self._lose(direction.name, "a call of that name that does something else")
            return result
        if noting is not None:
            if direction.writes:
                noting.account()
            self._bind(direction, noting.index, result)
            learn(noting, args, kwargs, result)
        if self._unsettled:
            self._settle()
        self.position += 1
        return result

    def _lose(self, expected: str, found: str) -> None:
        self.diverged = self.diverged or (self.position, expected, found)
        self.lost, self._recent = True, ()

    def _search(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Keep what this call makes; go on with the plan where the last few calls are found in it, further on."""
        name = call_name(func)
        self._unrepeated(name, args, kwargs)
        result = func(*args, **kwargs)
        if is_operation(result):
            self._recent = (*self._recent, name)[-MEETING:]
            later = self._meeting_points(self._recent)
            place = bisect.bisect_left(later, self.position)
            if place < len(later):
                self.position, self.lost = later[place], False
        return result

    def _unrepeated(self, name: str, args: Any, kwargs: dict[str, Any]) -> None:
        """Before a call that no replay repeats: what it overwrites is not what a replay makes from then on."""
        if writes_in_place(name, kwargs):
            written = written_by(name, args, kwargs)
            self._protect(written)
            for tensor in written:
                self._made.pop(id(tensor), None)  # a property may have given it another look into its storage
                if (key := self._names.hold(tensor)) is not None:
                    self._overwritten.add(key)

    def _protect(self, written: list[torch.Tensor]) -> None:
        keys = [storage_key(tensor) for tensor in written]
        for group in self._groups:
            if group is not None:
                for key in keys:
                    if key is not None:
                        group.protect(key)

    def _group(self, number: int) -> Group:
        group = self._groups[number]
        if group is None:
            group = self._groups[number] = Group(self.observer, self._programs.setdefault(number, Programs()))
        return group

    def _bind(self, direction: Direction, index: int, result: Any) -> None:
        """Note which results of this call, number `index` in its group, a replay will make again."""
        dropped, group, made = direction.dropped_outputs, direction.group, self._made
        count = len(dropped)
        for output, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            if output < count and dropped[output]:
                version = version_of(tensor)
                entry = made[id(tensor)] = (weakref.ref(tensor), group, version, (index, output))
                if output in direction.fills and (key := self._names.hold(tensor)) is not None:
                    self._filling[self.position, output] = (key, (index, output, -1), entry)
                    self._accounted[key] = version
            else:  # an in-place call can return what was made again before, and no longer is
                made.pop(id(tensor), None)

    def _pack(self, tensor: torch.Tensor) -> Any:
        position = self._saved
        self._saved = position + 1
        action = self._slots[position] if position < len(self._slots) else None
        if action is None or (storage := storage_key(tensor)) is None:
            return Kept(tensor)
        number, op, output, read = action
        filling = self._filling.get((op, output))
        if filling is not None:
            if filling[0] != storage or storage in self._overwritten:
                return Kept(tensor)
            # Another version than the last that a replay accounts for: this very call may have written, or something
            # that does not run again.
            unsure = self._watched or self._accounted.get(storage) != tensor._version
            group, key, entry = self._group(number), filling[1], filling[2]
            whole = not unsure and self._made.get(id(tensor)) is entry and entry[0]() is tensor
        elif output == HIDDEN:
            group, unsure, whole = self._group(number), self._watched, False
            key = (len(group.calls) - 1, position, 0)
        elif op == self.position:  # it is a result of this very call, which has not returned yet
            group, unsure, whole = self._group(number), True, False
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
            self._unsettled.append((handle, op, output))
        return handle

    def _settle(self) -> None:
        """Let the tensors go whose calls have done what was expected of them."""
        for handle, op, output in self._unsettled:
            assert handle.kept is not None
            filling = self._filling.get((op, output))
            if output == HIDDEN or (
                filling is not None
                and filling[0] == storage_key(handle.kept.tensor)
                and self._accounted.get(filling[0]) == handle.kept.version
            ):
                handle.kept = None
        self._unsettled.clear()

    def finish(self) -> None:
        """Forward has ended: let go of all that only following needs."""
        for group in self._groups:
            if group is not None:
                group.settle()
        self._made.clear()
        self._filling.clear()
        self._groups.clear()
        self._accounted = Accounts()
        self._overwritten.clear()
        self._names.release()

    @staticmethod
    def _unpack(packed: Kept | Handle) -> torch.Tensor:
        if isinstance(packed, Handle):
            if packed.kept is None:
                return packed.group.fetch(packed)
            packed = packed.kept
        return packed.value()
