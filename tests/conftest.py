"""What every test gets."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest
import torch

from ckpt_planner import optimize
from ckpt_planner.profiling.garbage import cheap_collections


@pytest.fixture(autouse=True)
def same_import_path() -> Iterator[None]:
    """Loading a user's file puts its folder on the import path, as for a script; the next test must not find it there.

    A process that a test spawns inherits the path, and one user's file is called torch.py.
    """
    before = list(sys.path)
    yield
    sys.path[:] = before


@pytest.fixture(autouse=True, scope="session")
def imports_are_not_searched_for_garbage() -> Iterator[None]:
    """Every measurement collects garbage first; without this it would search everything that was ever imported.

    The first plan imports much of torch.
    """
    optimize(torch.nn.Linear(2, 2), 1 << 30, (torch.ones(1, 2),))
    with cheap_collections():
        yield


@pytest.fixture(autouse=True, scope="session")
def one_thread_for_each_process() -> None:
    """Several processes share the machine's cores."""
    torch.set_num_threads(1)
