"""Says what moved between a committed plan and the plan of the model as it is now, and whether that is a regression.
Free of torch.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from .budget import format_bytes
from .config import Tolerance
from .lockfile import Locked, LockedProfile
from .moved import ModuleChange, SegmentChange, moved_modules, moved_segments
from .profile import Profile

Status = Literal["unchanged", "moved", "improved", "failed", "new", "stale", "error"]

ENOUGH = 0.01  # share of the recompute time, or of the peak, that has to be saved to call it an improvement


class Figures(msgspec.Struct, frozen=True):
    """What one plan costs: bytes, microseconds, and a share of the plain step's time; names are those of `Locked`."""

    peak_bytes: int
    baseline_peak_bytes: int
    budget_bytes: int
    recompute_us: int
    follow_us: int
    baseline_step_us: int
    overhead: float


class Finding(msgspec.Struct, frozen=True):
    """One thing that got worse.

    Attributes:
        kind: "peak", "overhead", "budget", "segments", "inputs", "device", "settings", "missing", "stale" or "error".
        message: a sentence.
        allowed: whether it is reported only.
    """

    kind: str
    message: str
    allowed: bool = False


class Check(msgspec.Struct, frozen=True):
    """What a check of one plan found.

    Attributes:
        plan: path of the plan file, as it was given.
        model: what it is the plan of.
        status: "unchanged", "moved" (within what is tolerated), "improved", "failed", "new" (written just now), "stale"
            (a plan file that no model uses), or "error" (a file that cannot be used).
        findings: what got worse; a failed check has at least one that is not allowed.
        before, after: figures of the committed plan and of the plan now; `after` is None where there is no plan.
        segments: what moved among them.
        modules: the modules whose operations or bytes are not what they were, those with the most bytes first.
        estimated: module and name of the operations whose time is an estimate, each once.
        notes: what else a reader should know.
        updated: whether the files were rewritten.
        exit_code: 0 fine, 1 the answer is no, 2 wrong input.
        place: "file.py:12", a line that makes a call which is new.
        file: path of the model's file, from the present folder.
        accept: the command that accepts what was found; empty where there is nothing to accept.
    """

    plan: str
    model: str
    status: Status
    findings: tuple[Finding, ...] = ()
    before: Figures | None = None
    after: Figures | None = None
    segments: tuple[SegmentChange, ...] = ()
    modules: tuple[ModuleChange, ...] = ()
    estimated: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    updated: bool = False
    exit_code: int = 0
    place: str = ""
    file: str = ""
    accept: str = ""


def figures(locked: Locked) -> Figures:
    """The figures of a plan file."""
    return Figures(
        locked.peak_bytes,
        locked.baseline_peak_bytes,
        locked.budget_bytes,
        locked.recompute_us,
        locked.follow_us,
        locked.baseline_step_us,
        locked.overhead,
    )


class Moved(msgspec.Struct, frozen=True):
    """What differs between two plan files, without a verdict; `modules` is empty where a profile is missing."""

    before: Figures
    after: Figures
    segments: tuple[SegmentChange, ...]
    modules: tuple[ModuleChange, ...]


def moved(old: Locked, new: Locked, before: Profile | None, after: Profile | None) -> Moved:
    """What differs between two plans, with their profiles where they are known."""
    modules = moved_modules(before, after) if before is not None and after is not None and before is not after else ()
    return Moved(figures(old), figures(new), moved_segments(old.segments, new.segments), modules)


def judge(old: Locked, new: Locked, difference: Moved, tolerance: Tolerance) -> tuple[Status, tuple[Finding, ...]]:
    """Whether the new plan is a regression.

    The peak got worse where it grew by more than the tolerance; the overhead where its share did and the recompute
    time grew, too. The segments changed where one came or went or runs other operations; that is no finding where the
    plan got clearly better.

    Returns:
        "unchanged", "moved", "improved" or "failed", and what got worse.
    """
    a, b = difference.before, difference.after
    findings = []

    def found(kind: str, message: str) -> None:
        findings.append(Finding(kind, message, kind in tolerance.allow))

    if old.inputs != new.inputs:
        found("inputs", f"the example inputs were {old.inputs} and are {new.inputs}: the figures are of another call")
    if b.peak_bytes > b.budget_bytes:
        found("budget", over_budget(b.peak_bytes, b.budget_bytes))
    worse_peak = b.peak_bytes > a.peak_bytes * (1 + tolerance.peak)
    if worse_peak:
        found("peak", f"the peak grew by {_more(a.peak_bytes, b.peak_bytes)}; tolerated: {tolerance.peak:.1%}")
    if b.overhead - a.overhead > tolerance.overhead and b.recompute_us > a.recompute_us:
        found(
            "overhead",
            f"the overhead grew from {a.overhead:.1%} to {b.overhead:.1%} of the plain step's time; tolerated: "
            f"{100 * tolerance.overhead:.1f} points",
        )
    others = [c for c in difference.segments if not c.same_operations]
    better = _better(a, b) and not findings
    if others and not better:
        found("segments", f"the chosen segments changed: {count_segments(difference.segments)}")
    if any(not f.allowed for f in findings):
        return "failed", tuple(findings)
    if better:
        return "improved", tuple(findings)
    same = a == b and not difference.segments and not difference.modules and not findings
    return "unchanged" if same else "moved", tuple(findings)


def _better(a: Figures, b: Figures) -> bool:
    """Clearly less time or a clearly lower peak, and the other no worse.

    A planned peak lies anywhere close below the budget, so it may rise where the plain step's fell.
    """
    less_memory = b.peak_bytes <= a.peak_bytes or b.baseline_peak_bytes < a.baseline_peak_bytes
    less_time = b.recompute_us < a.recompute_us * (1 - ENOUGH) and less_memory
    lower_peak = b.peak_bytes < a.peak_bytes * (1 - ENOUGH)
    return less_time or (lower_peak and b.recompute_us <= a.recompute_us)


def over_budget(needed: int, budget: int) -> str:
    """The sentence for a budget that does not hold."""
    return (
        f"the budget no longer holds: a step needs {format_bytes(needed)} ({needed:,} B), the budget is "
        f"{format_bytes(budget)} ({budget:,} B), {needed - budget:,} B less"
    )


def _more(before: int, after: int) -> str:
    share = f" ({after / before - 1:+.1%})" if before else ""
    return f"{after - before:,} B{share}, from {format_bytes(before)} to {format_bytes(after)}"


def count_segments(changes: tuple[SegmentChange, ...]) -> str:
    """How many came, went and changed, in words."""
    counts = [(kind, sum(c.kind == kind for c in changes)) for kind in ("came", "went", "changed")]
    return ", ".join(f"{n} {kind}" for kind, n in counts if n) or "none moved"


def estimated_operations(source: LockedProfile) -> tuple[str, ...]:
    """Module and name of each operation whose time is an estimate, each once, in order."""
    known = set(source.estimated)
    names = ((op.module, op.name) for op in source.profile.ops if op.signature in known)
    return tuple(f"{module}: {name}" if module else name for module, name in dict.fromkeys(names))
