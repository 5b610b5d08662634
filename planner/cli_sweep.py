"""The subcommand `sweep`: what every budget costs, as a table or as JSON."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click
import msgspec

from .budget import format_bytes
from .errors import CkptPlannerError
from .options import device_option, mechanism_option, optimizer_option
from .report import Subject, subject
from .textreport import seconds, table, title

if TYPE_CHECKING:
    from .frontier import Frontier, FrontierPoint
    from .plan import Plan

POINTS = 16  # that of `frontier`, which is imported late: it loads the solvers
WIDTH = 100
ANY_BUDGET = str(1 << 60)  # only the profile is wanted, so the plain step has to fit


class Sweep(msgspec.Struct, frozen=True):
    """The frontier of a model as plain data, under the attribute names of `Plan` and `Frontier`."""

    profile: Subject
    baseline_peak_bytes: int
    baseline_step_seconds: float
    points: tuple[FrontierPoint, ...]
    knee: int


@click.command()
@click.argument("target", metavar="FILE[:NAME]")
@click.option(
    "--points", type=click.IntRange(2, 1000), default=POINTS, show_default=True, help="How many budgets are decided."
)
@optimizer_option
@mechanism_option
@device_option
@click.option("--format", "form", type=click.Choice(["text", "json"]), default="text", show_default=True)
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    default=Path("-"),
    help="Write the curve to this file; - is stdout, the default.",
)
def sweep(
    target: str, points: int, optimizer: str | None, mechanism: str, device: str | None, form: str, output: Path
) -> None:
    """Show what every budget costs: peak memory against recompute time, from the smallest peak to the plain step's.

    FILE is as for `report`. The step is measured once; peaks and times are predicted from it. The knee, where the curve
    bends most, is marked.

    Exit code 0: done. 2: wrong usage, or the file is at fault.
    """
    from . import cli  # which registers this command

    if not output.parent.is_dir():
        raise click.BadParameter(f"there is no folder {output.parent}", param_hint="'-o' / '--output'")
    try:
        # What the user's code prints is not the curve.
        with contextlib.redirect_stdout(sys.stderr):
            plan = cli._plan(target, ANY_BUDGET, "none", optimizer, device, mechanism)
            with cli._busy(f"deciding {points} budgets"):
                swept = describe(plan, plan.frontier(points))
    except CkptPlannerError as error:
        click.echo(f"Error: {error}", err=True)
        raise click.exceptions.Exit(error.exit_code) from None
    cli._put(json(swept) if form == "json" else text(swept) + "\n", output)


def describe(plan: Plan, frontier: Frontier) -> Sweep:
    """A frontier and the plain step that it is measured by."""
    return Sweep(
        subject(plan.profile), plan.baseline_peak_bytes, plan.baseline_step_seconds, frontier.points, frontier.knee
    )


def json(swept: Sweep) -> str:
    """The sweep as indented JSON, with a newline at its end."""
    return msgspec.json.format(msgspec.json.encode(swept), indent=2).decode() + "\n"


def text(swept: Sweep) -> str:
    """The sweep as a table, one line for each plan."""
    rows = [("peak memory", "", "of plain", "computed again", "overhead", "gap", "")]
    for k, p in enumerate(swept.points):
        rows.append(
            (
                format_bytes(p.peak_bytes),
                f"{p.peak_bytes:,} B",
                f"{p.peak_bytes / swept.baseline_peak_bytes:.1%}" if swept.baseline_peak_bytes else "",
                seconds(p.recompute_seconds),
                f"{p.overhead:+.1%}",
                f"{p.gap:.1%}",
                "<- knee" if k == swept.knee else "",
            )
        )
    plain = f"{format_bytes(swept.baseline_peak_bytes)} ({swept.baseline_peak_bytes:,} B)"
    lines = [
        title(swept.profile),
        f"Plain step: {plain}, {seconds(swept.baseline_step_seconds)}",
        *table(rows, WIDTH),
        "Each line is a plan; peaks and times are predicted. gap: the share of the time that may be avoidable.",
    ]
    return "\n".join(lines)
