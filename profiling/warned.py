"""Warnings of torch that a call of the user's model causes name the user's line, though the call goes through here."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from .describe import is_ours, users_line


@contextmanager
def warnings_name_the_user() -> Iterator[None]:
    """Within it, a warning that would name a line of this package is issued for the user's line that led to it."""
    before: Any = warnings.showwarning

    def show(message: Any, category: Any, filename: str, lineno: int, file: Any = None, line: Any = None) -> None:
        frame: FrameType | None = sys._getframe(1) if is_ours(filename) else None
        while frame is not None and not users_line(frame, frame.f_lineno):
            frame = frame.f_back
        if frame is None:
            before(message, category, filename, lineno, file, line)
            return
        known = frame.f_globals.setdefault("__warningregistry__", {})
        module = frame.f_globals.get("__name__", "")
        warnings.warn_explicit(message, category, frame.f_code.co_filename, frame.f_lineno, module, known)

    warnings.showwarning = show
    try:
        yield
    finally:
        if warnings.showwarning is show:
            warnings.showwarning = before
