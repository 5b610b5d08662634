"""The command `ckpt-plan`.

Data goes to stdout, everything else to stderr. Exit codes: 0 fine; 1 the answer is no (the budget cannot be kept, a
check failed); 2 the usage or the input is at fault. Torch is imported when a command needs it, so that `--help` and
wrong usage are quick.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from . import report as reports
from . import userfile
from .budget import parse_budget
from .errors import BudgetError, CkptPlannerError, VerificationError
from .progress import stage_reporter

if TYPE_CHECKING:
    from .plan import Plan

PIPED_WIDTH = 100  # columns of the text where stdout is no terminal


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="ckpt-planner", prog_name="ckpt-plan")
def main() -> None:
    """Plan activation checkpointing for PyTorch under a budget in bytes of peak memory."""


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
    type=click.Choice(["budget", "sqrt", "all", "none"]),
    default="budget",
    show_default=True,
    help="budget: the least recompute time that fits; sqrt: Chen et al. 2016, on bytes; all: every repeated block; "
    "none: the plain step.",
)
@click.option(
    "--optimizer",
    envvar="CKPT_PLAN_OPTIMIZER",
    metavar="CLASS",
    help="A class of torch.optim, e.g. AdamW, whose state and step count too; over the file's `optimizer`. "
    '"none": no optimizer.',
)
@click.option(
    "--mechanism",
    envvar="CKPT_PLAN_MECHANISM",
    type=click.Choice(["slice", "torch"]),
    default="slice",
    show_default=True,
    help="slice: follow forward, run again only what was dropped; torch: a captured graph with regions in "
    "torch.utils.checkpoint.",
)
@click.option("--device", envvar="CKPT_PLAN_DEVICE", help="Move the model and inputs there first, e.g. cuda.")
@click.option("--measure", is_flag=True, help="Run one real step and show the measured peak beside the predicted one.")
@click.option("--verify", is_flag=True, help="Compare loss, gradients, buffers and random state with the plain step.")
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
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
    except CkptPlannerError as error:
        # An error on purpose: its message, its exit code, no traceback.
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(error.exit_code) from None
    _write(reports.describe(plan, measurement, verified), form, output)
    for message in refused:
        click.echo(f"Error: {message}", err=True)
    if refused:
        raise click.exceptions.Exit(1)


def _plan(
    target: str, budget: str | None, strategy: str, optimizer: str | None, device: str | None, mechanism: str
) -> Plan:
    path, name = userfile.split(target)
    with _busy("importing torch"):
        import torch

        from . import optimize
    chosen = None if optimizer is None else _optimizer_class(optimizer)
    # Random weights and inputs then are the same at each run, and with them whatever depends on their values.
    torch.manual_seed(0)
    with _busy(f"importing {path}"):
        subject = userfile.load(path, name, device)
    if not subject.model.training:
        click.echo(f"Note: `{name}` was in eval mode; it is put in training mode, which the plan is for.", err=True)
        subject.model.train()
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
    """The class of torch.optim with that name; None for "none"."""
    from torch import optim

    if name.lower() == "none":
        return None
    found = getattr(optim, name, None)
    if isinstance(found, type) and issubclass(found, optim.Optimizer) and found is not optim.Optimizer:
        return found
    known = [n for n in dir(optim) if isinstance(c := getattr(optim, n), type) and issubclass(c, optim.Optimizer)]
    names = ", ".join(n for n in known if n != "Optimizer")
    raise click.BadParameter(f"{name!r} is no class of torch.optim. Known: {names}.", param_hint="'--optimizer'")


def _verify(plan: Plan) -> tuple[bool, str]:
    """Whether the planned step gives what the plain one does, and if not, what differs."""
    try:
        plan.verify()
    except VerificationError as error:
        return False, str(error)
    return True, ""


def _write(described: reports.Report, form: str, output: Path) -> None:
    to_stdout = str(output) == "-"
    if form == "json":
        content = reports.json(described)
    else:
        terminal = to_stdout and sys.stdout.isatty()
        width = shutil.get_terminal_size((PIPED_WIDTH, 24)).columns if terminal else PIPED_WIDTH
        content = reports.text(described, width, terminal and not os.environ.get("NO_COLOR")) + "\n"
    if to_stdout:
        click.echo(content, nl=False)
        return
    try:
        output.write_text(content, encoding="utf-8")
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


if __name__ == "__main__":
    main()
