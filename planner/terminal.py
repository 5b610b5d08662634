"""What a terminal can show: how wide, in which colours, with which characters. Free of torch."""

from __future__ import annotations

import os
import shutil
import sys
import textwrap
from typing import NamedTuple, TextIO

import click

PIPED_WIDTH = 100  # columns of the text where stdout is no terminal
WIDEST = 120  # columns that a line is still easy to read in
DRAWN = "█▁─└"


class Look(NamedTuple):
    """How a text may look: columns, whether with colours, and whether with bars."""

    width: int
    color: bool
    bars: bool


def look(stream: TextIO) -> Look:
    """How a text on `stream` may look: plain where that is no terminal."""
    if not stream.isatty():
        return Look(PIPED_WIDTH, False, False)
    try:
        DRAWN.encode(stream.encoding or "ascii")
        bars = True
    except (UnicodeEncodeError, LookupError):
        bars = False
    color = not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
    return Look(min(shutil.get_terminal_size((PIPED_WIDTH, 24)).columns, WIDEST), color, bars)


def say_error(message: str, hint: str = "") -> None:
    """An error on stderr: on a terminal wrapped and with its first word in red, elsewhere in one line.

    Args:
        message: what was wrong, where, and what to do.
        hint: a line of its own, such as the options to try.
    """
    how, head = look(sys.stderr), "Error:"
    text = f"{head} {message}"
    if sys.stderr.isatty():
        wrapped = textwrap.TextWrapper(
            how.width, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
        )
        # A line that fits stays as it is: it may be code, with a mark under it.
        text = "\n".join(line if len(line) <= how.width else wrapped.fill(line) for line in text.splitlines())
    if how.color:
        text = click.style(head, fg="red", bold=True) + text[len(head) :]
    click.echo(f"{text}\n  {hint}" if hint else text, err=True, color=how.color)


def printable(text: str) -> str:
    r"""`text` without what would move a terminal's cursor or change its colours: "\x1b" is written out."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)
