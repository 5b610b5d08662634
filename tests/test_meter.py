"""What a meter counts on a CPU: the blocks that are allocated within it, whatever was profiled before."""

from __future__ import annotations

import threading

import torch

from ckpt_planner.profiling.meter import CpuMeter

MB = 1 << 20


def block() -> torch.Tensor:
    return torch.empty(MB, dtype=torch.uint8)


def test_what_an_earlier_meter_saw_allocated_is_not_counted_when_it_goes() -> None:
    with CpuMeter():
        earlier = block()
    with CpuMeter() as meter:
        first = meter.mark()
        own = block()
        del earlier
        middle = meter.mark()
        other = block()
        last = meter.mark()
        del own, other
    assert meter.live(middle) - meter.live(first) == MB
    assert meter.peak(first, last) - meter.live(first) == 2 * MB


def test_what_goes_within_the_meter_that_saw_it_come_is_counted() -> None:
    with CpuMeter() as meter:
        first = meter.mark()
        own = block()
        middle = meter.mark()
        del own
        last = meter.mark()
    assert meter.live(middle) - meter.live(first) == MB
    assert meter.live(last) == meter.live(first)
    assert meter.peak(first, last) == meter.live(first) + MB


def test_an_address_that_comes_again_is_the_block_that_lies_there_now() -> None:
    with CpuMeter():
        earlier = block()
    del earlier  # unseen: the profiler still knows its address
    others = [torch.empty(MB // 2, dtype=torch.uint8) for _ in range(8)]  # some may lie where it lay
    with CpuMeter() as meter:
        first = meter.mark()
        others.clear()
        last = meter.mark()
    assert meter.live(last) == meter.live(first)


def test_a_block_that_a_foreign_thread_released_is_gone_once_its_address_comes_again() -> None:
    """As gloo's threads do; torch's profiler sees nothing there."""
    size = 64 * MB  # malloc maps and unmaps blocks this large one by one, so that the next lies where the last lay
    with CpuMeter() as meter:
        first = meter.mark()
        held = [torch.empty(size, dtype=torch.uint8)]
        address = held[0].data_ptr()
        thread = threading.Thread(target=held.clear)
        thread.start()
        thread.join()
        again = torch.empty(size, dtype=torch.uint8)
        last = meter.mark()
    assert not held
    assert again.data_ptr() == address
    assert meter.live(last) - meter.live(first) == size
