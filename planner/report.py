"""What a plan decided, what it costs and whether that pays: as data, as text and as JSON. Free of torch.

`describe` turns a plan into a `Report`, plain data under the plan's own attribute names; `text` and `json` render it.
Sizes are bytes, times seconds, shares fractions of one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .plan import Measurement, Plan

MEMORY_PARTS = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "workspace")
PAYS_ABOVE_SAVED = 0.5
PAYS_BELOW_OVERHEAD = 0.3


class Segment(msgspec.Struct, frozen=True):
    """What is computed again together; the attributes are those of `Plan.segments`."""

    modules: tuple[str, ...]
    nodes: int
    bytes_freed: int
    bytes_kept: int
    recompute_seconds: float


class Measured(msgspec.Struct, frozen=True):
    """One real step beside what was predicted; None where the plain step did not fit or was not run."""

    peak_bytes: int
    predicted_peak_bytes: int
    step_seconds: float
    baseline_peak_bytes: int | None = None
    baseline_step_seconds: float | None = None

    @property
    def error(self) -> float:
        """How far the prediction is from the measured peak, as a share of the latter; above zero: predicted more."""
        return (self.predicted_peak_bytes - self.peak_bytes) / self.peak_bytes if self.peak_bytes else 0.0


class Subject(msgspec.Struct, frozen=True):
    """What was planned, on what."""

    model: str
    device: str
    torch_version: str
    optimizer: str
    loss: str
    ops: int
    resident_bytes: int


class Verdict(msgspec.Struct, frozen=True):
    """Whether the plan pays by the rule of thumb.

    Attributes:
        pays: True or False; None where nothing is computed again, so that there is nothing to weigh.
        saved: share of the peak that the plan saves, of what lies above the memory that no plan can avoid
            (parameters, buffers, inputs, optimizer state).
        overhead: what that costs, as a share of the plain step's time.
        sentence: the same for people.
    """

    pays: bool | None
    saved: float
    overhead: float
    sentence: str


class Report(msgspec.Struct, frozen=True):
    """A plan as plain data; every attribute that `Plan` has too means the same there."""

    profile: Subject
    strategy: str
    status: str
    peak_bytes: int
    baseline_peak_bytes: int
    budget_bytes: int | None
    step_seconds: float
    baseline_step_seconds: float
    recompute_seconds: float
    overhead: float
    lower_bound_seconds: float | None
    gap: float | None
    memory: dict[str, int]
    baseline_memory: dict[str, int]
    segments: tuple[Segment, ...]
    notes: tuple[str, ...]
    verdict: Verdict
    mechanism: str = ""
    mechanism_reason: str = ""
    measurement: Measured | None = None
    verified: bool | None = None


def describe(plan: Plan, measurement: Measurement | None = None, verified: bool | None = None) -> Report:
    """The plan as plain data.

    Args:
        plan: what `optimize` returned.
        measurement: what `plan.measure()` returned, if it was called. The verdict is then by its peaks, if it
            has both.
        verified: True if `plan.verify()` found no difference; None if it was not called.
    """
    measured = None
    if measurement is not None:
        measured = Measured(
            peak_bytes=measurement.peak_bytes,
            predicted_peak_bytes=measurement.predicted_peak_bytes,
            step_seconds=measurement.step_seconds,
            baseline_peak_bytes=measurement.baseline_peak_bytes,
            baseline_step_seconds=measurement.baseline_step_seconds,
        )
    p = plan.profile
    return Report(
        profile=Subject(p.model, p.device, p.torch_version, p.optimizer, p.loss, len(p.ops), p.resident_bytes),
        strategy=plan.strategy,
        status=str(plan.status.value),
        peak_bytes=plan.peak_bytes,
        baseline_peak_bytes=plan.baseline_peak_bytes,
        budget_bytes=plan.budget_bytes,
        step_seconds=plan.step_seconds,
        baseline_step_seconds=plan.baseline_step_seconds,
        recompute_seconds=plan.recompute_seconds,
        overhead=plan.overhead,
        lower_bound_seconds=plan.lower_bound_seconds,
        gap=plan.gap,
        memory={part: getattr(plan.memory, part) for part in MEMORY_PARTS},
        baseline_memory={part: getattr(plan.baseline_memory, part) for part in MEMORY_PARTS},
        segments=tuple(
            Segment(tuple(s.modules), s.nodes, s.bytes_freed, s.bytes_kept, s.recompute_seconds) for s in plan.segments
        ),
        notes=tuple(plan.notes),
        verdict=_verdict(plan, measured),
        mechanism=plan.mechanism,
        mechanism_reason=plan.mechanism_reason,
        measurement=measured,
        verified=verified,
    )


def _verdict(plan: Plan, measured: Measured | None) -> Verdict:
    peak, plain, overhead, source = plan.peak_bytes, plan.baseline_peak_bytes, plan.overhead, "predicted"
    if measured is not None and measured.baseline_peak_bytes is not None:
        # The time stays the predicted one: that of a single step is too noisy to decide by, its peak is exact.
        peak, plain, source = measured.peak_bytes, measured.baseline_peak_bytes, "peaks measured, time predicted"
    above = plain - plan.profile.resident_bytes
    saved = (plain - peak) / above if above > 0 else 0.0
    figures = (
        f"it saves {saved:.0%} of the memory above parameters, buffers, inputs and optimizer state "
        f"for {overhead:.0%} more time ({source})"
    )
    if not plan.segments:
        return Verdict(None, saved, overhead, "Nothing is computed again, so there is nothing to pay for.")
    if saved > PAYS_ABOVE_SAVED and overhead < PAYS_BELOW_OVERHEAD:
        return Verdict(True, saved, overhead, f"Pays: {figures}; over half for under 30 % is worth it.")
    if overhead >= PAYS_BELOW_OVERHEAD:
        advice = "30 % or more is a high price: a larger budget, or a smaller batch, may be cheaper"
    else:
        advice = "less than half is worth it only where the step would not fit otherwise"
    return Verdict(False, saved, overhead, f"Does not pay by the rule of thumb: {figures}; {advice}.")


def json(report: Report) -> str:
    """The report as indented JSON, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(report), indent=2).decode() + "\n"


def text(report: Report, width: int = 100, color: bool = False) -> str:
    """The report for people; see `ckpt_planner.textreport.render`."""
    from .textreport import render

    return render(report, width, color)
