"""Checks a model as it is now against its plan file and the profile beside it."""

from __future__ import annotations

from pathlib import Path

import msgspec
import torch

from .budget import Free, parse_budget
from .canonical import canonical, fingerprints
from .config import Tolerance
from .costs import priced
from .errors import InfeasibleBudgetError
from .lock import Progress, completed, file_of, shown, silent
from .lockfile import Locked, LockedProfile, Settings
from .lockio import profile_path, sealed
from .moved import moved_modules
from .profile import Profile
from .profiling.measure import record_forward
from .profiling.optimizer import optimizer_memory
from .regress import Check, Finding, estimated_operations, figures, judge, moved
from .relock import budget_of, relock, versions
from .runtime import Runtime
from .userfile import Subject


class Checked(msgspec.Struct, frozen=True):
    """A check, and the files that would accept what it found; None where nothing can be accepted."""

    check: Check
    locked: Locked | None = None
    source: LockedProfile | None = None


def check(
    subject: Subject,
    settings: Settings,
    plan: Path,
    locked: Locked,
    committed: LockedProfile,
    tolerance: Tolerance,
    progress: Progress = silent,
) -> Checked:
    """Trace a model as it is now, decide from the committed profile, and say what moved.

    Where the recorded forward pass is the committed one, the profile stands as it is. Else the step is measured, and
    the operations that the profile knows keep its times.

    Args:
        subject, settings: the model as it is now, and what is asked for now.
        plan: the plan file's path.
        locked, committed: its contents, and the profile's.
        tolerance: how far it may get worse.

    Raises:
        CaptureError, UnsupportedModelError: the step cannot be measured.
    """
    old = committed.profile
    draft, sequences = record_forward(
        subject.model, subject.args, subject.kwargs, loss_fn=subject.loss_fn, progress=progress
    )
    now, elsewhere = fingerprints(draft), draft.device != old.device
    base = Check(
        shown(plan), settings.model, "failed", before=figures(locked), exit_code=1, file=file_of(settings, plan)
    )
    notes = _version_notes(locked, draft)
    scale: float | None = None
    place = ""
    if now.calls == committed.fingerprints.calls and (elsewhere or now.record == committed.fingerprints.record):
        source = _with_optimizer(committed, subject)
        if elsewhere:
            notes.append(f"Traced on {draft.device}; the calls are those that were profiled on {old.device}.")
    else:
        place = _first_new(old, draft)
        if elsewhere and "device" not in tolerance.allow:
            why = (
                f"the model's calls changed, and the profile is of {old.device}: what its kernels save cannot be found "
                f"on {draft.device}. Check or lock on such a device"
            )
            findings: tuple[Finding, ...] = (Finding("device", why),)
            modules = moved_modules(old, canonical(draft), kernels=False)
            return Checked(
                msgspec.structs.replace(base, findings=findings, modules=modules, notes=tuple(notes), place=place)
            )
        price = priced(committed, completed(subject, draft, sequences, progress), draft)
        source, scale = price.source, price.scale
    estimated = estimated_operations(source)
    if estimated and source is not committed:
        notes.append(_estimate_note(len(estimated), scale, draft.device))
    asked = _settings_findings(locked, settings)
    base = msgspec.structs.replace(base, estimated=estimated, notes=tuple(notes), place=place)
    progress("deciding")
    try:
        changed = parse_budget(locked.budget) != parse_budget(settings.budget)
        budget = _new_budget(subject, settings, source) if changed else locked.budget_bytes
        margin = 0 if asked else locked.margin_bytes
        if source is committed and not asked and _decided_alike(locked):
            # The same profile and settings give the same plan: deciding again would only take time.
            new = sealed(msgspec.structs.replace(locked, model=settings.model, device=settings.device))
        else:
            new = relock(source, settings, budget, margin, profile_path(plan).name)
    except InfeasibleBudgetError as error:
        allowed = "budget" in tolerance.allow
        findings = (*asked, Finding("budget", f"the budget no longer holds: {error}", allowed))
        modules = moved_modules(old, source.profile)
        failed = msgspec.structs.replace(base, findings=findings, modules=modules)
        return Checked(failed if asked or not allowed else msgspec.structs.replace(failed, status="moved", exit_code=0))
    difference = moved(locked, new, old, source.profile)
    status, findings = judge(locked, new, difference, tolerance)
    if asked:
        status, findings = "failed", (*asked, *findings)
    found = msgspec.structs.replace(
        base,
        status=status,
        findings=findings,
        after=difference.after,
        segments=difference.segments,
        modules=difference.modules,
        exit_code=int(status == "failed"),
    )
    return Checked(found, new, source)


def _decided_alike(locked: Locked) -> bool:
    """Whether the plan was decided by the versions that are here."""
    here = versions(None)
    return all(locked.versions.get(name) == version for name, version in here.items())


def _with_optimizer(committed: LockedProfile, subject: Subject) -> LockedProfile:
    """The committed profile with the memory of the optimizer that is used now."""
    old = committed.profile
    name, state, workspace = "", 0, 0
    if subject.optimizer is not None:
        # Whether it steps all parameters at once depends on the kind of device that the plan is for.
        device = torch.device("cpu" if old.device == "cpu" else "cuda")
        name, state, workspace = optimizer_memory(subject.optimizer, subject.model, device)
    if (name, state, workspace) == (old.optimizer, old.optimizer_state_bytes, old.optimizer_workspace_bytes):
        return committed
    profile = msgspec.structs.replace(
        old, optimizer=name, optimizer_state_bytes=state, optimizer_workspace_bytes=workspace
    )
    return msgspec.structs.replace(committed, profile=profile)


def _new_budget(subject: Subject, settings: Settings, source: LockedProfile) -> int:
    if isinstance(parse_budget(settings.budget), Free):
        runtime = Runtime(None, settings.strategy, subject.loss_fn, subject.optimizer)
        return runtime.budget_bytes(source.profile, subject.model, subject.args, subject.kwargs)
    return budget_of(settings.budget, source.profile)


def _settings_findings(locked: Locked, now: Settings) -> tuple[Finding, ...]:
    """What is asked for now and was not when the plan was made."""
    pairs = [
        ("budget", locked.budget, now.budget, parse_budget(locked.budget) == parse_budget(now.budget)),
        ("strategy", locked.strategy, now.strategy, locked.strategy == now.strategy),
        ("optimizer", locked.optimizer, now.optimizer, locked.optimizer == now.optimizer),
    ]
    return tuple(
        Finding("settings", f"the {name} asked for is {new}, and the plan was made for {old}: accept it with --update")
        for name, old, new, same in pairs
        if not same
    )


def _version_notes(locked: Locked, draft: Profile) -> list[str]:
    here = versions(draft.torch_version)
    return [
        f"Locked with {name} {version}, checked with {here[name]}."
        for name, version in sorted(locked.versions.items())
        if name in here and here[name].partition("+")[0] != version.partition("+")[0]
    ]


def _estimate_note(count: int, scale: float | None, device: str) -> str:
    how = (
        "as measured here, since the committed profile knows none of this model's operations"
        if scale is None
        else f"measured on this {device}, times {scale:.2g}, which brings times from here to the committed profile's"
    )
    return f"The time of {count} operation{'s that are' if count != 1 else ' that is'} new is an estimate: {how}."


def _first_new(old: Profile, draft: Profile) -> str:
    """The line of the first call that the committed profile does not know."""
    known = {op.signature for op in old.ops}
    return next((op.place for op in draft.ops if op.signature not in known), "")
