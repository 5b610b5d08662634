"""Writes that no plan knows of: what they overwrite is copied first, if a replay is to read it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .calls import storage_key, tensors_in
from .group import Group, Source


def writes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into an argument, by its name or its options."""
    base = name.rsplit(".", 1)[-1]
    in_place = (base.endswith("_") and not base.endswith("__")) or base.startswith("__i") or base == "__setitem__"
    return in_place or kwargs.get("inplace") is True or kwargs.get("out") is not None


def protect_sources(name: str, args: Any, kwargs: dict[str, Any], groups: list[Group | None]) -> None:
    """Before a call that is not planned: copy what it may overwrite and what was noted as kept for a replay.

    Eager does not mind such a write where autograd has not saved what it overwrites; a replay would.
    """
    if not writes_in_place(name, kwargs):
        return
    written = {storage_key(t) for t in tensors_in((args, kwargs))} - {None}
    for group in groups:
        for call in group.calls if group is not None else ():
            for source in _sources((call.args, call.kwargs)):
                if not source.copied and storage_key(source.tensor) in written:
                    source.copy()


def _sources(value: Any) -> Iterator[Source]:
    if isinstance(value, Source):
        yield value
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _sources(item)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _sources(item)
