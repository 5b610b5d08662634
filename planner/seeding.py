"""Random numbers that are the same at each run, for all generators that a model's code may draw from."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from .profiling.shadow import untouched


def seed_all() -> None:
    """Seed the generators of torch, Python and NumPy with 0.

    Example:
        >>> seed_all()
        >>> first = random.random()
        >>> seed_all()
        >>> random.random() == first
        True
    """
    torch.manual_seed(0)
    random.seed(0)
    numpy = sys.modules.get("numpy")  # a model's file that draws from it has it imported by torch already
    if numpy is not None:
        numpy.random.seed(0)


@contextmanager
def seeded() -> Iterator[None]:
    """Seeded generators within; afterwards they are as they were.

    Example:
        >>> with seeded():
        ...     weights = torch.randn(2)
    """
    with untouched():
        seed_all()
        yield
