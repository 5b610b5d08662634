"""What a plan decided, what it costs and whether that pays: as data, as text and as JSON. Free of torch.

`describe` turns a plan into a `Report`, plain data under the plan's own attribute names; `text` and `json` render it.
Sizes are bytes, times seconds, shares fractions of one.
"""

from __future__ import annotations

import enum
import textwrap
from collections.abc import Sequence
from typing import Protocol

import msgspec

from .budget import format_bytes
from .modules import Row, summarise
from .profile import Profile

MEMORY_PARTS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "workspace")
PAYS_ABOVE_SAVED = 0.5  # share of the memory
PAYS_BELOW_OVERHEAD = 0.3  # share of the step's time
MOST_ROWS = 20  # of the table of segments; a longer one is not read


class BreakdownLike(Protocol):
    """Bytes at one moment of the step, by what they are for."""

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    workspace: int


class SegmentLike(Protocol):
    """What is computed again together; see `Plan.segments`."""

    @property
    def modules(self) -> tuple[str, ...]: ...  # noqa: D102
    @property
    def nodes(self) -> int: ...  # noqa: D102
    @property
    def bytes_freed(self) -> int: ...  # noqa: D102
    @property
    def bytes_kept(self) -> int: ...  # noqa: D102
    @property
    def recompute_seconds(self) -> float: ...  # noqa: D102
