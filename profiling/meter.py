"""The one place that knows how a device tells its memory and time.

A meter is a context. Inside it, `mark()` notes a moment; afterwards, `live`, `peak` and `seconds` answer for moments
and the spans between them. On a CPU the allocator's own events are read from torch's profiler; on a GPU the caching
allocator's counters and CUDA events are.
"""

from __future__ import annotations

import gc
import os
import time
from abc import ABC, abstractmethod
from contextlib import suppress
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray

from .events import memory_events, note_mark

if TYPE_CHECKING:
    from typing_extensions import Self

# The profiler's library writes a line at each start and stop otherwise.
os.environ.setdefault("KINETO_LOG_LEVEL", "5")


class Meter(ABC):
    """Notes moments of a run, and what was allocated at and between them."""

    @abstractmethod
    def __enter__(self) -> Self: ...

    @abstractmethod
    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    @abstractmethod
    def mark(self) -> int:
        """Note this moment; the number returned names it."""

    @abstractmethod
    def live(self, mark: int) -> int:
        """Bytes live at a mark, above those live when the meter was entered."""

    @abstractmethod
    def peak(self, first: int, last: int) -> int:
        """The most bytes live between two marks, above those live when the meter was entered."""

    @abstractmethod
    def seconds(self, first: int, last: int) -> float:
        """Time between two marks."""


class CpuMeter(Meter):
    """Reads the memory events of torch's profiler; what was there before and is released within does not count.

    Torch reports what its own threads do. What another thread releases, as gloo does with buckets of gradients, is only
    seen to be gone once its address is used again; until then it counts as live.
    """

    def __init__(self) -> None:
        self._times: list[tuple[int, int]] = []
        self._live: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._peak: NDArray[np.int64] = np.zeros(0, dtype=np.int64)
        self._profiler = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)

    def __enter__(self) -> Self:
        gc.collect()  # what an earlier run left behind must not be freed, and counted, within this one
        earlier = torch.empty(1, device="cpu")
        with quiet():
            self._profiler.__enter__()
            # Of blocks from before that go within, torch reports the first and each thousandth on stderr. Let the first
            # be this one.
            del earlier
        return self

    def mark(self) -> int:
        before = time.perf_counter_ns()
        note_mark(len(self._times))
        self._times.append((before, time.perf_counter_ns()))
        return len(self._times) - 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with quiet():
            self._profiler.__exit__(kind, error, trace)
        if error is None:
            self._read()

    def _read(self) -> None:
        results: Any = self._profiler.profiler.kineto_results  # type: ignore[union-attr]
        sizes: dict[int, int] = {}
        live = peak = 0
        lives, peaks = [], []
        for address, value in memory_events(results):
            if address is None:
                lives.append(live)
                peaks.append(peak)
                peak = live
            elif value > 0:
                live += value - sizes.get(address, 0)
                sizes[address] = value
                peak = max(peak, live)
            else:
                live -= sizes.pop(address, 0)
        self._live, self._peak = np.array(lives, dtype=np.int64), np.array(peaks, dtype=np.int64)
        self._profiler = None  # type: ignore[assignment]  # its events are large

    def live(self, mark: int) -> int:
        return int(self._live[mark])

    def peak(self, first: int, last: int) -> int:
        return int(self._peak[first + 1 : last + 1].max(initial=self._live[first]))

    def seconds(self, first: int, last: int) -> float:
        return max(0, self._times[last][0] - self._times[first][1]) * 1e-9


class CudaMeter(Meter):
    """Reads the caching allocator's counters at each mark, and records an event for the time."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._lives: list[int] = []
        self._peaks: list[int] = []
        self._events: list[torch.cuda.Event] = []
        self._start = 0

    def __enter__(self) -> Self:
        gc.collect()
        torch.cuda.synchronize(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        self._start = torch.cuda.memory_allocated(self._device)
        return self

    def mark(self) -> int:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        self._events.append(event)
        self._lives.append(torch.cuda.memory_allocated(self._device) - self._start)
        self._peaks.append(torch.cuda.max_memory_allocated(self._device) - self._start)
        torch.cuda.reset_peak_memory_stats(self._device)
        return len(self._events) - 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            torch.cuda.synchronize(self._device)

    def live(self, mark: int) -> int:
        return self._lives[mark]

    def peak(self, first: int, last: int) -> int:
        return max([self._lives[first], *self._peaks[first + 1 : last + 1]])

    def seconds(self, first: int, last: int) -> float:
        return float(self._events[first].elapsed_time(self._events[last])) * 1e-3


class quiet:
    """Drops what the profiler's library writes to the process's own stderr while it starts and stops."""

    def __enter__(self) -> None:
        try:
            self._saved = os.dup(2)
            with open(os.devnull, "w") as nothing:
                os.dup2(nothing.fileno(), 2)
        except OSError:
            self._saved = -1

    def __exit__(self, *_: object) -> None:
        if self._saved >= 0:
            os.dup2(self._saved, 2)
            os.close(self._saved)


class _GivesWay(Protocol):
    def interrupt(self) -> None: ...


_GIVING_WAY: list[_GivesWay] = []


def give_way_to_meters(what: _GivesWay) -> None:
    """Have `what` interrupted before a meter is made: the profiler and the allocator's counters serve one at a time."""
    _GIVING_WAY.append(what)


def no_longer_gives_way(what: _GivesWay) -> None:
    """Undo `give_way_to_meters`."""
    with suppress(ValueError):
        _GIVING_WAY.remove(what)


def make_meter(device: torch.device) -> Meter:
    """The meter for a device."""
    for what in _GIVING_WAY:
        what.interrupt()
    return CudaMeter(device) if device.type == "cuda" else CpuMeter()


def free_bytes(device: torch.device) -> int:
    """Bytes of the device's memory that are free for this process now."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return int(os.sysconf("SC_AVPHYS_PAGES")) * int(os.sysconf("SC_PAGE_SIZE"))


def device_name(device: torch.device) -> str:
    """What a report calls the device."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def generator_state(device: torch.device) -> torch.Tensor:
    """The state of torch's default generator that operations on `device` draw from."""
    return torch.cuda.get_rng_state(device) if device.type == "cuda" else torch.get_rng_state()


def set_generator_state(device: torch.device, state: torch.Tensor) -> None:
    """Put a state that `generator_state` returned back."""
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
