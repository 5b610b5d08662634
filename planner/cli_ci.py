"""The commands for plan files that are committed: `lock`, `check`, `diff`. Torch is imported when one needs it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .budget import parse_budget
from .config import ALLOWED, GENERAL, STRATEGIES, Config, Tolerance, find_config, parse_share, read_config
from .errors import BudgetError, CkptPlannerError
from .options import device_option
from .progress import stage_reporter

if TYPE_CHECKING:
    from .lockfile import Locked, LockedProfile, Settings
    from .regress import Check

FORMATS = ("text", "json", "markdown", "github")


def register(group: click.Group) -> None:
    """Add the commands to the group."""
    for command in (lock, check, diff):
        group.add_command(command)


class ConfiguredGroup(click.Group):
    """A group whose `report` takes defaults from `[tool.ckpt-plan]`; command line and environment go over it."""

    def invoke(self, ctx: click.Context) -> Any:
        """Runs the command; the defaults are read first."""
        if not any(option in ctx.args for option in ctx.help_option_names):
            with _refused():
                ctx.default_map = {"report": find_config(Path.cwd()).report, **(ctx.default_map or {})}
        return super().invoke(ctx)


@contextlib.contextmanager
def _refused() -> Iterator[None]:
    """An error on purpose: its message, its exit code, no traceback."""
    try:
        yield
    except CkptPlannerError as error:
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(error.exit_code) from None


def _share(context: click.Context, parameter: click.Parameter, value: str | None) -> float | None:
    try:
        return None if value is None else parse_share(value if "%" in value else float(value))
    except ValueError:
        raise click.BadParameter(f'{value!r} is not a share such as "1%" or 0.01') from None


def _budget(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        parse_budget(value)
    except BudgetError as error:
        raise click.BadParameter(str(error)) from None
    return value


def _config_option(command: Callable[..., Any]) -> Callable[..., Any]:
    return click.option(
        "--config",
        "config_file",
        type=click.Path(exists=True, dir_okay=False, path_type=Path),
        help="The pyproject.toml to read; the nearest with [tool.ckpt-plan] by default.",
    )(command)


def _config(file: Path | None) -> Config:
    return read_config(file) if file is not None else find_config(Path.cwd())


@click.command()
@click.argument("target", metavar="FILE[:NAME]")
@click.option("--budget", envvar="CKPT_PLAN_BUDGET", callback=_budget, help="As for `report`.")
@click.option("--strategy", envvar="CKPT_PLAN_STRATEGY", type=click.Choice(STRATEGIES), help="As for `report`.")
@click.option("--optimizer", envvar="CKPT_PLAN_OPTIMIZER", metavar="CLASS", help="As for `report`.")
@device_option
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    help="The plan file. Default: the configured model's, or plans/ and the model file's name.",
)
@click.option("--force", is_flag=True, help="Overwrite files that exist.")
@click.option(
    "--profile",
    "profile_file",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Decide from this committed profile instead of measuring: needs neither the model nor torch.",
)
@_config_option
def lock(
    target: str,
    budget: str | None,
    strategy: str | None,
    optimizer: str | None,
    device: str | None,
    output: Path | None,
    force: bool,
    profile_file: Path | None,
    config_file: Path | None,
) -> None:
    """Plan the model in FILE and write what was decided to a plan file, to be committed.

    Beside the plan file lies the profile that it was decided from: plans/model.profile.json for plans/model.json.
    `ckpt-plan check` compares the model with both. Files that exist are not overwritten without --force.

    Exit code 0: written. 1: the budget cannot be kept. 2: wrong usage, a file exists, or FILE is at fault.
    """
    with _refused():
        from .lockio import profile_path, write_locked

        given = {"budget": budget, "strategy": strategy, "optimizer": optimizer, "device": device}
        plan, settings = _asked(target, {k: v for k, v in given.items() if v is not None}, output, _config(config_file))
        for file in (plan, profile_path(plan)):
            if file.exists() and not force and file != profile_file:
                raise click.UsageError(f"{file} exists already; ckpt-plan check says what moved, --force overwrites it")
        if profile_file is not None:
            locked, source = _from_profile(profile_file, settings, plan)
            force = force or profile_file.resolve() == profile_path(plan).resolve()
        else:
            with contextlib.redirect_stdout(sys.stderr):
                locked, source = _from_model(target, settings, plan)
        write_locked(plan, locked, source, replace=force)
    click.echo(f"Wrote {plan} and {profile_path(plan)}", err=True)


def _asked(target: str, given: dict[str, str], output: Path | None, config: Config) -> tuple[Path, Settings]:
    """The plan file and the settings: the command line over the configured model's over the configuration's."""
    from . import userfile
    from .lockfile import Settings

    path, name = userfile.split(target)
    values: dict[str, Any] = {"strategy": "budget", **config.general}
    plan = output or (config.plans / f"{path.stem}.json")
    for model in config.models:
        file, other = userfile.split(model.file)
        if (file.resolve(), other) == (path.resolve(), name) and output in (None, config.plan_of(model)):
            plan = output or config.plan_of(model)
            values.update({k: v for k in GENERAL if (v := getattr(model, k)) is not None})
            break
    values.update(given)
    relative = Path(os.path.relpath(path.resolve(), plan.parent.resolve())).as_posix()
    reference = relative if name == "model" else f"{relative}:{name}"
    return plan, Settings(reference, **{"budget": None, **values})


def _from_profile(file: Path, settings: Settings, plan: Path) -> tuple[Locked, LockedProfile]:
    from .lockio import profile_path, read_profile_file
    from .relock import budget_of, relock

    source = read_profile_file(file)
    budget = budget_of(settings.budget, source.profile)
    return relock(source, settings, budget, profile_name=profile_path(plan).name), source


def _from_model(target: str, settings: Settings, plan: Path) -> tuple[Locked, LockedProfile]:
    say = stage_reporter()
    say("importing torch")
    from .lock import lock as locked_by
    from .lock import subject_of

    try:
        with subject_of(target, settings.optimizer, settings.device) as subject:
            return locked_by(subject, settings, plan, say)
    finally:
        say("")


@click.command()
@click.argument("plans", metavar="[PLAN]...", nargs=-1, type=click.Path(path_type=Path))
@click.option("--update", is_flag=True, help="Accept what moved: rewrite the plan files, and write those that miss.")
@click.option("--update-new-only", "new", is_flag=True, help="Write the plan files that miss; check the others.")
@click.option("--peak-tolerance", callback=_share, help='How far the peak may grow, e.g. "1%". Default 1%.')
@click.option("--overhead-tolerance", callback=_share, help="How many points the overhead may grow. Default 2%.")
@click.option(
    "--allow",
    multiple=True,
    type=click.Choice(ALLOWED),
    help="Report this without failing. May be given several times.",
)
@click.option("--device", envvar="CKPT_PLAN_DEVICE", help="Trace there, e.g. cpu.")
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
@_config_option
def check(
    plans: tuple[Path, ...],
    update: bool,
    new: bool,
    peak_tolerance: float | None,
    overhead_tolerance: float | None,
    allow: tuple[str, ...],
    device: str | None,
    form: str,
    config_file: Path | None,
) -> None:
    """Trace models as they are now and say what moved since their plan files were written.

    Checks every model of [tool.ckpt-plan.models] in pyproject.toml, and that the folder of plans holds no others; or
    the PLAN files given.

    Exit code 0: nothing got worse. 1: the peak or the overhead grew past the tolerance, the budget does not hold, the
    chosen segments changed, or a plan file is missing or unused. 2: a file cannot be used.
    """
    with _refused(), contextlib.redirect_stdout(sys.stderr):
        config = _config(config_file)
        say = stage_reporter()
        say("importing torch")
        from . import ci

        found: list[Check] = []
        for job in ci.jobs(config, plans):
            tolerance = _tolerance(job.tolerance, peak_tolerance, overhead_tolerance, allow)
            job = ci.Job(job.plan, job.model, tolerance)
            found.append(ci.run(job, update=update, new=new, device=device, progress=say))
            say("")
        found += [] if plans else ci.stale(config)
    _show(found, form)
    code = ci.exit_code(found)
    if code:
        raise click.exceptions.Exit(code)


def _tolerance(own: Tolerance, peak: float | None, overhead: float | None, allow: Sequence[str]) -> Tolerance:
    return Tolerance(
        own.peak if peak is None else peak,
        own.overhead if overhead is None else overhead,
        (*own.allow, *allow),
    )


def _show(checks: Sequence[Check], form: str) -> None:
    from . import checkreport

    if form == "json":
        click.echo(checkreport.json(checks), nl=False)
    elif form == "markdown":
        click.echo(checkreport.markdown(checks), nl=False)
    else:
        if form == "github":
            click.echo("".join(f"{line}\n" for line in checkreport.github(checks)), nl=False)
            _append_summary(checkreport.markdown(checks))
        click.echo(checkreport.text(checks), nl=False)


def _append_summary(content: str) -> None:
    """GitHub's page of the run shows what is appended to this file."""
    file = os.environ.get("GITHUB_STEP_SUMMARY")
    if file:
        with Path(file).open("a", encoding="utf-8") as stream:
            stream.write(content)


@click.command()
@click.argument("old", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.argument("new", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--format", "form", type=click.Choice(FORMATS), default="text", show_default=True)
def diff(old: Path, new: Path, form: str) -> None:
    """Explain the difference of two plan files: which segments came, went or grew, and what it costs.

    Modules are compared, too, where each plan file has its profile beside it.

    Exit code 0, whatever differs. 2: a file is no plan file.
    """
    with _refused():
        from . import checkreport
        from .lockio import read_plan_file
        from .regress import moved

        a, b = read_plan_file(old), read_plan_file(new)
        before, after = _profile_beside(old, a), _profile_beside(new, b)
        found = moved(a, b, before, after)
    click.echo(checkreport.shown_difference(found, (str(old), str(new)), form), nl=False)
    if form == "github":
        _append_summary(checkreport.shown_difference(found, (str(old), str(new)), "markdown"))


def _profile_beside(plan: Path, locked: Locked) -> Any:
    """The profile that a plan file was decided from, if it is there."""
    from .lockio import read_locked

    if not (plan.parent / locked.profile).is_file():
        click.echo(f"Note: {plan} has no profile beside it, so modules are not compared.", err=True)
        return None
    return read_locked(plan)[1].profile
