"""Whether a plan pays. Free of torch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

if TYPE_CHECKING:
    from .plan import Plan
    from .report import Measured

PAYS_ABOVE_SAVED = 0.5
PAYS_BELOW_OVERHEAD = 0.3


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


def weigh(plan: Plan, measured: Measured | None) -> Verdict:
    """The verdict on a plan; by the measured peaks where both were measured."""
    peak, plain, overhead, source = plan.peak_bytes, plan.baseline_peak_bytes, plan.overhead, "predicted"
    if measured is not None and measured.baseline_peak_bytes is not None:
        # The time stays the predicted one: that of a single step is too noisy to decide by, its peak is exact.
        peak, plain, source = measured.peak_bytes, measured.baseline_peak_bytes, "peaks measured, time predicted"
    above = plain - plan.profile.resident_bytes
    saved = (plain - peak) / above if above > 0 else 0.0
    figures = (
        f"it {f'saves {saved:.0%} of' if saved >= 0 else f'adds {-saved:.0%} to'} the memory above parameters, "
        "buffers, inputs and optimizer state "
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
