"""What a watch makes of a GPU's counters, which are one set for all: here of a made-up device."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_planner.monitor import record
from ckpt_planner.profiling import watch as watching
from ckpt_planner.profiling.meter import make_meter
from ckpt_planner.profiling.watch import CudaWatch


class Device:
    """Counters and a clock as torch.cuda has them; a step takes 1000 ms for each `work`."""

    def __init__(self) -> None:
        self.allocated = self.peak = 0
        self.now = 0.0
        self.finished = True
        self.waited = 0

    def work(self, most: int, left: int) -> None:
        self.peak = max(self.peak, most)
        self.allocated = left
        self.now += 1000.0

    def reset(self, device: Any) -> None:
        self.peak = self.allocated

    def event(self, enable_timing: bool) -> Any:
        return Event(self)


class Event:
    def __init__(self, device: Device) -> None:
        self.device = device

    def record(self, stream: Any) -> None:
        self.at = self.device.now

    def query(self) -> bool:
        return self.device.finished

    def synchronize(self) -> None:
        self.device.waited += 1

    def elapsed_time(self, other: Event) -> float:
        return other.at - self.at


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    made = Device()
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: made.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: 2 * made.peak)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", made.reset)
    monkeypatch.setattr(torch.cuda, "Event", made.event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    return made


def watch() -> CudaWatch:
    return CudaWatch(nn.Linear(2, 2), weakref.WeakSet(), True)


def test_the_peak_is_that_of_the_step(device: Device) -> None:
    device.work(1000, 10)
    with watch() as first:
        device.work(70, 20)
    with watch() as second:
        device.work(50, 20)
    assert (first.peak_bytes, first.reserved_bytes) == (70, 140)
    assert (second.peak_bytes, second.reserved_bytes) == (50, 100)
    assert watching._OPEN[torch.device("cpu")] == []


def test_a_watch_around_another_keeps_its_peak(device: Device) -> None:
    with watch() as outer:
        device.work(90, 10)
        with watch() as inner:
            device.work(30, 10)
        device.work(20, 10)
    assert (outer.peak_bytes, inner.peak_bytes) == (90, 30)
    with watch() as outer, watch() as inner:
        device.work(40, 10)
    assert (outer.peak_bytes, inner.peak_bytes) == (40, 40)


def test_replays_are_timed_and_logging_waits_only_when_it_has_to(device: Device) -> None:
    with watch() as step:
        device.work(1, 1)
        step.replaying(None, True)
        device.work(1, 1)
        step.replaying(None, True)  # one within the other counts once
        device.work(1, 1)
        step.replaying(None, False)
        step.replaying(None, False)
        device.work(1, 1)
    device.finished = False
    assert not step.ready
    assert device.waited == 0
    made = record(3, step)
    assert device.waited == 1
    assert (made.step, made.step_seconds, made.recompute_seconds, made.overhead) == (3, 4.0, 2.0, 1.0)


def test_a_step_in_which_the_planner_measures_has_no_figures(device: Device) -> None:
    with watch() as step:
        make_meter(torch.device("cpu"))
        device.work(10, 10)
    made = record(0, step)
    assert made.planning
    assert (made.peak_bytes, made.reserved_bytes, made.step_seconds) == (None, None, None)


def test_a_step_that_raises_is_closed(device: Device) -> None:
    with pytest.raises(ValueError, match="meant"), watch():
        raise ValueError("meant")
    assert watching._OPEN[torch.device("cpu")] == []
