"""What torch's profiler tells of the CPU's memory: each allocation with its address, between marks.

Of what was allocated outside the profiled span, a release is told of or not, and with a size that may be another
block's: the profiler remembers the addresses of earlier spans, and does not see what is released between them. So a
release counts only where the span itself has the allocation.
"""

from __future__ import annotations

from typing import Any

import torch

_MARK = "ckpt_planner::mark"


def note_mark(number: int) -> None:
    """Mark this moment in the profiled span."""
    with torch.autograd.profiler.record_function(f"{_MARK}{number}"):
        pass


def memory_events(results: Any) -> list[tuple[int | None, int]]:
    """(address, bytes, negative where released) of each allocation, and (None, number) of each mark, in their order.

    Args:
        results: `kineto_results` of a `torch.profiler.profile` that has ended, with `profile_memory=True`.
    """
    allocation = torch._C._profiler._EventType.Allocation
    stack, found = list(reversed(results.experimental_event_tree())), []
    while stack:
        event = stack.pop()
        stack.extend(reversed(event.children))
        if event.tag == allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
        elif event.name.startswith(_MARK):
            found.append((event.start_time_ns, None, int(event.name.removeprefix(_MARK))))
    found.sort(key=lambda e: e[0])
    return [(address, value) for _, address, value in found]
