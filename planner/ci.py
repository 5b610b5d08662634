"""Checks the plan files of a project: which there are, which model each belongs to, and what to write when asked to."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import msgspec

from . import userfile
from .check import check
from .config import Config, ModelConfig, Tolerance
from .errors import CkptPlannerError
from .lock import Progress, file_of, lock, reference, rehearsed, resolved, shown, silent, subject_of
from .lockfile import Locked, LockedProfile, Settings
from .lockio import PROFILE_SUFFIX, read_locked, read_plan_file, render_plan, write_locked
from .regress import Check, Finding, figures, moved
from .userfile import Subject


class Job(msgspec.Struct, frozen=True):
    """One plan file to check.

    Attributes:
        plan: its path.
        model: whose it is; None where only the plan file says so.
        tolerance: how far it may get worse.
    """

    plan: Path
    model: ModelConfig | None
    tolerance: Tolerance


def jobs(config: Config, files: Sequence[Path]) -> list[Job]:
    """The plan files to check: those given, or every model's of the configuration.

    Args:
        config: the project's.
        files: plan files; one of a model of the configuration is checked by that model's settings.

    Raises:
        CkptPlannerError: there is nothing to check.
    """
    if not files:
        if not config.models:
            where = f"{config.path} names no models" if config.path else "no pyproject.toml here has [tool.ckpt-plan]"
            raise CkptPlannerError(f"there is nothing to check: {where}, and no plan file was given")
        return [Job(config.plan_of(model), model, model.tolerance) for model in config.models]
    known = {config.plan_of(model).resolve(): model for model in config.models}
    found = []
    for path in files:
        model = known.get(path.resolve())
        found.append(Job(path, model, model.tolerance if model else config.tolerance))
    return found


def settings_of(model: ModelConfig, plan: Path, locked: Locked | None = None) -> Settings:
    """What the configuration asks for; what it leaves open is as in the plan file."""
    own = locked.settings if locked is not None else Settings("", None)
    return Settings(
        reference(model.file, plan),
        model.budget or own.budget,
        model.strategy or own.strategy,
        model.optimizer or own.optimizer,
        model.device or own.device,
    )


def run(
    job: Job,
    *,
    update: bool = False,
    new: bool = False,
    device: str | None = None,
    progress: Progress = silent,
) -> Check:
    """Check one plan file.

    Args:
        job: which, and how.
        update: rewrite it where anything moved, so that the next check finds nothing.
        new: write it where there is none.
        device: where to trace, over the settings'.
        progress: told the name of each stage.

    Returns:
        What was found; an error on purpose becomes a check with the status "error".
    """
    try:
        if not job.plan.exists():
            return _without_plan(job, write=update or new, device=device, progress=progress)
        return _with_plan(job, update=update, device=device, progress=progress)
    except CkptPlannerError as error:
        settings = settings_of(job.model, job.plan) if job.model else None
        file, name = (file_of(settings, job.plan), settings.model) if settings else ("", "")
        findings = (Finding("error", str(error)),)
        return Check(shown(job.plan), name, "error", findings=findings, exit_code=error.exit_code, file=file)


def _without_plan(job: Job, *, write: bool, device: str | None, progress: Progress) -> Check:
    if job.model is None:
        raise CkptPlannerError(f"{job.plan}: there is no such plan file; ckpt-plan lock makes one")
    settings = settings_of(job.model, job.plan)
    if not write:
        return missing(settings, job.plan, "ckpt-plan check --update-new-only")
    with subject_of(resolved(settings, job.plan), settings.optimizer, device or settings.device) as subject:
        return made(subject, settings, job.plan, progress)


def missing(settings: Settings, plan: Path, command: str) -> Check:
    """The check of a model that has no plan file; `command` makes it."""
    why = f"there is no plan file {shown(plan)} yet: make it with {command}, and commit it"
    return Check(
        shown(plan),
        settings.model,
        "failed",
        findings=(Finding("missing", why),),
        exit_code=1,
        file=file_of(settings, plan),
    )


def made(subject: Subject, settings: Settings, plan: Path, progress: Progress = silent) -> Check:
    """Writes a plan file that is not there yet.

    Raises:
        InfeasibleBudgetError: the budget cannot be kept.
        CaptureError, UnsupportedModelError: the step cannot be measured.
    """
    locked, source = lock(subject, settings, plan, progress)
    write_locked(plan, locked, source, replace=False)
    where = file_of(settings, plan)
    return Check(shown(plan), settings.model, "new", after=figures(locked), updated=True, file=where)


def _with_plan(job: Job, *, update: bool, device: str | None, progress: Progress) -> Check:
    plan = job.plan
    locked, committed = read_locked(plan)
    settings = settings_of(job.model, plan, locked) if job.model else locked.settings
    target = resolved(settings, plan)
    if "::" in settings.model:
        raise CkptPlannerError(f"{plan} is kept by the test {target}: run pytest to check it")
    if job.model is None and not userfile.split(target)[0].is_file():
        return _stale(plan, f"the model {target} that it was made for is gone")
    with subject_of(target, settings.optimizer, device or settings.device, elsewhere=True) as subject:
        found = settled(subject, settings, plan, locked, committed, job.tolerance, update=update, progress=progress)
    accept = f"ckpt-plan check --update {shown(plan)}" if found.after is not None and not update else ""
    return msgspec.structs.replace(found, accept=accept)


def settled(
    subject: Subject,
    settings: Settings,
    plan: Path,
    locked: Locked,
    committed: LockedProfile,
    tolerance: Tolerance,
    *,
    update: bool = False,
    progress: Progress = silent,
) -> Check:
    """Checks a model against its plan file; with `update`, rewrites that where anything moved.

    Raises:
        InfeasibleBudgetError: with `update`, where a real step under the new plan does not keep the budget.
        CaptureError, UnsupportedModelError: the step cannot be measured.
    """
    found = check(subject, settings, plan, locked, committed, tolerance, progress)
    result, new, source = found.check, found.locked, found.source
    if not update:
        return result
    if new is None or source is None:
        why = Finding("error", "this cannot be accepted as it is, so the plan file stays as it was")
        return msgspec.structs.replace(result, status="failed", findings=(*result.findings, why), exit_code=1)
    if render_plan(new) == render_plan(locked):
        return msgspec.structs.replace(result, status="unchanged", exit_code=0)
    if source is not committed:
        # Other figures than those that a real step was taken with: see whether the budget still holds.
        new = rehearsed(subject, settings, source, new.budget_bytes, plan, progress)
    write_locked(plan, new, source, replace=True)
    after = moved(locked, new, committed.profile, source.profile)
    return msgspec.structs.replace(
        result,
        after=after.after,
        segments=after.segments,
        modules=after.modules,
        updated=True,
        exit_code=0,
        status="moved" if result.status == "failed" else result.status,
        findings=tuple(msgspec.structs.replace(f, allowed=True) for f in result.findings),
    )


# -- plan files that no model uses ---------------------------------------------------------------------------------


def stale(config: Config) -> Iterator[Check]:
    """The files of the folder of plans that belong to no model of the configuration, nor to a test that exists."""
    if not config.models or not config.plans.is_dir():
        return
    names = {model.name for model in config.models}
    for path in sorted(config.plans.glob("*.json")):
        name = path.name.removesuffix(PROFILE_SUFFIX).removesuffix(".json")
        if name in names or _kept_by_a_test(path.with_name(f"{name}.json")):
            continue
        if path.name.endswith(PROFILE_SUFFIX) and path.with_name(f"{name}.json").exists():
            continue  # its plan is named, and the two go together
        yield _stale(path, f"no model of {config.path} uses it")


def _kept_by_a_test(path: Path) -> bool:
    try:
        locked: Locked = read_plan_file(path)
    except CkptPlannerError:
        return False
    file, _, test = resolved(locked.settings, path).partition("::")
    name = test.rpartition("::")[2].partition("[")[0]
    return bool(test) and Path(file).is_file() and f"def {name}(" in Path(file).read_text(encoding="utf-8")


def _stale(path: Path, why: str) -> Check:
    both = f"{shown(path)} and its profile" if not path.name.endswith(PROFILE_SUFFIX) else shown(path)
    finding = Finding("stale", f"{why}: remove {both}, or name the model that it is for")
    return Check(shown(path), "", "stale", findings=(finding,), exit_code=1, file=shown(path))


def exit_code(checks: Iterable[Check]) -> int:
    """2 if a file cannot be used, else 1 if a check failed, else 0."""
    return max((check.exit_code for check in checks), default=0)
