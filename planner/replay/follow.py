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
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .calls import call_name, is_operation, plain_layout, storage_key, storage_ref, tensors_in, version_of
from .directions import HIDDEN, MEETING, Direction, Directions
from .group import Group, Handle, Kept
from .noting import Accounts, Made, Noting, Watch
from .protect import writes_in_place, written_by

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


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
        # id(tensor) -> (the tensor, weakly; its group, call, output and version), for results made again
        self._made: Made = {}
        # (operation, output) -> (storage, call in its group), for results that fill slots
        self._filling: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        # storage -> its version as far as replays account for it
        self._accounted = Accounts()
        # storages into which something wrote that no replay repeats, with what keeps their names their own
        self._overwritten: dict[int, StorageWeakRef] = {}
        self._unsettled: list[tuple[Handle, int, int]] = []  # and the operation and output that fill it
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

    def _carry_out(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        noting = watch = None
        if direction.group >= 0:
            group = self._group(direction.group)
            noting = Noting(direction, group, self._made, self._accounted, self._overwritten)
            noting.note(self.position, func, args, kwargs, self._trusting)
            if not noting.sound:
                noting.forget()
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
            # A saved-tensor hook of the model's own (its own checkpoint, offloading) is on top: leave it to it.
            if direction.slots and _top_hooks(True) == self._hooks_below:
                slots = enumerate(direction.slots)
                _push_hooks(lambda t: self._pack(t, slots), self._unpack)  # saved_tensors_hooks, without its object
                try:
                    result = func(*args, **kwargs)
                finally:
                    _pop_hooks()
            else:
                result = func(*args, **kwargs)
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
            self._bind(noting, result)
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
                if (key := storage_key(tensor)) is not None and key not in self._overwritten:
                    self._overwritten[key] = storage_ref(tensor)

    def _protect(self, written: list[torch.Tensor]) -> None:
        keys = [storage_key(tensor) for tensor in written]
        for group in self._groups:
            if group is not None:
                for key in keys:
                    if key in group.sources:
                        group.protect(key)

    def _group(self, number: int) -> Group:
        group = self._groups[number]
        if group is None:
            group = self._groups[number] = Group(self.observer)
        return group

    def _bind(self, noting: Noting, result: Any) -> None:
        """Note which results of this call a replay will make again."""
        direction = noting.direction
        if direction.writes:
            noting.account()
        dropped = direction.dropped_outputs
        for output, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            if output < len(dropped) and dropped[output]:
                version = version_of(tensor)
                self._made[id(tensor)] = (weakref.ref(tensor), direction.group, noting.index, output, version)
                if output in direction.fills and (key := storage_key(tensor)) is not None:
                    self._filling[self.position, output] = (storage_ref(tensor), noting.index)
                    self._accounted[key] = version
            else:  # an in-place call can return what was made again before, and no longer is
                self._made.pop(id(tensor), None)

    def _pack(self, tensor: torch.Tensor, slots: Iterator[tuple[int, Any]]) -> Any:
        position, action = next(slots, (0, None))
        if action is None or storage_key(tensor) is None or not plain_layout(tensor):
            return Kept(tensor)
        number, op, output, read = action
        group = self._group(number)
        if output == HIDDEN:
            return self._hand(group, (len(group.calls) - 1, position, 0), tensor, read, op, output, self._watched)
        filling = self._filling.get((op, output))
        if filling is None:
            if op != self.position:
                return Kept(tensor)  # otherwise it is a result of this very call, which has not returned yet
            return self._hand(group, (len(group.calls) - 1, output, -1), tensor, read, op, output, True)
        if filling[0].cdata != storage_key(tensor) or filling[0].cdata in self._overwritten:
            return Kept(tensor)
        # Another version than the last that a replay accounts for: this very call may have written, or something that
        # does not run again.
        unsure = self._watched or self._accounted.get(filling[0].cdata) != version_of(tensor)
        return self._hand(group, (filling[1], output, -1), tensor, read, op, output, unsure)

    def _hand(
        self,
        group: Group,
        key: tuple[int, int, int],
        tensor: torch.Tensor,
        read: bool,
        op: int,
        output: int,
        unsure: bool,
    ) -> Handle:
        if read:
            group.expected[key] = group.expected.get(key, 0) + 1
        handle = Handle(group, key, tensor)
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
                and filling[0].cdata == storage_key(handle.kept.tensor)
                and self._accounted.get(filling[0].cdata) == handle.kept.version
            ):
                handle.kept = None
        self._unsettled.clear()

    def finish(self) -> None:
        """Forward has ended: let go of all that only following needs."""
        for group in self._groups:
            if group is not None:
                group.sources.clear()
        self._made.clear()
        self._filling.clear()
        self._groups.clear()
        self._accounted = Accounts()
        self._overwritten.clear()

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, Kept):
            return packed.value()
        if packed.kept is not None:
            return cast(torch.Tensor, packed.kept.value())
        return cast(torch.Tensor, packed.group.fetch(packed))
