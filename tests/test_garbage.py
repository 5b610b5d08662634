"""Collections are cheap while planning, and the user's garbage collector is as it was afterwards."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest

from ckpt_planner.profiling import garbage
from ckpt_planner.profiling.garbage import cheap_collections


@pytest.fixture(autouse=True)
def nothing_frozen(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The tests' own objects are frozen for speed; here they must not be."""
    monkeypatch.setattr(garbage, "_depth", 0)
    frozen = gc.get_freeze_count()
    gc.unfreeze()
    yield
    if frozen:
        gc.freeze()


def test_what_was_there_is_left_alone_within_and_not_after() -> None:
    assert gc.get_freeze_count() == 0
    with cheap_collections():
        assert gc.get_freeze_count() > 0
        with cheap_collections():
            pass
        assert gc.get_freeze_count() > 0
    assert gc.get_freeze_count() == 0


def test_what_the_user_froze_stays_frozen() -> None:
    gc.freeze()
    with cheap_collections():
        pass
    assert gc.get_freeze_count() > 0
    gc.unfreeze()


def test_an_error_within_leaves_nothing_frozen() -> None:
    with pytest.raises(ValueError, match="within"), cheap_collections():
        raise ValueError("within")
    assert gc.get_freeze_count() == 0
