"""`python -m benchmarks.budget`: budgets against measured peaks, for every model family.

For each family and share, the budget is what is resident (parameters, buffers, inputs) and that share of what the plain
step takes above it. The step is planned, measured and compared bit for bit with the plain one. Where no plan keeps the
budget, the row is for the smallest budget that the error named, which is planned again. With --write the table
replaces its section of RESULTS.md.
"""

from __future__ import annotations

import argparse
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.compare import step
from benchmarks.families import FAMILIES, Family, build
from benchmarks.timing import interleaved, ratio
from ckpt_planner import InfeasibleBudgetError, Plan, VerificationError, optimize
from ckpt_planner.profiling.forward import resident
from ckpt_planner.profiling.rehearse import rehearse

RESULTS = Path(__file__).parent / "RESULTS.md"
TITLE = "## Budgets kept"
SHARES = (0.7, 0.45)


class Row(NamedTuple):
    """What one family did at one budget; bytes and seconds."""

    family: str
    share: float
    plain: int
    budget: int
    refused: bool
    predicted: int
    measured: int
    cost: float
    time: float
    identical: str
    planning: float

    HEAD = (
        "| family | share | plain peak | budget | predicted | measured | error | overhead predicted "
        "| overhead measured | identical | planning |\n|---|---|---|---|---|---|---|---|---|---|---|"
    )

    @property
    def kept(self) -> bool:
        """Whether the peak is within the budget and within 2 % of what was predicted, and the values are the same."""
        return self.measured <= self.budget and abs(self.error) <= 0.02 and self.identical == "yes"

    @property
    def error(self) -> float:
        return self.predicted / self.measured - 1

    def __str__(self) -> str:
        share = f"{self.share:.0%}" + (", refused" if self.refused else "")
        sizes = " | ".join(f"{b / 1e6:.3f}" for b in (self.plain, self.budget, self.predicted, self.measured))
        return (
            f"| {self.family} | {share} | {sizes} | {self.error:+.3%} | {self.cost:+.1%} | {self.time:+.1%} | "
            f"{self.identical} | {self.planning:.1f} s |"
        )


def plan_for(made: Family, budget: int) -> Plan:
    return optimize(made.model, budget, made.args, made.kwargs, made.loss_fn)


def clock() -> tuple[Callable[[], float], str]:
    """What steps are timed by, and its name: with one thread, CPU time is free of what else runs."""
    if torch.get_num_threads() == 1:
        return time.process_time, "the process's CPU time"
    return time.perf_counter, "the clock"


def run(name: str, share: float, small: bool, repeats: int) -> Row:
    """Plan a family at a share of its memory, and look at what that did."""
    made = build(name, small)
    plain = rehearse(made.model, made.args, made.kwargs, made.loss_fn, None).peak_bytes
    device = next(made.model.parameters()).device
    base = sum(resident(made.model, made.args, made.kwargs, device).values())
    budget = int(base + share * (plain - base))
    begin, refused = time.perf_counter(), False
    try:
        plan = plan_for(made, budget)
    except InfeasibleBudgetError as error:
        refused, budget, begin = True, error.minimum_bytes, time.perf_counter()
        plan = plan_for(made, budget)
    planning = time.perf_counter() - begin
    measured = plan.measure().peak_bytes
    identical = "yes"
    try:
        plan.verify()
    except VerificationError as error:
        identical = str(error)
    seconds = interleaved(
        {
            "planned": step(plan.model, made.args, made.kwargs, made.loss_fn),
            "plain": step(made.model, made.args, made.kwargs, made.loss_fn),
        },
        repeats,
        clock()[0],
    )
    made.model.zero_grad(set_to_none=True)
    spent = ratio(seconds, "planned", "plain") - 1
    return Row(
        name, share, plain, budget, refused, plan.peak_bytes, measured, plan.overhead, spent, identical, planning
    )


def section(rows: list[Row], command: str) -> str:
    """The table, with how it was made."""
    kept = sum(row.kept for row in rows)
    refused = sum(row.refused for row in rows)
    lines = [
        TITLE,
        "",
        f"    {command}",
        "",
        f"{platform.machine()}, {os.cpu_count()} cores, {torch.get_num_threads()} thread(s), Python "
        f"{platform.python_version()}, torch {torch.__version__}. Bytes in MB (10^6). The budget is "
        "the resident bytes and the given share of what the plain step takes above them; where that "
        "is marked refused, the planner found no plan that keeps it, and the row is for the smallest "
        "budget that the error named. Overheads are shares of the plain step's time: predicted by "
        f"the plan, and measured as the median over interleaved steps, by {clock()[1]}.",
        "",
        f"{len({row.family for row in rows})} families, {len(rows)} cases: in {kept} the measured "
        "peak is within the budget and within 2 % of the predicted one, and loss, gradients, buffers "
        f"and generators are bit-identical; {refused} budgets were refused, and their named minimum "
        "planned instead.",
        "",
        Row.HEAD,
        *map(str, rows),
        "",
    ]
    return "\n".join(lines)


def write(text: str) -> None:
    """Put a section into RESULTS.md, in place of the one with its title."""
    title = text.splitlines()[0]
    old = RESULTS.read_text() if RESULTS.exists() else "# Results\n"
    before, found, rest = old.partition(title + "\n")
    after = "" if not found or "\n## " not in rest else "## " + rest.partition("\n## ")[2]
    RESULTS.write_text(before.rstrip() + "\n\n" + text.rstrip() + "\n" + ("\n" + after if after else ""))
    print(f"Wrote {RESULTS}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--families", default=",".join(FAMILIES), help="names with commas between")
    parser.add_argument("--small", action="store_true", help="the tests' versions of the models")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved steps for the measured overhead")
    parser.add_argument("--threads", type=int, default=0, help="torch's threads; 0 leaves them")
    parser.add_argument("--write", action="store_true", help="write the table into RESULTS.md")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="transformers")
    if options.threads:
        torch.set_num_threads(options.threads)
    rows: list[Row] = []
    print(Row.HEAD, flush=True)
    for name in options.families.split(","):
        for share in SHARES:
            rows.append(run(name, share, options.small, options.repeats))
            print(rows[-1], flush=True)
    if options.write:
        write(section(rows, " ".join(["python -m benchmarks.budget", *sys.argv[1:]])))
    return 0 if all(row.kept for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
