"""Decides again from a committed profile: no model, no device, no torch.

Example:
    >>> source = read_profile_file(Path("plans/gpt2.profile.json"))  # doctest: +SKIP
    >>> relock(source, Settings("../model.py", "6GB"), 6 * 10**9).recompute_us  # doctest: +SKIP
    41250
"""

from __future__ import annotations

from importlib import metadata

from .budget import Bytes, Share, parse_budget
from .canonical import digest
from .decision import Decision, decide, infeasible
from .errors import BudgetError
from .lockfile import PLAN_KIND, SCHEMA_VERSION, Locked, LockedProfile, LockedSegment, Settings
from .lockio import profile_data, sealed
from .profile import Profile
from .report import MEMORY_PARTS
from .schedule import Schedule
from .simulate import simulate
from .solve import minimum

PROFILE_NAME = "profile.json"


def decided(profile: Profile, budget_bytes: int, strategy: str, margin_bytes: int = 0) -> Decision:
    """The decision that a plan file stands for.

    Args:
        profile: in its canonical form.
        budget_bytes: bytes of peak that must not be exceeded.
        strategy: how to look for it.
        margin_bytes: how far below the budget the solver has to stay; all of it asks for the smallest peak.

    Raises:
        InfeasibleBudgetError: the budget cannot be kept.
    """
    if 0 < margin_bytes >= budget_bytes:
        decision = Decision(profile, minimum(profile), budget_bytes, strategy, 0)
        if decision.timeline.peak_bytes > budget_bytes:
            raise infeasible(decision, decision.timeline.peak_bytes)
        return decision
    return decide(profile, budget_bytes, strategy, budget_bytes - margin_bytes)


def budget_of(budget: str | None, profile: Profile) -> int:
    """A budget in bytes of peak, for a profile.

    Raises:
        BudgetError: it is none, or is what the device has free, which a profile does not tell.
    """
    parsed = parse_budget(budget)
    if isinstance(parsed, Bytes):
        return parsed.bytes
    if isinstance(parsed, Share):
        return parsed.of(simulate(profile, Schedule(profile, ())).peak_bytes)
    raise BudgetError("a budget is needed here, such as --budget 8GB: a profile does not tell what a device has free")


def relock(
    source: LockedProfile,
    settings: Settings,
    budget_bytes: int,
    margin_bytes: int = 0,
    profile_name: str = PROFILE_NAME,
) -> Locked:
    """The plan file's contents that a profile and a budget give: the same bytes on every machine.

    Raises:
        InfeasibleBudgetError: the budget cannot be kept.
    """
    decision = decided(source.profile, budget_bytes, settings.strategy, margin_bytes)
    return lock_of(decision, settings, source, profile_name)


def lock_of(decision: Decision, settings: Settings, source: LockedProfile, profile_name: str) -> Locked:
    """A decision as a plan file's contents.

    Args:
        decision: made from `source.profile`.
        settings: what was asked for.
        source: the profile with its fingerprints.
        profile_name: the name of the profile's file.
    """
    profile, target = decision.profile, decision.target_bytes
    memory = decision.memory
    locked = Locked(
        schema=SCHEMA_VERSION,
        kind=PLAN_KIND,
        model=settings.model,
        subject=profile.model,
        inputs=profile.input_signature,
        budget=settings.budget,
        budget_bytes=decision.budget_bytes,
        margin_bytes=0 if target is None else decision.budget_bytes - target,
        strategy=settings.strategy,
        optimizer=settings.optimizer,
        device=settings.device,
        peak_bytes=decision.timeline.peak_bytes,
        baseline_peak_bytes=decision.plain.peak_bytes,
        baseline_step_us=microseconds(profile.step_seconds),
        recompute_us=microseconds(decision.solution.recompute_seconds),
        follow_us=microseconds(decision.follow_seconds),
        overhead=round(decision.overhead, 4),
        memory={part: getattr(memory, part) for part in MEMORY_PARTS},
        segments=_segments(decision),
        profile=profile_name,
        profile_digest=digest(profile_data(source)),
        versions=versions(profile.torch_version),
    )
    return sealed(locked)


def _segments(decision: Decision) -> tuple[LockedSegment, ...]:
    groups = [g for g in decision.schedule.groups if g.trigger >= 0]
    return tuple(
        LockedSegment(
            modules=segment.modules,
            operations=tuple(decision.profile.ops[i].name for i in group.ops),
            bytes_freed=segment.bytes_freed,
            bytes_kept=segment.bytes_kept,
            recompute_us=microseconds(segment.recompute_seconds),
        )
        for segment, group in zip(decision.segments, groups, strict=True)
    )


def microseconds(seconds: float) -> int:
    """A time in whole microseconds."""
    return round(seconds * 1e6)


def versions(torch: str | None) -> dict[str, str]:
    """What a plan depends on: this package, the solver, and a version of torch, if one is given."""
    from . import __version__

    found = {"ckpt-planner": __version__, "ortools": metadata.version("ortools")}
    return found if torch is None else {**found, "torch": torch}
