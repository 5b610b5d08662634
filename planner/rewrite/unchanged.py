"""Whether a model's Python state is as it was, in a fraction of the time that saying what has changed takes."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import chain
from operator import is_
from typing import Any

from .contents import ATOMS, content


class Unchanged:
    """Compares watched values by identity, all at once.

    Args:
        values: (container, key, value, label) of each watched value, as they are now.
        sizes: (container, how many entries it has, label).
        contents: (container, what is in it, label) of lists, dicts, sets, tuples and cells.

    Example:
        >>> own = {"eps": 1e-5, "training": True}
        >>> state = Unchanged([(own, "eps", own["eps"], "eps")], [(own, 2, "own")], [])
        >>> state.surely()
        True
        >>> own["eps"] = 1e-6
        >>> state.surely()
        False
    """

    def __init__(
        self,
        values: Iterable[tuple[dict[Any, Any], Any, Any, str]],
        sizes: Iterable[tuple[dict[Any, Any], int, str]],
        contents: Iterable[tuple[Any, Any, str]],
    ) -> None:
        watched: dict[int, tuple[dict[Any, Any], dict[Any, Any]]] = {}
        self._single: list[tuple[dict[Any, Any], Any, Any]] = []
        for container, key, value, _ in values:
            if watched.setdefault(id(container), (container, {}))[1].setdefault(key, value) is not value:
                self._single.append((container, key, value))
        self._containers: list[dict[Any, Any]] = []
        keys: list[dict[Any, Any]] = []
        for container, expected in watched.values():
            # A class's attributes come as a proxy.
            if (
                isinstance(container, dict)
                and expected.keys() <= container.keys()
                and len(container) <= len(expected) + _OTHERS
            ):
                self._containers.append(container)
                keys.append({key: expected.get(key, value) for key, value in container.items()})
            else:  # few of its entries are watched, as of a module's globals, or one of them is gone
                self._single += [(container, key, value) for key, value in expected.items()]
        self._keys = list(chain.from_iterable(keys))
        self._values = list(chain.from_iterable(map(dict.values, keys)))
        self._sized, self._sizes = [], []
        for container, size in ((each, size) for each, size, _ in sizes):
            self._sized.append(container)
            self._sizes.append(size)
        self._sized += self._containers
        self._sizes += list(map(len, keys))
        self._empty: list[Any] = []
        self._filled: list[tuple[Any, Any]] = []
        for value, expected, _ in contents:
            if isinstance(value, (list, dict, set)) and not value and content(value) == expected:
                self._empty.append(value)
            elif not (type(value) is tuple and all(isinstance(each, ATOMS) for each in value)):
                self._filled.append((value, expected))

    def surely(self) -> bool:
        """Whether everything is the very same. False also where a value is an equal one, but another object."""
        try:
            return (
                list(map(len, self._sized)) == self._sizes
                and all(map(is_, chain.from_iterable(map(dict.values, self._containers)), self._values))
                and list(chain.from_iterable(self._containers)) == self._keys
                and not any(self._empty)
                and all(container.get(key, _MISSING) is value for container, key, value in self._single)
                and all(content(value) == expected for value, expected in self._filled)
            )
        except RuntimeError:  # another thread changes one of them
            return False


_MISSING = object()
_OTHERS = 3  # entries of a module that are watched otherwise: the dicts of its parameters, buffers and submodules
