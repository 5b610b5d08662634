"""The memory over a step, drawn with the characters of a terminal. Free of torch."""

from __future__ import annotations

from .budget import format_bytes
from .moments import Moments

EIGHTHS = " ▁▂▃▄▅▆▇█"
ROWS = 4
NARROWEST = 24  # columns that a chart needs to say anything


def chart(timeline: Moments, budget_bytes: int | None, width: int, over: str = "", rows: int = ROWS) -> list[str]:
    """The plain step's memory and the planned one's, on one scale, each column the highest of its moments.

    Args:
        timeline: the step's memory.
        budget_bytes: columns above it are marked with `over`.
        width: columns of a line.
        over: the ANSI code of what is above the budget ("31"); "" for none.
        rows: lines of each of the two.

    Returns:
        Lines of at most `width` characters, escapes not counted; none where the step has no course or there is no room.
    """
    highest = max((*timeline.plain_high_bytes, *timeline.planned_high_bytes), default=0)
    room = width - 2 - len("planned ") - len(format_bytes(highest)) - 1
    if room < NARROWEST or timeline.moments < 2 or not highest:
        return []
    lines = []
    for name, values in (("plain", timeline.plain_high_bytes), ("planned", timeline.planned_high_bytes)):
        columns = _columns(timeline, values, room)
        peak = max(values)
        tops = [round(8 * rows * value / highest) for value in columns]
        for row in reversed(range(rows)):
            cells = [EIGHTHS[min(8, max(0, top - 8 * row))] for top in tops]
            above = [budget_bytes is not None and v > budget_bytes for v in columns]
            drawn = _mark(cells, [a and cell != " " for a, cell in zip(above, cells, strict=True)], over)
            label = name if row == rows - 1 else ""
            size = format_bytes(peak) if row == rows - 1 else ""
            lines.append(f"  {label:<8}{drawn} {size}".rstrip())
    lines.append(f"  {'':<8}{_phases(timeline, room)}".rstrip())
    return lines


def _columns(timeline: Moments, values: tuple[int, ...], room: int) -> list[int]:
    """The highest value in each of `room` equal parts of the step."""
    found = [0] * room
    ends = (*timeline.first[1:], timeline.moments)
    for start, end, value in zip(timeline.first, ends, values, strict=True):
        first = start * room // timeline.moments
        last = max(first, -(-end * room // timeline.moments) - 1)
        for column in range(first, last + 1):
            found[column] = max(found[column], value)
    return found


def _mark(cells: list[str], marked: list[bool], code: str) -> str:
    """The cells as a line, those that are marked painted."""
    if not code:
        return "".join(cells)
    parts, on = [], False
    for cell, wanted in zip(cells, marked, strict=True):
        if wanted != on:
            parts.append(f"\x1b[{code}m" if wanted else "\x1b[0m")
            on = wanted
        parts.append(cell)
    return "".join(parts) + ("\x1b[0m" if on else "")


def _phases(timeline: Moments, room: int) -> str:
    """Under the chart: where forward and backward are."""
    forward = timeline.phases[0].moments * room // timeline.moments
    parts = [("forward", forward), ("backward", room - forward)]
    return "".join(f"└{name}".ljust(size, "─")[:size] for name, size in parts)
