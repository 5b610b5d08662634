"""What a span of the user's own code allocates on the CPU, beside storages that were there before.

What torch's profiler tells of the release of an older storage says nothing (`events.py`), so that those releases are
seen on the storages.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable
from typing import Any

import torch

from ckpt_planner.replay.calls import storage_key

from .events import memory_events, note_mark
from .meter import quiet


class Allocations:
    """Notes a span. `hold` and `note` name the older storages that count."""

    def __init__(self) -> None:
        gc.collect()  # what an earlier step left behind must not be freed within this one
        self._before: dict[int, int] = {}  # address -> bytes, of storages that were there
        self._noted: list[tuple[int, int, int]] = []  # mark, address, bytes
        self._freed: dict[int, int] = {}  # mark -> address
        self._marks = 0
        self._refs: list[weakref.ref[Any]] = []
        self._profiler: Any = torch.profiler.profile(
            activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
        )

    def start(self) -> None:
        """Begin the span. Only one profiler can run in a process."""
        with quiet():
            self._profiler.__enter__()

    def hold(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these, which are there already; before `start`."""
        for storage in _storages(tensors):
            if storage.data_ptr() not in self._before:
                self._before[storage.data_ptr()] = storage.nbytes()
                self._until_freed(storage)

    def note(self, tensors: Iterable[torch.Tensor]) -> None:
        """Count these, whether they were made within the span or before."""
        mark = self._mark()
        for storage in _storages(tensors):
            self._noted.append((mark, storage.data_ptr(), storage.nbytes()))
            self._until_freed(storage)

    def stop(self) -> None:
        """End the span."""
        self._refs.clear()
        with quiet():
            self._profiler.__exit__(None, None, None)

    def peak_bytes(self) -> int:
        """The most bytes that were live at any moment of the span; after `stop`, once."""
        events = memory_events(self._profiler.profiler.kineto_results)
        self._profiler = None  # its events are large
        noted: dict[int, list[tuple[int, int]]] = {}
        for mark, place, size in self._noted:
            noted.setdefault(mark, []).append((place, size))
        live: set[int] = set()
        for address, value in events:
            if address is None:
                for place, size in noted.get(value, ()):
                    if place not in live:
                        self._before.setdefault(place, size)
            elif value > 0:
                live.add(address)
            else:
                live.discard(address)
        return self._walk(events)

    def _walk(self, events: list[tuple[int | None, int]]) -> int:
        before, inside = dict(self._before), dict[int, int]()
        total = peak = sum(before.values())
        for address, value in events:
            if address is None:
                total -= before.pop(self._freed.get(value, 0), 0)
            elif value > 0:
                inside[address] = value
                total += value
                peak = max(peak, total)
            else:
                total -= inside.pop(address, 0)
        return peak

    def _until_freed(self, storage: torch.UntypedStorage) -> None:
        address = storage.data_ptr()

        def freed(_: Any) -> None:
            self._freed[self._mark()] = address

        self._refs.append(weakref.ref(storage, freed))

    def _mark(self) -> int:
        self._marks += 1
        note_mark(self._marks)
        return self._marks


def _storages(tensors: Iterable[torch.Tensor]) -> list[torch.UntypedStorage]:
    return [t.untyped_storage() for t in tensors if t.device.type == "cpu" and storage_key(t) is not None]
