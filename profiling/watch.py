"""Watches a training step of the user's own: its peak, its time, and the time of its replays.

Unlike a meter, a watch shares the step with everything else that the user does in it. It gives way when the planner
measures within the step, and leaves the memory out where somebody else's profiler runs.
"""

from __future__ import annotations

import time
import weakref
from abc import ABC, abstractmethod
from collections.abc import Iterable
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import Optimizer, register_optimizer_step_post_hook

from ckpt_planner.replay.calls import tensors_in

from .allocations import Allocations
from .forward import device_of
from .meter import give_way_to_meters, no_longer_gives_way

if TYPE_CHECKING:
    from typing_extensions import Self

    from ckpt_planner.decision import Decision


class Watch(ABC):
    """A context around one step.

    Args:
        model: the planned model.
        optimizers: those known to step its parameters; the ones that are seen doing so are added.
        memory: whether the peak is to be measured.

    Attributes:
        decisions: what each planned call within the step followed.
        interrupted: the planner measured within the step, so that neither its time nor its peak is the step's own.
        peak_bytes: the most bytes live at any moment of the step; None if it was not measured.
        reserved_bytes: the most that the caching allocator held; None where there is none.
    """

    def __init__(self, model: nn.Module, optimizers: weakref.WeakSet[Optimizer], memory: bool) -> None:
        self._model, self._optimizers, self._memory = model, optimizers, memory
        self._depth = 0
        self._over = False
        self.decisions: list[Decision] = []
        self.interrupted = False
        self.peak_bytes: int | None = None
        self.reserved_bytes: int | None = None

    def __enter__(self) -> Self:
        self._parameters = {id(p) for p in self._model.parameters()}
        self._begin()
        give_way_to_meters(self)
        self._hook = register_optimizer_step_post_hook(self._stepped)  # type: ignore[no-untyped-call]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._hook.remove()
        no_longer_gives_way(self)
        self._end(error)
        del self._model

    def called(self, decision: Decision, inputs: Any) -> None:
        """A call of the planned model begins, under this decision."""
        self.decisions.append(decision)
        self._note(tensors_in(inputs))

    def replaying(self, _: Any, begins: bool) -> None:
        """A group is about to be replayed, or has been."""
        if self._over:  # a backward after the step's end
            return
        self._depth += 1 if begins else -1
        if self._depth == (1 if begins else 0):
            self._bracket(begins)

    def interrupt(self) -> None:
        """The planner is about to measure a step of its own."""
        self.interrupted = True

    def _stepped(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if any(id(p) in self._parameters for group in optimizer.param_groups for p in group["params"]):
            self._optimizers.add(optimizer)
            self._note(_state(optimizer))

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:  # noqa: B027 (most devices need not know)
        """These tensors belong to the step, whether they were made within it or before."""

    @property
    @abstractmethod
    def ready(self) -> bool:
        """Whether `times` can answer without waiting."""

    @abstractmethod
    def times(self) -> tuple[float, float] | None:
        """Seconds of the step and of the replays in it; None if they are not the step's own."""

    @abstractmethod
    def _begin(self) -> None: ...

    @abstractmethod
    def _end(self, error: BaseException | None) -> None: ...

    @abstractmethod
    def _bracket(self, begins: bool) -> None: ...


class CpuWatch(Watch):
    """Adds what the step allocates to what the plan's budget counts and was there before.

    That is: parameters, buffers, gradients, the state of the optimizers, and inputs. Nobody keeps a count of all that
    lives on a CPU, and the process's resident set is not it.
    """

    def _begin(self) -> None:
        self._allocations: Allocations | None = None
        self._profiled = self._memory and not torch._C._autograd._profiler_enabled()
        if self._profiled:
            self._allocations = Allocations()
            self._allocations.hold(t for p in self._model.parameters() for t in (p, p.grad) if t is not None)
            self._allocations.hold(self._model.buffers())
            self._allocations.hold(t for o in self._optimizers for t in _state(o))
            self._allocations.start()
        self._replays = 0.0
        self._started = time.perf_counter()

    def _end(self, error: BaseException | None) -> None:
        self._seconds = time.perf_counter() - self._started
        allocations, self._allocations = self._allocations, None
        if allocations is not None:
            allocations.stop()
            if error is None:
                self.peak_bytes = allocations.peak_bytes()

    def _note(self, tensors: Iterable[torch.Tensor]) -> None:
        if self._allocations is not None:
            self._allocations.note(tensors)

    def interrupt(self) -> None:
        super().interrupt()
        allocations, self._allocations = self._allocations, None
        if allocations is not None:
            allocations.stop()

    def _bracket(self, begins: bool) -> None:
        now = time.perf_counter()
        if begins:
            self._opened = now
        else:
            self._replays += now - self._opened

    @property
    def ready(self) -> bool:
        return True

    def times(self) -> tuple[float, float] | None:
        return None if self.interrupted or self._profiled else (self._seconds, self._replays)


class CudaWatch(Watch):
    """Reads the caching allocator's counters, which count everything of this process on the device."""

    def _begin(self) -> None:
        self._device = device_of(self._model)
        self._peaks = (0, 0)
        self._fold()  # a watch around this one would lose its peak
        _OPEN.setdefault(self._device, []).append(self)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._events = [self._event()]

    def _end(self, error: BaseException | None) -> None:
        self._events.append(self._event())
        self._fold()
        _OPEN[self._device].remove(self)
        if self._memory and not self.interrupted:
            self.peak_bytes, self.reserved_bytes = self._peaks

    def _fold(self) -> None:
        allocated, reserved = (
            torch.cuda.max_memory_allocated(self._device),
            torch.cuda.max_memory_reserved(self._device),
        )
        for watch in _OPEN.get(self._device, ()):
            watch._peaks = (max(watch._peaks[0], allocated), max(watch._peaks[1], reserved))

    def _bracket(self, begins: bool) -> None:
        self._events.append(self._event())

    def _event(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    @property
    def ready(self) -> bool:
        return bool(self._events[-1].query())

    def times(self) -> tuple[float, float] | None:
        if self.interrupted:
            return None
        first, *inside, last = self._events
        last.synchronize()
        replays = sum(a.elapsed_time(b) for a, b in zip(inside[::2], inside[1::2], strict=False))
        return float(first.elapsed_time(last)) * 1e-3, float(replays) * 1e-3


_OPEN: dict[torch.device, list[CudaWatch]] = {}  # a device has one set of counters for all


def make_watch(model: nn.Module, optimizers: weakref.WeakSet[Optimizer], memory: bool) -> Watch:
    """The watch for the model's device."""
    return (CudaWatch if device_of(model).type == "cuda" else CpuWatch)(model, optimizers, memory)


def _state(optimizer: Optimizer) -> list[torch.Tensor]:
    return list(tensors_in([list(state.values()) for state in optimizer.state.values()]))
