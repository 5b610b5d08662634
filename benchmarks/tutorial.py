"""`python -m benchmarks.tutorial`: what the plans of docs/tutorial.md save and cost, next to checkpoints by hand.

The models, their sizes and their budgets are those of the tutorial's own code. For each case the plain step, the
planned one and one with `torch.utils.checkpoint` around every layer (transformers' own switch) are run in turn.
Activation memory is a peak less parameters, buffers, inputs and optimizer state, which are there in any case. With
--write the table replaces the one in the tutorial.
"""

from __future__ import annotations

import argparse
import platform
import re
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.budget import clock
from benchmarks.compare import by_hand
from benchmarks.timing import interleaved, ratio
from ckpt_planner import Monitor, optimize
from ckpt_planner.profiling.rehearse import rehearse

TUTORIAL = Path(__file__).parent.parent / "docs" / "tutorial.md"
BEGIN, END = "<!-- figures:", "<!-- end of figures -->"
RULE_SAVED, RULE_TIME = 0.6, 0.25  # the rule of thumb: over 60 % less activation memory for about 25 % more time
CASES = ("bert", "bert-bf16", "bert-twice", "vit", "vit-bf16", "vit-twice")


def blocks(text: str) -> list[str]:
    """The code blocks of a page, in order."""
    return re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


def with_sizes(code: str, sizes: dict[str, object]) -> str:
    """The tutorial's first block with other values for its names."""
    for name, value in sizes.items():
        code, found = re.subn(rf"^{name} = .*$", f"{name} = {value!r}", code, flags=re.MULTILINE)
        if found != 1:
            raise ValueError(f"the tutorial's first block sets {name} {found} times")
    return code


class Row(NamedTuple):
    """One case: bytes, and shares of the plain step."""

    case: str
    budget: int
    plain: int
    predicted: int
    measured: int
    hand: int
    resident: int
    predicted_time: float
    time: float
    hand_time: float
    monitored_time: float
    planning: float
    own_budget: bool  # the budget was chosen for this case, and not for another one that it shares it with

    HEAD = (
        "| case | budget | plain peak | planned, predicted | planned, measured | activations saved, predicted "
        "| measured | more time, predicted | measured | by hand: activations saved | more time |\n"
        "|---|---|---|---|---|---|---|---|---|---|---|"
    )

    def saved(self, peak: int) -> float:
        """Share of the plain step's activation memory that a step with this peak does without."""
        return (self.plain - peak) / (self.plain - self.resident)

    @property
    def beats(self) -> bool:
        """Whether the rule of thumb is beaten: more saved, for less time, within the budget."""
        return self.measured <= self.budget and self.saved(self.measured) > RULE_SAVED and self.time < RULE_TIME

    def __str__(self) -> str:
        sizes = " | ".join(f"{b / 1e6:.1f} MB" for b in (self.budget, self.plain, self.predicted, self.measured))
        return (
            f"| {self.case} | {sizes} | {self.saved(self.predicted):.1%} | {self.saved(self.measured):.1%} | "
            f"{self.predicted_time:+.1%} | {self.time:+.1%} | {self.saved(self.hand):.1%} | {self.hand_time:+.1%} |"
        )


def step(model: torch.nn.Module, inputs: dict[str, Any], autocast: bool, around: Any = None) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = model(**inputs).loss
        loss.backward()

    def watched() -> None:
        with around.step():
            run()

    return run if around is None else watched


def run(case: str, tutorial: dict[str, Any], repeats: int) -> Row:
    """Plan and measure one case of the tutorial."""
    name, _, kind = case.partition("-")
    make, batch = (tutorial["bert"], tutorial["BATCH"]) if name == "bert" else (tutorial["vit"], tutorial["IMAGES"])
    batch, autocast = batch * (1 + (kind == "twice")), kind == "bf16"
    model, inputs = make(batch)
    hand, _ = make(batch)
    assert by_hand(hand)
    adam = torch.optim.AdamW
    begin = time.perf_counter()
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        plan = optimize(model, tutorial[f"{name.upper()}_BUDGET"], example_kwargs=inputs, optimizer=adam)
        planning = time.perf_counter() - begin
        measured = plan.measure()
        checkpointed = rehearse(hand, (), inputs, None, None, optimizer=adam).peak_bytes
    assert measured.baseline_peak_bytes is not None
    monitor = Monitor(plan, every=1)
    ways = {
        "plain": step(model, inputs, autocast),
        "planned": step(plan.model, inputs, autocast),
        "hand": step(hand, inputs, autocast),
        "monitored": step(plan.model, inputs, autocast, monitor),
    }
    seconds = interleaved(ways, repeats, clock()[0])
    monitor.close()
    return Row(
        case=f"{name}, {batch} {'sequences' if name == 'bert' else 'images'}{', bf16' * autocast}",
        budget=plan.budget_bytes,
        plain=measured.baseline_peak_bytes,
        predicted=plan.peak_bytes,
        measured=measured.peak_bytes,
        hand=checkpointed,
        resident=plan.profile.resident_bytes,
        predicted_time=plan.overhead,
        time=ratio(seconds, "planned", "plain") - 1,
        hand_time=ratio(seconds, "hand", "plain") - 1,
        monitored_time=ratio(seconds, "monitored", "planned") - 1,
        planning=planning,
        own_budget=not kind,
    )


def section(rows: list[Row], tutorial: dict[str, Any], command: str) -> str:
    """The table, with how it was made."""
    judged = [row for row in rows if row.own_budget]
    beaten, planning = sum(row.beats for row in judged), sorted(row.planning for row in rows)
    watched = statistics.median(row.monitored_time for row in rows)
    return "\n".join(
        [
            f"{BEGIN} {command} -->",
            f"`{command}`: {platform.machine()}, {torch.get_num_threads()} thread(s), Python "
            f"{platform.python_version()}, torch {torch.__version__}; {tutorial['LAYERS']} layers, width "
            f"{tutorial['WIDTH']}. Peaks include AdamW's state and step; times are medians over interleaved steps "
            f"(forward and backward), by {clock()[1]}. By hand is `checkpoint` around every layer.",
            "",
            Row.HEAD,
            f"| rule of thumb | | | | | | over {RULE_SAVED:.0%} | | about {RULE_TIME:+.0%} | | |",
            *map(str, rows),
            "",
            f"{beaten} of {len(judged)} models beat the rule under the budget chosen for them: more saved for less "
            "time, and the budget kept. The other cases are under the same budget, which leaves half precision more "
            f"room and twice the batch less. Planning took {planning[0]:.0f} to {planning[-1]:.0f} s. A step whose "
            f"peak a monitor measures on the CPU took {watched:+.0%} (median of the cases).",
            END,
        ]
    )


def write(text: str) -> None:
    """Put the table between the tutorial's markers."""
    before, begin, rest = TUTORIAL.read_text().partition(BEGIN)
    _, end, after = rest.partition(END)
    assert begin
    assert end
    TUTORIAL.write_text(before + text + after)
    print(f"Wrote {TUTORIAL}", file=sys.stderr)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", default=",".join(CASES), help="names with commas between")
    parser.add_argument("--repeats", type=int, default=5, help="interleaved steps of each way")
    parser.add_argument("--threads", type=int, default=1, help="torch's threads")
    parser.add_argument("--set", action="append", default=[], metavar="NAME=INT", help="another size, as for a trial")
    parser.add_argument("--write", action="store_true", help="write the table into the tutorial")
    options = parser.parse_args()
    warnings.filterwarnings("ignore", module="transformers")
    tutorial: dict[str, Any] = {}
    sizes = {name: int(value) if value.isdigit() else value for name, value in (s.split("=") for s in options.set)}
    exec(with_sizes(blocks(TUTORIAL.read_text())[0], sizes), tutorial)
    torch.set_num_threads(options.threads)
    rows: list[Row] = []
    print(Row.HEAD, flush=True)
    for case in options.cases.split(","):
        rows.append(run(case, tutorial, options.repeats))
        print(rows[-1], flush=True)
    text = section(rows, tutorial, " ".join(["python -m benchmarks.tutorial", *sys.argv[1:]]))
    print(text.splitlines()[-2])
    if options.write:
        write(text)
    return 0 if all(row.beats or (not row.own_budget and row.measured <= row.budget) for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
