"""The command `ckpt-plan`.

Data goes to stdout, everything else to stderr. Exit codes: 0 fine; 1 the answer is no (the budget cannot be kept, a
check failed); 2 the usage or the input is at fault. Torch is imported when a command needs it, so that `--help` and
wrong usage are quick.
"""

from __future__ import annotations

import contextlib
import io
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import cli_ci, terminal, userfile
from . import report as reports
from .budget import parse_budget
from .cli_sweep import sweep
from .config import STRATEGIES
from .errors import BudgetError, CkptPlannerError, InfeasibleBudgetError, VerificationError
from .options import device_option, find_optimizer, mechanism_option, optimizer_option
from .progress import stage_reporter

if TYPE_CHECKING:
    from .plan import Plan


@click.group(cls=cli_ci.ConfiguredGroup, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckpt-planner", prog_name="ckpt-plan")
def main() -> None:
    """Plan activation checkpointing for PyTorch under a budget in bytes of peak memory."""


cli_ci.register(main)


def _checked_budget(context: click.Context, parameter: click.Parameter, value: str | None) -> str | None:
    try:
        parse_budget(value)
    except BudgetError as error:
        raise click.BadParameter(str(error)) from None
    return value


@main.command()
@click.argument("target", metavar="FILE[:NAME]")
@click.option(
    "--budget",
    envvar="CKPT_PLAN_BUDGET",
    callback=_checked_budget,
    help='Peak of the whole step: "8GB" (10^9), "8GiB" (2^30), bytes, or "60%" of the plain step\'s peak. '
    "Default: the device's free memory less a reserve.",
)
@click.option(
    "--strategy",
    envvar="CKPT_PLAN_STRATEGY",
    type=click.Choice(STRATEGIES),
    default="budget",
    show_default=True,
    help="budget: the least recompute time that fits; sqrt: Chen et al. 2016, on bytes; all: every repeated block; "
    "none: the plain step.",
)
@optimizer_option
@mechanism_option
@device_option
@click.option("--measure", is_flag=True, help="Run one real step and show the measured peak beside the predicted one.")
@click.option("--verify", is_flag=True, help="Compare loss, gradients, buffers and random state with the plain step.")
@click.option(
    "--frontier/--no-frontier",
    default=None,
    help="Show what other budgets would cost, too; in JSON and HTML. Default: in HTML.",
)
@click.option("--format", "form", type=click.Choice(["text", "json", "html"]), default="text", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    default=Path("-"),
    help="Write the report to this file; - is stdout, the default.",
)
def report(
    target: str,
    budget: str | None,
    strategy: str,
    optimizer: str | None,
    mechanism: str,
    device: str | None,
    measure: bool,
    verify: bool,
    frontier: bool | None,
    form: str,
    output: Path,
) -> None:
    """Plan the model in FILE and show what was decided and what it costs.

    FILE is a Python file that holds `model` and `example_inputs`, as values or as functions without arguments, and
    optionally `loss_fn` and `optimizer`. NAME is what the model is called there, if not `model`.

    Exit code 0: planned, and every check asked for passed. 1: the budget cannot be kept, or a check failed. 2: wrong
    usage, or the file is at fault.
    """
    if not output.parent.is_dir():
        raise click.BadParameter(f"there is no folder {output.parent}", param_hint="'-o' / '--output'")
    if form == "html" and str(output) == "-" and sys.stdout.isatty():
        raise click.BadParameter("a page is not for a terminal; name a file", param_hint="'-o' / '--output'")
    refused: list[str] = []
    try:
        # What the user's code prints is not the report.
        with contextlib.redirect_stdout(sys.stderr):
            plan = _plan(target, budget, strategy, optimizer, device, mechanism)
            measurement = verified = None
            if measure:
                with _busy("measuring one step"):
                    measurement = plan.measure()
                kept = plan.budget_bytes is None or measurement.peak_bytes <= plan.budget_bytes
                if strategy == "budget" and not kept:
                    refused.append("The measured peak is above the budget.")
            if verify:
                with _busy("comparing with the plain step"):
                    verified, difference = _verify(plan)
                refused += [difference] if difference else []
            curve = None
            if form == "html" if frontier is None else frontier:
                with _busy("deciding other budgets"):
                    curve = plan.frontier()
    except CkptPlannerError as error:
        # An error on purpose: its message, its exit code, no traceback.
        terminal.say_error(str(error), _hint(error, output))
        raise click.exceptions.Exit(error.exit_code) from None
    _write(reports.describe(plan, measurement, verified, curve), form, output)
    for message in refused:
        terminal.say_error(message)
    if refused:
        raise click.exceptions.Exit(1)


def _plan(
    target: str, budget: str | None, strategy: str, optimizer: str | None, device: str | None, mechanism: str
) -> Plan:
    path, name = userfile.split(target)
    with _busy("importing torch"):
        from . import optimize
        from .seeding import seed_all
    chosen = None if optimizer is None else _optimizer_class(optimizer)
    # Random weights and inputs then are the same at each run, and with them whatever depends on their values.
    seed_all()
    with _busy(f"importing {path}"):
        subject = userfile.load(path, name, device)
    if not subject.model.training:
        click.echo(f"Note: `{name}` was in eval mode; it is put in training mode, which the plan is for.", err=True)
        subject.model.train()
    seed_all()  # again: a model that draws its path takes the same one, whatever was drawn when it was made
    return optimize(  # which says itself what it is doing
        subject.model,
        budget=budget,
        example_args=subject.args,
        example_kwargs=subject.kwargs,
        loss_fn=subject.loss_fn,
        optimizer=subject.optimizer if optimizer is None else chosen,
        strategy=strategy,
        mechanism=mechanism,
    )


def _optimizer_class(name: str) -> Any:
    try:
        return find_optimizer(name)
    except LookupError as error:
        message = f"{name!r} is no class of torch.optim. Known: {error}."
        raise click.BadParameter(message, param_hint="'--optimizer'") from None


def _verify(plan: Plan) -> tuple[bool, str]:
    """Whether the planned step gives what the plain one does, and if not, what differs."""
    try:
        plan.verify()
    except VerificationError as error:
        return False, str(error)
    return True, ""


def _hint(error: CkptPlannerError, output: Path) -> str:
    """What to try after an error, and that an older report is not this one's."""
    lines = []
    if isinstance(error, InfeasibleBudgetError):
        lines.append(f"Can be kept: --strategy budget --budget {error.minimum_bytes}")
    if str(output) != "-" and output.exists():
        lines.append(f"{output} is from an earlier run; it was not written.")
    return "\n  ".join(lines)


def _write(described: reports.Report, form: str, output: Path) -> None:
    if form == "json":
        content = reports.json(described)
    elif form == "html":
        content = reports.html(described)
    else:
        shown_on = sys.stdout if str(output) == "-" else io.StringIO()
        content = reports.text(described, *terminal.look(shown_on)) + "\n"
    # A page says that it is UTF-8, whatever stdout's encoding is.
    _put(content.encode() if form == "html" else content, output)


def _put(content: str | bytes, output: Path) -> None:
    """Writes to the file, and says so on stderr; or to stdout, if it is "-"."""
    if str(output) == "-":
        click.echo(content, nl=False)
        return
    try:
        output.write_bytes(content.encode() if isinstance(content, str) else content)
    except OSError as error:
        raise click.FileError(str(output), error.strerror or str(error)) from None
    click.echo(f"Wrote {output}", err=True)


@contextlib.contextmanager
def _busy(doing: str) -> Iterator[None]:
    """Shows what is being done, on a terminal only."""
    say = stage_reporter()
    say(doing)
    try:
        yield
    finally:
        say("")


main.add_command(sweep)

if __name__ == "__main__":
    main()
