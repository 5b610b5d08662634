"""Checks and differences of plan files as text, JSON, Markdown and GitHub's annotations. Free of torch.

`lines` is the short form, at most ten lines for a plan, which every other form is made from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from . import labels
from .budget import format_bytes
from .moved import ModuleChange, SegmentChange
from .regress import Check, Figures, Finding, Moved, count_segments
from .textreport import seconds

MOST_LINES = 10  # of one plan
MOST_ANNOTATIONS = 10  # GitHub shows no more of one step
MOST_SUMMARY = 1_000_000  # bytes; GitHub takes less than a MiB

WORDS = {
    "unchanged": "unchanged",
    "moved": "moved within what is allowed",
    "improved": "improved",
    "failed": "FAILED",
    "new": "new",
    "stale": "FAILED, no model uses it",
    "error": "ERROR",
}

T = TypeVar("T")


def text(checks: Sequence[Check]) -> str:
    """Every check in a few lines, and a sentence about all."""
    return "\n".join([*(line for check in checks for line in lines(check)), "", summary(checks), ""])


def json(checks: Sequence[Check]) -> str:
    """Every attribute of every check, indented, with a newline at the end."""
    return msgspec.json.format(msgspec.json.encode(checks), indent=2).decode() + "\n"


def summary(checks: Sequence[Check]) -> str:
    """How many plans there are of each status, in a sentence."""
    counts = {status: sum(c.status == status for c in checks) for status in WORDS}
    parts = [f"{n} {WORDS[status]}" for status, n in counts.items() if n]
    return f"{len(checks)} plan{'s' * (len(checks) != 1)}: {'; '.join(parts)}."


def lines(check: Check, most: int = MOST_LINES) -> list[str]:
    """What matters of one check, in at most `most` lines; the first names the plan and the result."""
    done = " (the file is rewritten)" if check.updated and check.status != "new" else ""
    head = f"{check.plan}: {WORDS[check.status]}{done}"
    if check.status == "improved" and not check.updated:
        head += "; accept it to keep the gain"
    if check.status in ("unchanged", "new"):
        figures = check.after
        return [f"{head}, {_plan(figures)}" if figures else head]
    found = [_sentence(f) for f in check.findings]
    costs = figure_lines(check.before, check.after) if check.before else []
    modules, segments = module_lines(check.modules), segment_lines(check.segments)
    accept = []
    if check.status == "failed" and check.accept:
        accept = [f"To accept it: {check.accept}"]
    room = most - 1 - len(found) - len(costs) - len(accept) - len(check.notes)
    # What is cut first: segments, then modules; a finding never is.
    modules = _cut(modules, max(1, min(len(modules), room - min(2, len(segments)))), "modules")
    segments = _cut(segments, max(1, room - len(modules)), "kinds of segments")
    body = [*found, *costs, *modules, *segments, *check.notes]
    return [head, *(f"  {line}" for line in [*body[: max(most - 1 - len(accept), len(found))], *accept])]


def _cut(items: list[str], most: int, what: str) -> list[str]:
    if len(items) <= most:
        return items
    rest = len(items) - most + 1
    return [*items[: most - 1], f"and {rest} more {what}"] if most > 1 else items[:1]


def _sentence(finding: Finding) -> str:
    message = finding.message.rstrip(".")
    return f"{message[:1].upper()}{message[1:]}{' (allowed)' if finding.allowed else ''}."


def _plan(f: Figures) -> str:
    return (
        f"peak {format_bytes(f.peak_bytes)} of {format_bytes(f.budget_bytes)}, "
        f"{seconds(f.recompute_us / 1e6)} again, overhead {f.overhead:.1%}"
    )


def figure_lines(before: Figures, after: Figures | None) -> list[str]:
    """Peak and time of two plans, a line each."""
    if after is None:
        return []
    return [
        f"peak: {_sizes(before.peak_bytes, after.peak_bytes)}; plain step: "
        f"{_sizes(before.baseline_peak_bytes, after.baseline_peak_bytes)}",
        f"computed again: {_times(before.recompute_us, after.recompute_us)}; overhead: "
        f"{before.overhead:.1%} → {after.overhead:.1%} of the plain step's "
        f"{_times(before.baseline_step_us, after.baseline_step_us)}",
    ]


def _sizes(before: int, after: int) -> str:
    if before == after:
        return f"{format_bytes(after)} as before"
    return f"{format_bytes(before)} → {format_bytes(after)} ({after - before:+,} B)"


def _times(before_us: int, after_us: int) -> str:
    if before_us == after_us:
        return seconds(after_us / 1e6)
    return f"{seconds(before_us / 1e6)} → {seconds(after_us / 1e6)}"


def module_lines(changes: Sequence[ModuleChange]) -> list[str]:
    """A line for each module whose bytes or operations moved; alike ones share one."""

    def key(c: ModuleChange) -> object:
        return labels.pattern(c.module), c.saved, c.parameters, c.operations_before, c.operations_after

    found = []
    for group in _grouped(changes, key):
        c, name = group[0], labels.of_labels([c.module or labels.ROOT for c in group])
        each = " each" if len(group) > 1 else ""
        parts = []
        if c.saved:
            parts.append(f"{c.saved:+,} B saved for backward{each} ({_pair(c.saved_before, c.saved_after)})")
        if c.parameters:
            parts.append(f"{c.parameters:+,} B of parameters{each} ({_pair(c.parameters_before, c.parameters_after)})")
        if c.operations_before != c.operations_after:
            parts.append(f"{c.operations_before} → {c.operations_after} operations{each}")
        found.append(f"module {name}: {', '.join(parts) or 'other operations of the same size'}")
    return found


def _pair(before: int, after: int) -> str:
    return f"{format_bytes(before)} → {format_bytes(after)}"


def segment_lines(changes: Sequence[SegmentChange]) -> list[str]:
    """A line for each segment that came, went or changed; alike ones share one."""

    def key(c: SegmentChange) -> object:
        sides = [(s.operations, s.bytes_freed, s.bytes_kept) if s else None for s in (c.before, c.after)]
        return c.kind, labels.pattern(labels.of_modules(c.modules)), sides[0], sides[1]

    found = []
    for group in _grouped(changes, key):
        name = labels.of_labels([labels.of_modules(c.modules) for c in group])
        count = f"{len(group)} segments" if len(group) > 1 else "segment"
        olds, news = [c.before for c in group if c.before], [c.after for c in group if c.after]
        freed = sum(s.bytes_freed for s in olds), sum(s.bytes_freed for s in news)
        again = sum(s.recompute_us for s in olds), sum(s.recompute_us for s in news)
        if group[0].kind == "changed":
            how = "other operations" if not group[0].same_operations else _grew(freed[0], freed[1], again)
            what = f"{how}, frees {_sizes(*freed)} for {_times(*again)}"
        else:
            now = int(group[0].kind == "came")
            verb = "frees" if now else "freed"
            what = f"{group[0].kind}, {verb} {format_bytes(freed[now])} for {seconds(again[now] / 1e6)}"
        found.append(f"{count} {name}: {what}")
    return found


def _grew(before: int, after: int, again: tuple[int, int]) -> str:
    if before != after:
        return "grew" if after > before else "shrank"
    return "takes longer" if again[1] > again[0] else "takes less time" if again[1] < again[0] else "keeps other bytes"


def _grouped(items: Sequence[T], key: Callable[[T], object]) -> list[list[T]]:
    found: dict[object, list[T]] = {}
    for item in items:
        found.setdefault(key(item), []).append(item)
    return list(found.values())


def difference(moved: Moved, names: tuple[str, str]) -> list[str]:
    """What differs between two plan files, in words and numbers."""
    if moved.before == moved.after and not moved.segments and not moved.modules:
        return [f"{names[0]} and {names[1]} are the same plan."]
    a, b = moved.before, moved.after
    more = b.recompute_us - a.recompute_us
    costs = "the same time" if not more else f"{seconds(abs(more) / 1e6)} {'more' if more > 0 else 'less'} a step"
    again = f"{names[1]} takes {costs} than {names[0]}" if more else f"{names[1]} takes {costs} as {names[0]}"
    budget = f"budget: {_sizes(a.budget_bytes, b.budget_bytes)}"
    head = f"{again}, and its peak is {format_bytes(b.peak_bytes)} ({b.peak_bytes - a.peak_bytes:+,} B)."
    segments = [f"segments: {count_segments(moved.segments)}"] if moved.segments else []
    rows = [budget, *figure_lines(a, b), *segments, *segment_lines(moved.segments), *module_lines(moved.modules)]
    return [head, *(f"  {row}" for row in rows)]


def shown_difference(moved: Moved, names: tuple[str, str], form: str) -> str:
    """What differs between two plan files, in one of the forms; "github" is a notice and the text."""
    if form == "json":
        return msgspec.json.format(msgspec.json.encode(moved), indent=2).decode() + "\n"
    head, *body = difference(moved, names)
    if form == "markdown":
        return "\n".join([f"## {code(head)}", "", *(f"- {code(line.strip())}" for line in body)]) + "\n"
    notice = f"::notice file={_property(names[1])}::{_escaped(head)}\n" if form == "github" else ""
    return notice + "\n".join([head, *body]) + "\n"


# -- Markdown and GitHub -------------------------------------------------------------------------------------------


def code(value: str) -> str:
    """A name as Markdown code that ends nowhere in itself and breaks no table."""
    clean = re.sub(r"\s+", " ", value).replace("|", "¦")
    ticks = "`" * (max((len(run) for run in re.findall("`+", clean)), default=0) + 1)
    space = " " if clean.startswith("`") or clean.endswith("`") else ""
    return f"{ticks}{space}{clean}{space}{ticks}"


def markdown(checks: Sequence[Check]) -> str:
    """A table of all plans, and what moved of each."""
    rows = ["| plan | result | peak | computed again | overhead |", "|---|---|---|---|---|"]
    for c in checks:
        f = c.after or c.before
        figures = (
            (format_bytes(f.peak_bytes), seconds(f.recompute_us / 1e6), f"{f.overhead:.1%}") if f else ("", "", "")
        )
        rows.append(f"| {code(c.plan)} | {WORDS[c.status]} | {' | '.join(figures)} |")
    parts = ["## Plans of activation checkpointing", "", summary(checks), "", *rows]
    for c in checks:
        if c.status not in ("unchanged", "new"):
            head, *body = lines(c, 40)
            parts += ["", f"### {code(c.plan)}", "", *(f"- {code(line.strip())}" for line in [head, *body])]
    content = "\n".join(parts) + "\n"
    data = content.encode()
    if len(data) <= MOST_SUMMARY:
        return content
    return data[:MOST_SUMMARY].decode(errors="ignore") + "\n\nThe rest is cut off.\n"


def github(checks: Sequence[Check]) -> list[str]:
    """GitHub's workflow commands: one for each plan that is not as it was, failures first, ten at most."""
    kinds = {"failed": "error", "stale": "error", "error": "error", "improved": "notice", "moved": "notice"}
    found = [(kinds[c.status], c) for c in checks if c.status in kinds]
    found.sort(key=lambda pair: pair[0] != "error")
    shown = found if len(found) <= MOST_ANNOTATIONS else found[: MOST_ANNOTATIONS - 1]
    made = [_annotation(kind, c) for kind, c in shown]
    if len(shown) < len(found):
        rest = len(found) - len(shown)
        made.append(
            f"::{found[len(shown)][0]}::{rest} more plans are not as they were; the log and the summary name them"
        )
    return made


def _annotation(kind: str, check: Check) -> str:
    file, _, line = check.place.rpartition(":")
    there = line if file and check.file.rpartition("/")[2] == file else "1"
    head, *body = lines(check)
    values = {"file": check.file or check.plan, "line": there, "title": head}
    properties = ",".join(f"{k}={_property(v)}" for k, v in values.items())
    message = "\n".join(line.strip() for line in body) or head
    return f"::{kind} {properties}::{_escaped(message)}"


def _escaped(value: str) -> str:
    return value.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(value: str) -> str:
    return _escaped(value).replace(":", "%3A").replace(",", "%2C")
