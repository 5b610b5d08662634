"""What a plan decided, what it costs and whether that pays: as data, text, JSON and HTML. Free of torch.

`describe` turns a plan into a `Report`, plain data under the plan's own attribute names; `text`, `json` and `html`
render it, so that they all show the same numbers. Sizes are bytes, times seconds, shares fractions of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Protocol

import msgspec

from .verdict import Verdict, weigh

if TYPE_CHECKING:
    # These bring the solvers along, which the command does not need to start.
    from .alive import ModuleBytes
    from .moduletree import Node
    from .moments import Moments
    from .plan import Plan
    from .profile import Profile
    from .trial import Measurement

MEMORY_PARTS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "workspace")


class Segment(msgspec.Struct, frozen=True):
    """What is computed again together; the attributes are those of `Plan.segments`."""

    modules: tuple[str, ...]
    nodes: int
    bytes_freed: int
    bytes_kept: int
    recompute_seconds: float


class Measured(msgspec.Struct, frozen=True):
    """One real step beside what was predicted; None where the plain step did not fit or was not run.

    Attributes:
        error, baseline_error, step_error, baseline_step_error: how far the prediction is from each of the measured
            values, as a share of the latter; above zero: predicted more.
    """

    peak_bytes: int
    predicted_peak_bytes: int
    step_seconds: float
    baseline_peak_bytes: int | None
    baseline_step_seconds: float | None
    error: float
    baseline_error: float | None
    step_error: float
    baseline_step_error: float | None


class Alike(msgspec.Struct, frozen=True):
    """Segments that differ only in the numbers of their modules, added up.

    Attributes:
        label: their modules in one line, "h.{0…11}.mlp".
        segments: how many they are.
    """

    label: str
    segments: int
    nodes: int
    bytes_freed: int
    bytes_kept: int
    recompute_seconds: float


class Choice(Protocol):
    """One point of a frontier: the least overhead that was found for a peak."""

    @property
    def peak_bytes(self) -> int:
        """Predicted peak, bytes."""

    @property
    def overhead(self) -> float:
        """What the plan costs, as a share of the plain step's time."""

    @property
    def recompute_seconds(self) -> float:
        """Time of what runs again."""

    @property
    def gap(self) -> float:
        """The share of it that may be avoidable."""


class Choices(Protocol):
    """A frontier, as `ckpt_planner.frontier` finds it: its points, and which of them is the knee."""

    @property
    def points(self) -> Sequence[Choice]:
        """The points."""

    @property
    def knee(self) -> int:
        """Index of the point after which less memory costs steeply more."""


class FrontierPoint(msgspec.Struct, frozen=True):
    """A `Choice` as plain data."""

    peak_bytes: int
    overhead: float
    recompute_seconds: float
    gap: float


class Frontier(msgspec.Struct, frozen=True):
    """What other budgets would cost, the smallest peak first; `knee` is the index of a point."""

    points: tuple[FrontierPoint, ...]
    knee: int


class Subject(msgspec.Struct, frozen=True):
    """What was planned, on what."""

    model: str
    device: str
    torch_version: str
    optimizer: str
    loss: str
    ops: int
    resident_bytes: int


class Report(msgspec.Struct, frozen=True):
    """A plan as plain data; every attribute that `Plan` has too means the same there.

    Attributes:
        peak_change: the peak's change from the plain step's, as a share of the latter.
        headroom_bytes: the budget less the predicted peak.
        memory_change: of `memory` from `baseline_memory`, as a share of the latter; None where that is zero.
        alike: the segments, those that are alike added up.
        follow_seconds: what following forward costs, beyond what is computed again.
        starting_seconds: what starting the replays costs, or with mechanism "torch" the checkpoints and what they
            pass without running it; with `again_seconds` of the whole tree it is `recompute_seconds`.
        timeline: the memory over the step.
        alive: what the bytes at the peak are, by module.
        tree: the model's modules and operations.
        frontier: what other budgets would cost, if that was looked for.
        mechanism, mechanism_reason: how the plan is carried out, and why so.
    """

    profile: Subject
    strategy: str
    status: str
    peak_bytes: int
    baseline_peak_bytes: int
    peak_change: float
    budget_bytes: int | None
    headroom_bytes: int | None
    step_seconds: float
    baseline_step_seconds: float
    recompute_seconds: float
    follow_seconds: float
    overhead: float
    lower_bound_seconds: float | None
    gap: float | None
    memory: dict[str, int]
    baseline_memory: dict[str, int]
    memory_change: dict[str, float | None]
    segments: tuple[Segment, ...]
    alike: tuple[Alike, ...]
    starting_seconds: float
    notes: tuple[str, ...]
    verdict: Verdict
    timeline: Moments
    alive: tuple[ModuleBytes, ...]
    tree: tuple[Node, ...]
    frontier: Frontier | None = None
    mechanism: str = ""
    mechanism_reason: str = ""
    measurement: Measured | None = None
    verified: bool | None = None


def describe(
    plan: Plan,
    measurement: Measurement | None = None,
    verified: bool | None = None,
    frontier: Choices | None = None,
) -> Report:
    """The plan as plain data.

    Args:
        plan: what `optimize` returned.
        measurement: what `plan.measure()` returned, if it was called. The verdict is then by its peaks, if it
            has both.
        verified: True if `plan.verify()` found no difference; None if it was not called.
        frontier: what other budgets would cost, if that was looked for.
    """
    from .alive import alive
    from .moduletree import tree
    from .moments import moments
    from .textreport import merge

    measured = None if measurement is None else _measured(plan, measurement)
    nodes = tree(plan.decision)
    segments = tuple(
        Segment(tuple(s.modules), s.nodes, s.bytes_freed, s.bytes_kept, s.recompute_seconds) for s in plan.segments
    )
    return Report(
        profile=subject(plan.profile),
        strategy=plan.strategy,
        status=str(plan.status.value),
        peak_bytes=plan.peak_bytes,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        peak_change=_off(plan.peak_bytes, plan.baseline_peak_bytes) or 0.0,
        budget_bytes=plan.budget_bytes,
        headroom_bytes=None if plan.budget_bytes is None else plan.budget_bytes - plan.peak_bytes,
        step_seconds=plan.step_seconds,
        baseline_step_seconds=plan.baseline_step_seconds,
        recompute_seconds=plan.recompute_seconds,
        follow_seconds=plan.decision.follow_seconds,
        overhead=plan.overhead,
        lower_bound_seconds=plan.lower_bound_seconds,
        gap=plan.gap,
        memory={part: getattr(plan.memory, part) for part in MEMORY_PARTS},
        baseline_memory={part: getattr(plan.baseline_memory, part) for part in MEMORY_PARTS},
        memory_change={p: _off(getattr(plan.memory, p), getattr(plan.baseline_memory, p)) for p in MEMORY_PARTS},
        segments=segments,
        alike=tuple(
            Alike(label, count, sum_.nodes, sum_.bytes_freed, sum_.bytes_kept, sum_.recompute_seconds)
            for label, sum_, count in merge(segments)
        ),
        starting_seconds=max(0.0, plan.recompute_seconds - nodes[0].again_seconds),
        notes=tuple(plan.notes),
        verdict=weigh(plan, measured),
        timeline=moments(plan.decision),
        alive=alive(plan.decision),
        tree=nodes,
        frontier=None if frontier is None or not frontier.points else _frontier(frontier),
        mechanism=plan.mechanism,
        mechanism_reason=plan.mechanism_reason,
        measurement=measured,
        verified=verified,
    )


def subject(p: Profile) -> Subject:
    """What a profile was measured of."""
    return Subject(p.model, p.device, p.torch_version, p.optimizer, p.loss, len(p.ops), p.resident_bytes)


def _measured(plan: Plan, m: Measurement) -> Measured:
    return Measured(
        peak_bytes=m.peak_bytes,
        predicted_peak_bytes=m.predicted_peak_bytes,
        step_seconds=m.step_seconds,
        baseline_peak_bytes=m.baseline_peak_bytes,
        baseline_step_seconds=m.baseline_step_seconds,
        error=_off(m.predicted_peak_bytes, m.peak_bytes) or 0.0,
        baseline_error=_off(plan.baseline_peak_bytes, m.baseline_peak_bytes),
        step_error=_off(plan.step_seconds, m.step_seconds) or 0.0,
        baseline_step_error=_off(plan.baseline_step_seconds, m.baseline_step_seconds),
    )


def _off(value: float, real: float | None) -> float | None:
    return (value - real) / real if real else None


def _frontier(found: Choices) -> Frontier:
    """The frontier with its points in the order of their peaks."""
    order = sorted(range(len(found.points)), key=lambda i: (found.points[i].peak_bytes, found.points[i].overhead))
    points = [found.points[i] for i in order]
    return Frontier(
        tuple(FrontierPoint(p.peak_bytes, p.overhead, p.recompute_seconds, p.gap) for p in points),
        order.index(found.knee),
    )


def json(report: Report) -> str:
    """The report as indented JSON, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def text(report: Report, width: int = 100, color: bool = False, bars: bool = False) -> str:
    """The report for people; see `ckpt_planner.textreport.render`."""
    from .textreport import render

    return render(report, width, color, bars)


def html(report: Report) -> str:
    """The report as one page without anything outside it; see `ckpt_planner.htmlreport.render`."""
    from .htmlreport import render

    return render(report)
