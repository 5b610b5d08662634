"""The report as plain text that fits a given width. Free of torch."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable, Sequence
from typing import TypeVar

from . import labels
from .budget import format_bytes
from .report import MEMORY_PARTS, Report, Segment, Subject
from .terminal import printable
from .timechart import chart

MOST_ROWS = 20  # of the table of segments: nobody reads a longer one, and the JSON has them all
NARROWEST = 72  # what the tables need
OVER = "31"  # the ANSI code of what is above the budget
SHOUT = re.compile(r"\b(ABOVE|BREAKS|DIFFER)\b")

N = TypeVar("N", int, float)


def render(report: Report, width: int = 100, color: bool = False, bars: bool = False) -> str:
    """The report as text.

    Args:
        report: what `describe` returned.
        width: columns; taken as 72 where it is less, since the tables need as much.
        color: bold headings, a coloured verdict, and red for what is above the budget, by ANSI escapes.
        bars: draw the memory over the step, with block characters.

    Returns:
        Lines of at most `width` characters (escapes not counted), without a newline at the end.
    """
    width = max(width, NARROWEST)
    lines: list[str] = []

    def add(heading: str, body: Sequence[str]) -> None:
        lines.extend([""] if lines else [])
        lines.extend(_paint(line, "1", color) for line in _wrap(heading, width))
        lines.extend(piece for line in body for piece in _wrap(line, width))

    add(title(report.profile), _costs(report))
    drawn = chart(report.timeline, report.budget_bytes, width, OVER if color else "") if bars else []
    if drawn:
        add("Memory over the step", [])
        lines.extend(drawn)
        if report.budget_bytes is not None and color:
            lines.append(f"  {'':<8}{_paint('█', OVER, color)} above the budget of {format_bytes(report.budget_bytes)}")
    add("Memory at the peak", _memory(report))
    if report.segments:
        count = len(report.segments)
        add(f"Computed again ({count} segment{'s' * (count != 1)})", _segments(report.segments, width))
    if report.measurement or report.verified is not None:
        add("Checked", _checked(report))
    if report.notes:
        add("Notes", [f"- {printable(note)}" for note in report.notes])
    code = {True: "32", False: "33", None: "0"}[report.verdict.pays]
    verdict = [_paint(line, code, color) for line in _wrap(report.verdict.sentence, width)]
    lines = [_paint(line, f"1;{OVER}", color) if SHOUT.search(line) else line for line in lines]
    return "\n".join([*lines, "", *verdict])


def title(p: Subject) -> str:
    """Model, device, version of torch and optimizer in a line."""
    parts = [p.model, f"on {p.device}", f"torch {p.torch_version}"]
    parts += [f"optimizer {p.optimizer}"] if p.optimizer else []
    return printable(", ".join(part for part in parts if part))


def _costs(report: Report) -> list[str]:
    rows = [
        ("", "plain step", "planned step", "change"),
        _compared("peak memory", report.baseline_peak_bytes, report.peak_bytes),
        ("", f"{report.baseline_peak_bytes:,} B", f"{report.peak_bytes:,} B", ""),
        (
            "step time",
            seconds(report.baseline_step_seconds),
            seconds(report.step_seconds),
            f"{report.overhead:+.1%}",
        ),
    ]
    lines = table(rows)
    if report.budget_bytes is None:
        lines.append(f"Strategy {report.strategy}, no budget.")
    else:
        left = report.budget_bytes - report.peak_bytes
        room = f"{format_bytes(left)} below it" if left >= 0 else f"{format_bytes(-left)} ABOVE it"
        size = f"{format_bytes(report.budget_bytes)} ({report.budget_bytes:,} B)"
        lines.append(f"Strategy {report.strategy}, budget {size}; the predicted peak is {room}.")
    if report.segments:
        again = f"Computed again: {seconds(report.recompute_seconds)} a step"
        # A bound of zero, as where the budget holds the plain step, says nothing.
        if report.lower_bound_seconds:
            again += f"; no plan can do with less than {seconds(report.lower_bound_seconds)}"
            again += f" (gap {report.gap:.1%})" if report.gap is not None else ""
        again += f". Following forward takes {seconds(report.follow_seconds)} more" if report.follow_seconds else ""
        lines.append(f"{again}.")
    lines.append(report.status)
    if report.mechanism:
        lines.append(f"Mechanism {report.mechanism}. {report.mechanism_reason}")
    return lines


def _memory(report: Report) -> list[str]:
    rows = [("", "plain step", "planned step", "change")]
    for part in MEMORY_PARTS:
        before, after = report.baseline_memory[part], report.memory[part]
        if before or after:
            rows.append(_compared(part, before, after))
    rows.append(_compared("total", sum(report.baseline_memory.values()), sum(report.memory.values())))
    return table(rows)


def _segments(segments: Sequence[Segment], width: int) -> list[str]:
    rows = [("modules", "segments", "nodes", "freed", "kept", "time again")]
    merged = merge(segments)
    shown = merged if len(merged) <= MOST_ROWS else sorted(merged, key=lambda row: -row[1].bytes_freed)[: MOST_ROWS - 1]
    for label, sum_, count in (row for row in merged if row in shown):
        sizes = format_bytes(sum_.bytes_freed), format_bytes(sum_.bytes_kept), seconds(sum_.recompute_seconds)
        rows.append((printable(label), str(count), str(sum_.nodes), *sizes))
    rest = [row for row in merged if row not in shown]
    lines = table(rows, width)
    if rest:
        freed = format_bytes(sum(row[1].bytes_freed for row in rest))
        lines.append(f"  and {sum(row[2] for row in rest)} smaller segments that free {freed}")
    return lines


def merge(segments: Sequence[Segment]) -> list[tuple[str, Segment, int]]:
    """Alike segments as one: a label, their sum, how many they are; in the order of the first of each.

    Segments are alike where their modules differ only in numbers ("h.0.mlp", "h.1.mlp") and their nodes and sizes not
    at all. Where layers alternate between two kinds, each kind is one row.
    """
    found: dict[tuple[object, ...], list[tuple[str, Segment]]] = {}
    for segment in segments:
        label = labels.of_modules(segment.modules)
        key = (labels.pattern(label), segment.nodes, segment.bytes_freed, segment.bytes_kept)
        found.setdefault(key, []).append((label, segment))
    rows = []
    for members in found.values():
        parts = [segment for _, segment in members]
        total = Segment(
            modules=tuple(module for part in parts for module in part.modules),
            nodes=sum(part.nodes for part in parts),
            bytes_freed=sum(part.bytes_freed for part in parts),
            bytes_kept=sum(part.bytes_kept for part in parts),
            recompute_seconds=sum(part.recompute_seconds for part in parts),
        )
        rows.append((labels.of_labels([label for label, _ in members]), total, len(members)))
    return rows


def _checked(report: Report) -> list[str]:
    lines = []
    m = report.measurement
    if m is not None:
        rows = [("", "measured", "predicted", "off by")]
        off = f"{m.error:+.2%}"
        rows.append(("planned peak", format_bytes(m.peak_bytes), format_bytes(m.predicted_peak_bytes), off))
        rows.append(("", f"{m.peak_bytes:,} B", f"{m.predicted_peak_bytes:,} B", ""))
        rows.append(_predicted("plain peak", m.baseline_peak_bytes, report.baseline_peak_bytes, format_bytes))
        rows.append(_predicted("planned time", m.step_seconds, report.step_seconds, seconds))
        rows.append(_predicted("plain time", m.baseline_step_seconds, report.baseline_step_seconds, seconds))
        lines += table(rows)
        if report.budget_bytes is not None:
            kept = "keeps" if m.peak_bytes <= report.budget_bytes else "BREAKS"
            lines.append(f"The measured peak {kept} the budget of {format_bytes(report.budget_bytes)}.")
    if report.verified is not None:
        what = "are those of the plain step" if report.verified else "DIFFER from the plain step's"
        lines.append(f"Loss, gradients, buffers and random state {what}.")
    return lines


def seconds(value: float) -> str:
    """A time to read: "1.25 s", "12.5 ms", "830 µs"."""
    if abs(value) >= 1:
        return f"{value:.2f} s"
    return f"{value * 1e3:.1f} ms" if abs(value) >= 1e-3 or value == 0 else f"{value * 1e6:.0f} µs"


def _compared(name: str, before: int, after: int) -> tuple[str, str, str, str]:
    change = f"{after / before - 1:+.1%}" if before else ""
    return name, format_bytes(before), format_bytes(after), change if before != after else "="


def _predicted(name: str, real: N | None, expected: N, show: Callable[[N], str]) -> tuple[str, str, str, str]:
    change = f"{expected / real - 1:+.1%}" if real else ""
    return name, "not run" if real is None else show(real), show(expected), change


def table(rows: Sequence[Sequence[str]], width: int = NARROWEST) -> list[str]:
    """Rows as lines, the first column to the left, the others to the right; a first cell too long has its own line."""
    columns = [max(map(len, column)) for column in zip(*rows, strict=True)]
    room = width - sum(columns[1:]) - 2 * len(columns)
    columns[0] = max(len(first) for first, *_ in rows if len(first) <= room)
    lines = []
    for first, *others in rows:
        if len(first) > columns[0]:
            lines.append(f"  {_shorten(first, width - 2)}")
            first = ""
        cells = [first.ljust(columns[0])]
        cells += [cell.rjust(size) for cell, size in zip(others, columns[1:], strict=True)]
        lines.append(f"  {'  '.join(cells)}".rstrip())
    return lines


def _shorten(label: str, width: int) -> str:
    """`label` with its middle left out where it is longer than `width`: both ends of a module path tell something."""
    if len(label) <= width:
        return label
    head = (width - 1) // 2
    return f"{label[:head]}…{label[len(label) - (width - 1 - head) :]}"


def _wrap(line: str, width: int) -> list[str]:
    if len(line) <= width:
        return [line]
    return textwrap.wrap(line, width, subsequent_indent="  ", break_on_hyphens=False)


def _paint(line: str, code: str, color: bool) -> str:
    return f"\x1b[{code}m{line}\x1b[0m" if color else line
