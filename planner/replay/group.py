"""One group of one step: the calls to run again, and the saved tensors that wait for them.

A group lives as long as autograd holds one of its handles. It is reached from nothing else, and holds only detached
tensors, so that it goes when the step's graph goes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from .calls import call_name, tensors_in, version_of

_LOCK = threading.RLock()  # autograd may run one thread a device; replays are rare and long, one lock will do


class Source:
    """A tensor argument that is kept: from outside the group, or a parameter."""

    __slots__ = ("copied", "needs_grad", "tensor", "version")

    def __init__(self, tensor: torch.Tensor, copied: bool) -> None:
        self.needs_grad = tensor.requires_grad
        self.copied = copied
        if copied:
            self.tensor = tensor.detach().clone()
        else:  # detached, or the group would hold the graph that holds the group
            self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(self.tensor)

    def copy(self) -> None:
        """Keep a copy, because the tensor is about to be written into; if it was already, the replay has to say so."""
        if version_of(self.tensor) == self.version:
            self.tensor, self.copied = self.tensor.detach().clone(), True


class Ref:
    """A tensor argument that the group makes again: result number `output` of the group's call number `call`."""

    __slots__ = ("call", "needs_grad", "output")

    def __init__(self, call: int, output: int, needs_grad: bool) -> None:
        self.call, self.output, self.needs_grad = call, output, needs_grad


class Call:
    """One torch call as it was made, with `Source` and `Ref` in place of tensors."""

    __slots__ = (
        "args", "autocast", "captured", "function", "grad", "graded", "kwargs", "module", "op", "states", "writes",
    )  # fmt: skip

    def __init__(self, op: int, function: Callable[..., Any], args: Any, kwargs: Any, module: str) -> None:
        self.op, self.function, self.args, self.kwargs, self.module = op, function, args, kwargs, module
        self.captured: tuple[int, ...] = ()
        self.graded = self.writes = False
        self.grad = torch.is_grad_enabled()
        self.autocast = autocast_state()
        self.states: tuple[torch.Tensor, ...] | None = None


class Handle:
    """What autograd holds in place of a dropped tensor: where it will come from, and how it looks into its storage."""

    __slots__ = ("dtype", "group", "kept", "key", "offset", "size", "stride")

    def __init__(self, group: Group, key: tuple[int, int, int], tensor: torch.Tensor) -> None:
        self.group, self.key = group, key
        self.size, self.stride, self.offset = tensor.size(), tensor.stride(), tensor.storage_offset()
        self.dtype = tensor.dtype
        self.kept: Kept | None = None  # set where the tensor had to stay after all

    def look(self, base: torch.Tensor) -> torch.Tensor:
        """The saved tensor as a look into the storage of `base`."""
        if base.dtype == self.dtype:
            return torch.as_strided(base, self.size, self.stride, self.offset)
        view = torch.empty(0, dtype=self.dtype, device=base.device)
        return view.set_(base.untyped_storage(), self.offset, self.size, self.stride)  # type: ignore[call-overload]


class Kept:
    """A saved tensor that stays, where a hook stands between autograd and it.

    Autograd does not check versions of what a hook gives back, so it is done here. An output must not be held as the
    variable that it is: its node holds the hook's result, which would hold the variable, which holds its node.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if tensor.is_leaf else tensor.detach()
        self.version = version_of(tensor)

    def value(self) -> torch.Tensor:
        """The tensor, if nobody wrote into it since it was saved."""
        if version_of(self.tensor) != self.version:
            raise RuntimeError(
                "one of the variables needed for gradient computation has been modified by an inplace operation: a "
                f"saved tensor of shape {tuple(self.tensor.shape)} is at version {version_of(self.tensor)}; expected "
                f"version {self.version} instead."
            )
        return self.tensor


class Group:
    """The calls of one group in one step, and the values that a replay left for its slots.

    Keys: (call, output, -1) for what a call returns, (call, position, 0) for what it saves.
    """

    __slots__ = ("__weakref__", "calls", "expected", "last_use", "observer", "ready", "sources")

    def __init__(self, observer: Callable[[Group, bool], None] | None = None) -> None:
        self.calls: list[Call] = []
        self.expected: dict[tuple[int, int, int], int] = {}
        self.last_use: dict[tuple[int, int], int] = {}
        self.ready: dict[tuple[int, int, int], list[Any]] = {}
        self.sources: dict[int, list[Source]] = {}  # storage -> what was noted of it; only while forward runs
        self.observer = observer  # told before and after a replay

    def protect(self, storage: int) -> None:
        """Copy what is noted of a storage that is about to be written into by what does not run again.

        Eager does not mind such a write where autograd has not saved what it overwrites; a replay would.
        """
        for source in self.sources.get(storage, ()):
            if not source.copied:
                source.copy()

    def fetch(self, handle: Handle) -> torch.Tensor:
        """The tensor that `handle` stands for; replays the group if it is not there."""
        with _LOCK:
            entry = self.ready.get(handle.key)
            if entry is None:
                self.expected.setdefault(handle.key, 1)
                self.replay()
                entry = self.ready[handle.key]
            base: torch.Tensor = entry[0]
            entry[1] -= 1
            if entry[1] <= 0:
                del self.ready[handle.key]
            return handle.look(base)

    def replay(self) -> None:
        """Run the calls again, in order, and leave what slots wait for in `ready`."""
        if self.observer is not None:
            self.observer(self, True)
        values: dict[tuple[int, int], torch.Tensor] = {}
        expiring: dict[int, list[tuple[int, int]]] = {}
        for ref, last in self.last_use.items():
            expiring.setdefault(last, []).append(ref)
        states: tuple[torch.Tensor, ...] | None = None
        grad_mode = torch.is_grad_enabled()
        try:
            for index, call in enumerate(self.calls):
                if call.states is not None:
                    if states is None:
                        states = generator_states()
                    set_generator_states(call.states)
                self._run(index, call, values)
                for ref in expiring.get(index, ()):
                    values.pop(ref, None)
        finally:
            torch._C._set_grad_enabled(grad_mode)
            if states is not None:
                set_generator_states(states)
                states = None  # let go before the observer looks
        if self.observer is not None:
            self.observer(self, False)

    def _run(self, index: int, call: Call, values: dict[tuple[int, int], torch.Tensor]) -> None:
        wants_grad = (call.graded or bool(call.captured)) and call.grad
        seen: dict[int, torch.Tensor] = {}
        torch._C._set_grad_enabled(wants_grad)  # set_grad_enabled without its object; `replay` sets it back
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
        for output, tensor in enumerate((result,) if type(result) is torch.Tensor else tensors_in(result)):
            key = (index, output, -1)
            waits, used = key in self.expected, self.last_use.get((index, output), index) > index
            if waits or used:
                tensor = tensor.detach() if tensor.requires_grad else tensor
            if used:
                values[index, output] = tensor
            if waits:
                self.ready[key] = [tensor, self.expected[key]]

    def _restore(
        self,
        value: Any,
        values: dict[tuple[int, int], torch.Tensor],
        grad: bool,
        call: Call,
        seen: dict[int, torch.Tensor],
    ) -> Any:
        kind = type(value)
        if kind is Ref or kind is Source:
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
        value: Ref | Source, values: dict[tuple[int, int], torch.Tensor], grad: bool, call: Call
    ) -> torch.Tensor:
        if isinstance(value, Ref):
            tensor = values[value.call, value.output]
            if not grad:
                return tensor
            # Another tensor in any case: a call that writes would make a variable of the one that is held.
            return _variable(tensor.detach(), call.writes) if value.needs_grad else tensor.detach()
        tensor = value.tensor
        if value.copied:
            return _variable(tensor.clone(), call.writes) if grad and value.needs_grad else tensor.clone()
        if version_of(tensor) != value.version:
            raise RuntimeError(
                f"one of the variables needed for gradient computation has been modified by an inplace operation: "
                f"a tensor of shape {tuple(tensor.shape)} that {call_name(call.function)} in module "
                f"'{call.module}' read is at version {version_of(tensor)}; expected version {value.version}. "
                "The planned step computes this operation again in backward; change the tensor after backward."
            )
        if grad and value.needs_grad and not tensor.requires_grad:
            return tensor.detach().requires_grad_()
        return tensor


class _SameMemory(torch.autograd.Function):
    """What it gives back is no leaf, so that it may be written into while autograd records."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.detach()


def _variable(tensor: torch.Tensor, written: bool) -> torch.Tensor:
    """A detached tensor as one that requires a gradient, for a call that writes into it or does not."""
    tensor.requires_grad_()
    return _SameMemory.apply(tensor) if written else tensor  # type: ignore[no-any-return,no-untyped-call]


def autocast_state() -> tuple[tuple[str, bool, torch.dtype], ...]:
    """Whether autocast is on, and to which type, on the CPU and on the GPU if there is one."""
    devices = _autocast_devices()
    for d in devices:
        if torch.is_autocast_enabled(d):
            return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
    return _OFF[: len(devices)]


_OFF = (("cpu", False, torch.bfloat16), ("cuda", False, torch.float16))


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class Autocast:
    """Sets autocast as it was; without its cache, whose entries must not outlive the replay."""

    __slots__ = ("_contexts", "_state")

    def __init__(self, state: tuple[tuple[str, bool, torch.dtype], ...]) -> None:
        self._state = state
        self._contexts: list[torch.autocast] = []

    def __enter__(self) -> None:
        for device, enabled, dtype in self._state:
            if enabled or torch.is_autocast_enabled(device):
                context = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                context.__enter__()
                self._contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        while self._contexts:
            self._contexts.pop().__exit__(*error)


def generator_states() -> tuple[torch.Tensor, ...]:
    """States of torch's default generators: the CPU's, and the current GPU's once CUDA is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return (torch.get_rng_state(), torch.cuda.get_rng_state())
    return (torch.get_rng_state(),)


def set_generator_states(states: tuple[torch.Tensor, ...]) -> None:
    """Put states back that `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
