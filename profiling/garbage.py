"""Collecting garbage many times without looking at everything each time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager

_depth = 0  # how many are inside


@contextmanager
def cheap_collections() -> Iterator[None]:
    """What is there at the start is collected once and then left alone, so that collections within take no time.

    A meter collects before it measures. With the modules of a large library loaded, each full collection takes a tenth
    of a second or more, which for a small model is most of planning. Where objects are frozen already, by a caller or
    by the user, nothing is changed.
    """
    global _depth
    if _depth == 0 and gc.get_freeze_count():  # the count walks through all that is frozen
        yield
        return
    if _depth == 0:
        gc.collect()
        gc.freeze()
    _depth += 1
    try:
        yield
    finally:
        _depth -= 1
        if _depth == 0:
            gc.unfreeze()
