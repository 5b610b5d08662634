"""One group of one step: the calls to run again, and the saved tensors that wait for them.

A group lives as long as autograd holds one of its handles. It is reached from nothing else, and holds only detached
tensors, so that it goes when the step's graph goes.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from .ambient import (
    Autocast,
    any_autocast,
    choices,
    choose,
    generator_states,
    no_autocast,
    set_generator_states,
)
from .calls import call_name, tensors_in, version_of
from .handles import Handle
from .noted import GONE, Borrowed, Call, Ref, Source
from .parts import Several

if TYPE_CHECKING:
    from .familiar import Familiar
    from .program import Programs

_set_grad_enabled = torch._C._set_grad_enabled
_LOCK = threading.RLock()  # autograd may run one thread a device; replays are rare and long, one lock will do


class Group:
    """The calls of one group in one step, and the values that a replay left for its slots.

    Keys: (call, output, -1) for what a call returns, (call, position, 0) for what it saves.
    """

    __slots__ = (
        "__weakref__", "_programs", "borrowed", "calls", "expected", "indexed", "last_use", "observer", "ready",
        "reshapes", "states", "strange", "taken",
    )  # fmt: skip

    def __init__(self, observer: Callable[[Group, bool], None] | None = None, programs: Programs | None = None) -> None:
        self.calls: list[Call | Familiar] = []
        self.expected: dict[tuple[int, int, int], int] = {}
        self.last_use: dict[tuple[int, int], int] = {}  # of what a call makes, the last call that reads it
        self.ready: dict[tuple[int, int, int], list[Any]] = {}
        self.taken: list[Any] = []  # for familiar calls, each tensor from outside, then its version or COPIED
        self.states: dict[int, tuple[torch.Tensor, ...]] = {}  # before familiar calls that draw
        self.borrowed: list[Borrowed] = []  # what its calls take from groups of inner boundaries
        self.indexed = 0  # how many entries of `taken` `Takers` know of
        self.strange = False  # not all calls are familiar
        self.reshapes = False  # a call writes in place, and may change the shape of a result made before
        self.observer = observer  # told before and after a replay
        self._programs = programs

    def withdraw(self, index: int, taken: int | None = None) -> None:
        """Take a call out again, and what it has left after the first `taken` entries.

        Its number is not given to another: autograd may hold handles that name it.
        """
        if index < len(self.calls):
            self.calls[index], self.strange = GONE, True
        if taken is not None:
            del self.taken[taken:]

    def fetch(self, handle: Handle) -> torch.Tensor:
        """The tensor that `handle` stands for; replays the group if it is not there."""
        key, ready = handle.key, self.ready
        entry = ready.get(key)
        if entry is not None and entry[1] == 1 and ready.pop(key, None) is entry:  # nobody else waits for it
            last: torch.Tensor = entry[0]
            return last if handle.geometry is None else handle.look(last)
        with _LOCK:
            entry = self.ready.get(handle.key)
            if entry is None:
                self.expected.setdefault(handle.key, 1)
                self.replay()
                entry = self.ready.get(handle.key)
            if entry is None:
                raise RuntimeError(
                    "a value that backward needs was not made by computing again the calls that it came from: one of "
                    "them raised in forward, or does not do the same when it is made again"
                )
            base: torch.Tensor = entry[0]
            entry[1] -= 1
            if entry[1] <= 0:
                self.ready.pop(handle.key, None)  # another thread may have taken the last without the lock
            return base if handle.geometry is None else handle.look(base)

    def expect(self, key: tuple[int, int, int], count: int = 1) -> None:
        """So many more, or with less than 0 fewer, will ask for what the key names."""
        left = self.expected.get(key, 0) + count
        if left > 0:
            self.expected[key] = left
        else:
            self.expected.pop(key, None)

    def replay(self) -> None:
        """Run the calls again, in order, and leave what slots wait for in `ready`; first, what they borrow is made."""
        for group in self._missing() if self.borrowed else ():
            group._replay()
        self._replay()

    def _missing(self) -> list[Group]:
        """The groups whose inner boundaries are not there, each after those that it borrows from itself."""
        found: dict[Group, None] = {}
        stack = [self]
        while stack:
            group = stack[-1]
            away = []
            for handle in (borrowed.handle for borrowed in group.borrowed):
                if handle.key not in handle.group.ready and handle.group not in found:
                    handle.group.expected.setdefault(handle.key, 1)
                    away.append(handle.group)
            if away:
                stack.extend(reversed(away))
                continue
            stack.pop()
            if group is not self:
                found[group] = None
        return list(found)

    def _replay(self) -> None:
        if self.observer is not None:
            self.observer(self, True)
        draws = self.states or (self.strange and any(isinstance(c, Call) and c.states for c in self.calls))
        states = generator_states() if draws else None
        grad_mode = torch.is_grad_enabled()
        programs = None if self.strange else self._programs
        program = None if programs is None else programs.find(self)
        chosen = None if program is not None else choices()  # a program sets none
        try:
            if programs is not None and program is not None:
                _set_grad_enabled(False)
                if programs.autocast is no_autocast() and not any_autocast():
                    program(self.taken, self.states, self.ready, set_generator_states)
                else:
                    with Autocast(programs.autocast):
                        program(self.taken, self.states, self.ready, set_generator_states)
            else:
                self._run_all()
        finally:
            _set_grad_enabled(grad_mode)
            if chosen is not None and choices() != chosen:
                choose(chosen)
            if states is not None:
                set_generator_states(states)
                states = None  # let go before the observer looks
        if self.observer is not None:
            self.observer(self, False)

    def _run_all(self) -> None:
        values: dict[tuple[int, int], torch.Tensor] = {}
        self.last_use = _last_uses(self.calls)
        expiring: dict[int, list[tuple[int, int]]] = {}
        for ref, last in self.last_use.items():
            expiring.setdefault(last, []).append(ref)
        taken = iter(self.taken)
        for index, noted in enumerate(self.calls):
            if noted is GONE:
                continue
            call = noted if isinstance(noted, Call) else noted.written_out(taken, self.states.get(index))
            if choices() != call.choices:
                choose(call.choices)
            if call.states is not None:
                set_generator_states(call.states)
            self._run(index, call, values)
            for ref in expiring.get(index, ()):
                values.pop(ref, None)

    def _run(self, index: int, call: Call, values: dict[tuple[int, int], torch.Tensor]) -> None:
        wants_grad = call.wants_grad
        seen: dict[int, torch.Tensor] = {}
        _set_grad_enabled(wants_grad)  # set_grad_enabled without its object; `replay` sets it back
        args = self._restore(call.args, values, wants_grad, call, seen)
        kwargs = self._restore(call.kwargs, values, wants_grad, call, seen) if call.kwargs else {}
        saved: list[torch.Tensor] = []
        with Autocast(call.autocast):
            if call.captured:
                # The list takes detached tensors and the hook gives nothing back, or the graph would hold itself.
                with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.detach()), lambda t: t):
                    result = call.function(*args, **kwargs)
            else:
                result = call.function(*args, **kwargs)
        for position in call.captured:
            key = (index, position, 0)
            if key in self.expected:
                self.ready[key] = [saved[position], self.expected[key]]
        self._leave(index, result, values)

    def _leave(self, index: int, result: Any, values: dict[tuple[int, int], torch.Tensor]) -> None:
        """Leave what a call returned for the slots that wait for it, and for the calls that read it."""
        for output, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            key = (index, output, -1)
            waits, used = key in self.expected, self.last_use.get((index, output), index) > index
            if (waits or used) and tensor.requires_grad:
                tensor = tensor.detach()
            if used:
                values[index, output] = tensor
            if waits:
                self.ready[key] = [tensor.detach() if self.reshapes else tensor, self.expected[key]]

    def _restore(
        self,
        value: Any,
        values: dict[tuple[int, int], torch.Tensor],
        grad: bool,
        call: Call,
        seen: dict[int, torch.Tensor],
    ) -> Any:
        kind = type(value)
        if kind is Ref or kind is Source or kind is Borrowed:
            tensor = seen.get(id(value))
            if tensor is None:
                tensor = seen[id(value)] = self._tensor(value, values, grad, call)
            return tensor
        if kind is tuple or kind is list:
            return kind([self._restore(v, values, grad, call, seen) for v in value])
        if kind is dict:
            return {k: self._restore(v, values, grad, call, seen) for k, v in value.items()}
        return value

    @staticmethod
    def _tensor(
        value: Ref | Source | Borrowed, values: dict[tuple[int, int], torch.Tensor], grad: bool, call: Call
    ) -> torch.Tensor:
        if not isinstance(value, Source):
            if isinstance(value, Borrowed):
                tensor = value.handle.group.fetch(value.handle)
            else:
                tensor = values[value.call, value.output]
            if not grad:
                return tensor
            # Another tensor in any case: a call that writes would make a variable of the one that is held.
            return _variable(tensor.detach(), call.writes) if value.needs_grad else tensor.detach()
        tensor = value.tensor
        if value.copied:
            return _variable(tensor.clone(), call.writes) if grad and value.needs_grad else tensor.clone()
        if version_of(tensor) != value.version:
            changed(tensor, value.version, call.function)
        if grad and value.needs_grad is not tensor.requires_grad:  # it may have been frozen or set free since
            return tensor.detach().requires_grad_(value.needs_grad)
        return tensor


def _last_uses(calls: list[Call | Familiar]) -> dict[tuple[int, int], int]:
    """Of each result that another call reads, the index of the last that does."""
    found: dict[tuple[int, int], int] = {}
    for index, call in enumerate(calls):
        waiting: list[Any] = [call.args, call.kwargs] if isinstance(call, Call) else [call.parts]
        while waiting:
            value = waiting.pop()
            if type(value) is Ref:
                found[value.call, value.output] = index
            elif isinstance(value, (tuple, list)):
                waiting += value
            elif isinstance(value, dict):
                waiting += value.values()
            elif type(value) is Several:
                waiting += value.parts
    return found


def changed(tensor: torch.Tensor, version: int, function: Callable[..., Any]) -> NoReturn:
    """Raise for a tensor that `function` read at a version which it has no longer."""
    raise RuntimeError(
        f"one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"a tensor of shape {tuple(tensor.shape)} that {call_name(function)} read is at version "
        f"{version_of(tensor)}; expected version {version}. "
        "The planned step computes this operation again in backward; change the tensor after backward."
    )


class _SameMemory(torch.autograd.Function):
    """What it gives back is no leaf, so that it may be written into while autograd records."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def _variable(tensor: torch.Tensor, written: bool) -> torch.Tensor:
    """A detached tensor as one that requires a gradient, for a call that writes into it or does not."""
    tensor.requires_grad_()
    return _SameMemory.apply(tensor) if written else tensor  # type: ignore[no-any-return,no-untyped-call]
