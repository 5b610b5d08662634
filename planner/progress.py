"""Says on a terminal what a long call is doing."""

from __future__ import annotations

import sys
from collections.abc import Callable


def stage_reporter() -> Callable[[str], None]:
    """Writes the stages that it is told to stderr, each over the last; silent where stderr is no terminal."""
    if not sys.stderr.isatty():
        return lambda stage: None

    def report(stage: str) -> None:
        sys.stderr.write(f"\r\x1b[Kckpt-planner: {stage} ..." if stage else "\r\x1b[K")
        sys.stderr.flush()

    return report
