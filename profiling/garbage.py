"""Collecting garbage many times without looking at everything each time."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def cheap_collections() -> Iterator[None]:
    """What is there at the start is collected once and then left alone, so that collections within take no time.

    A meter collects before it measures. With the modules of a large library loaded, each full collection takes a tenth
    of a second or more, which for a small model is most of planning. Where objects are frozen already, by a caller or
    by the user, nothing is changed.
    """
    if gc.get_freeze_count():
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
