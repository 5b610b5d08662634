"""Which tensors the groups of a step have taken from outside, so that they can copy what is about to be written to."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch

from .calls import storage_key, version_of
from .noted import COPIED, Source

if TYPE_CHECKING:
    from .group import Group


class Takers:
    """By storage, where it was noted; only while forward runs. Most steps write into nothing: it is filled when asked.

    Attributes:
        sources: what was noted of a storage in full.
    """

    __slots__ = ("_places", "sources")

    def __init__(self) -> None:
        self.sources: dict[int, list[Source]] = {}
        self._places: dict[int, list[tuple[Group, int]]] = {}

    def protect(self, groups: Iterable[Group | None], written: Iterable[torch.Tensor]) -> None:
        """Copy what is noted of storages that are about to be written into by something else than their replay.

        Eager does not mind such a write where autograd has not saved what it overwrites; a replay would.
        """
        for group in groups:
            if group is not None and group.indexed < len(group.taken):
                self._index(group)
        for tensor in written:
            storage = storage_key(tensor)
            if storage is None:
                continue
            for source in self.sources.get(storage, ()):
                if not source.copied:
                    source.copy()
            for group, place in self._places.get(storage, ()):
                taken = group.taken
                if version_of(taken[place]) == taken[place + 1]:
                    taken[place], taken[place + 1] = taken[place].detach().clone(), COPIED

    def _index(self, group: Group) -> None:
        taken = group.taken
        for place in range(group.indexed, len(taken), 2):
            if (key := storage_key(taken[place])) is not None:
                self._places.setdefault(key, []).append((group, place))
        group.indexed = len(taken)

    def withdrawn(self, group: Group, taken: int) -> None:
        """A group has no more than the first `taken` entries left of what it took."""
        if group.indexed > taken:
            for places in self._places.values():
                places[:] = [(each, place) for each, place in places if each is not group]
            group.indexed = 0

    def note(self, source: Source) -> None:
        """A tensor was noted in full."""
        if not source.copied and (key := storage_key(source.tensor)) is not None:
            self.sources.setdefault(key, []).append(source)

    def forget(self, source: Source) -> None:
        """And no longer is."""
        if not source.copied and (key := storage_key(source.tensor)) is not None:
            noted = self.sources.get(key, [])
            if source in noted:
                noted.remove(source)

    def clear(self) -> None:
        """Forward has ended."""
        self.sources.clear()
        self._places.clear()
