"""The forward pass of a planned step: the model's own Python runs, and a light mode follows it.

Nothing is traced and nothing is frozen. Each torch call is compared with the plan by its name; where the plan says so,
the call is noted down (its arguments are this step's own), and what autograd saves is replaced by a handle. From the
first call that differs from the plan on, everything is kept: such a step costs memory, never a wrong gradient.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any, cast

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef
from torch.overrides import TorchFunctionMode

from .calls import call_name, is_operation, plain_layout, storage_key, storage_ref, tensors_in
from .directions import HIDDEN, Direction, Directions
from .group import Call, Group, Handle, Kept, Ref, Source, generator_states

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Follower(TorchFunctionMode):
    """Follows one forward pass.

    Attributes:
        position: how many operations have passed.
        diverged: the first operation that differed from the plan, as (position, expected, found), or None.
    """

    def __init__(self, directions: Directions) -> None:
        super().__init__()
        self._hooks_below: Any = None  # saved-tensor hooks under which the plan may still act
        self._directions = directions.ops
        self._groups: list[Group | None] = [None] * directions.groups
        # id(tensor) -> (the tensor, weakly; its group, call and output), for results that a replay makes again
        self._made: dict[int, tuple[weakref.ref[torch.Tensor], int, int, int]] = {}
        # (operation, output) -> (storage, call in its group), for results that fill slots
        self._filling: dict[tuple[int, int], tuple[StorageWeakRef, int]] = {}
        self._unsettled: list[tuple[Handle, int]] = []
        self._call: Call | None = None
        self.position = 0
        self.diverged: tuple[int, str, str] | None = None

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self.diverged is not None:
            return func(*args, **kwargs)
        position = self.position
        direction = self._directions[position] if position < len(self._directions) else None
        name = call_name(func)
        if direction is None or direction.name != name:
            result = func(*args, **kwargs)
            if is_operation(result):
                self.diverged = (position, direction.name if direction else "the end of forward", name)
            return result
        if direction.idle:
            result = func(*args, **kwargs)
            if is_operation(result):
                self.position = position + 1
            return result
        return self._carry_out(direction, func, args, kwargs)

    def _carry_out(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        if direction.group >= 0:
            self._call = self._note(direction, func, args, kwargs)
        # A saved-tensor hook of the model's own (its own checkpoint, offloading) is on top: leave it to it.
        if direction.slots and _top_hooks(True) == self._hooks_below:
            slots = enumerate(direction.slots)
            with saved_tensors_hooks(lambda t: self._pack(t, slots), self._unpack):
                result = func(*args, **kwargs)
        else:
            result = func(*args, **kwargs)
        if not is_operation(result):
            self.diverged = (self.position, direction.name, "a call of that name without a result")
            return result
        if direction.group >= 0:
            self._bind(direction, result)
        if self._unsettled:
            self._settle()
        self.position += 1
        return result

    def _group(self, number: int) -> Group:
        group = self._groups[number]
        if group is None:
            group = self._groups[number] = Group()
        return group

    def _note(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Call:
        group = self._group(direction.group)
        index = len(group.calls)
        counter = iter(range(1 << 30))
        seen: dict[int, Any] = {}
        call = Call(self.position, func, self._template(args, direction, index, counter, seen), {}, "")
        if kwargs:
            call.kwargs = self._template(kwargs, direction, index, counter, seen)
        call.captured, call.graded = direction.captured, direction.graded
        if direction.random:
            call.states = generator_states()
        group.calls.append(call)
        return call

    def _template(
        self, value: Any, direction: Direction, index: int, counter: Iterator[int], seen: dict[int, Any]
    ) -> Any:
        """Arguments with `Ref` and `Source` in place of tensors. (A method: a recursive closure would be a cycle.)

        One tensor given twice has one stand-in: functions ask whether arguments are the same object.
        """
        if isinstance(value, torch.Tensor):
            position = next(counter)
            if id(value) in seen:
                return seen[id(value)]
            made = self._made.get(id(value))
            if made is not None and made[0]() is value and made[1] == direction.group:
                group = self._groups[direction.group]
                assert group is not None
                group.last_use[made[2], made[3]] = index
                found: Ref | Source = Ref(made[2], made[3], value.requires_grad)
            else:
                found = Source(value, position in direction.snapshot)
            seen[id(value)] = found
            return found
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._template(v, direction, index, counter, seen) for v in value])
        if kind is dict:
            return {k: self._template(v, direction, index, counter, seen) for k, v in value.items()}
        if (
            isinstance(value, (tuple, list)) and next(tensors_in(value), None) is not None
        ):  # torch.return_types and such
            return tuple([self._template(v, direction, index, counter, seen) for v in value])
        return value

    def _bind(self, direction: Direction, result: Any) -> None:
        """Note which results of this call a replay will make again."""
        group = self._groups[direction.group]
        assert group is not None
        index = len(group.calls) - 1
        for output, tensor in enumerate(tensors_in(result)):
            if output < len(direction.dropped_outputs) and direction.dropped_outputs[output]:
                self._made[id(tensor)] = (weakref.ref(tensor), direction.group, index, output)
                if storage_key(tensor) is not None:
                    self._filling[self.position, output] = (storage_ref(tensor), index)
            else:  # an in-place call can return what was made again before, and no longer is
                self._made.pop(id(tensor), None)

    def _pack(self, tensor: torch.Tensor, slots: Iterator[tuple[int, Any]]) -> Any:
        position, action = next(slots, (0, None))
        if action is None or storage_key(tensor) is None or not plain_layout(tensor):
            return Kept(tensor)
        number, op, output, read = action
        group = self._group(number)
        if output == HIDDEN:
            return self._hand(group, (len(group.calls) - 1, position, 0), tensor, read)
        filling = self._filling.get((op, output))
        if filling is not None:
            same = filling[0].cdata == storage_key(tensor)
            return self._hand(group, (filling[1], output, -1), tensor, read) if same else Kept(tensor)
        if op == self.position:  # it is a result of this very call, which has not returned yet
            handle = self._hand(group, (len(group.calls) - 1, output, -1), tensor, read)
            handle.kept = Kept(tensor)
            self._unsettled.append((handle, output))
            return handle
        return Kept(tensor)

    def _hand(self, group: Group, key: tuple[int, int, int], tensor: torch.Tensor, read: bool) -> Handle:
        if read:
            group.expected[key] = group.expected.get(key, 0) + 1
        return Handle(group, key, tensor)

    def _settle(self) -> None:
        """Let the tensors go whose calls have returned what was expected of them."""
        for handle, output in self._unsettled:
            assert handle.kept is not None
            filling = self._filling.get((self.position, output))
            if filling is not None and filling[0].cdata == storage_key(handle.kept.tensor):
                handle.kept = None
        self._unsettled.clear()

    def finish(self) -> None:
        """Forward has ended: let go of all that only following needs."""
        self._made.clear()
        self._filling.clear()
        self._groups.clear()
        self._call = None

    @staticmethod
    def _unpack(packed: Any) -> torch.Tensor:
        if isinstance(packed, Kept):
            return packed.value()
        if packed.kept is not None:
            return cast(torch.Tensor, packed.kept.value())
        return cast(torch.Tensor, packed.group.fetch(packed))
