"""`python -m benchmarks.peers`: ours at the measured peak of every other way to place checkpoints, run in turn.

For each model the peers give points (measured peak, step time): every block by hand, `checkpoint_sequential` with
sqrt(N) segments where the blocks are a Sequential, a selective list of what to save (matrix products and attention,
every second product recomputed), and torch's `activation_memory_budget` under `aot_eager`, which runs the kernels of
eager. Ours is planned with each point's peak as its budget, to be carried out by mechanism "slice", which is the
default, and by "graph", which runs a captured graph as the compiler does. `--rotor` runs the two small models at the
budgets at which chain and graph planners were measured instead.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch

from benchmarks.peer_models import BLOCKS, ROTOR, SUITE
from benchmarks.peer_ways import peak_of, peers, step_of
from benchmarks.timing import interleaved, ratio
from ckpt_planner import InfeasibleBudgetError, UnsupportedModelError, optimize

MB = 1e6


class Point(NamedTuple):
    """A peer's point, and ours at the same peak. Bytes, and medians of seconds and of ratios over the rounds.

    `ours_to_its` is infinite where we refused the peak as a budget; `our_peak` is then the smallest budget we named.
    `graph_overhead` and `graph_to_its` are of mechanism "graph", None where no graph repeats what the model does.
    """

    model: str
    peer: str
    plain_peak: int
    its_peak: int
    our_peak: int
    its_overhead: float
    our_overhead: float
    ours_to_its: float
    gap: float
    planning_seconds: float
    graph_overhead: float | None = None
    graph_to_its: float | None = None

    def row(self) -> str:
        if math.isinf(self.ours_to_its):
            ours, rest = f"refused: {self.our_peak / MB:.1f}", " | | | | | |"
        else:
            ours = f"{self.our_peak / MB:.1f}"
            graph = f"{self.graph_overhead:+.1%} | {self.graph_to_its:.3f}" if self.graph_to_its is not None else "|"
            rest = (
                f" {self.our_overhead:+.1%} | {self.ours_to_its:.3f} | {graph} | {self.gap:.1%} | "
                f"{self.planning_seconds:.1f} s |"
            )
        peaks = f"{self.its_peak / MB:.1f} of {self.plain_peak / MB:.1f} | {ours}"
        return f"| {self.model} | {self.peer} | {peaks} | {self.its_overhead:+.1%} |{rest}"


HEAD = (
    "| model | peer | its peak, MB | ours | its time | ours | ours / its | graph | graph / its | gap | planning |\n"
    "|---|---|---|---|---|---|---|---|---|---|---|"
)


def compare(name: str, repeats: int, shares: list[float]) -> Iterator[Point]:
    """Every peer's point for a model, with ours beside it."""
    torch.manual_seed(0)
    family = SUITE[name]()
    family.model.train()
    call = {"example_args": family.args, "example_kwargs": family.kwargs, "loss_fn": family.loss_fn}
    plain = step_of(family.model, family)
    plain_peak = peak_of(plain, family)
    for peer, theirs in peers(family, BLOCKS[name], shares):
        try:
            peak = peak_of(theirs, family)
        except Exception as error:  # a peer that cannot run this model is a result, not an end
            print(f"| {name} | {peer} | failed: {type(error).__name__} | | | | | | |", flush=True)
            continue
        if peak >= plain_peak:
            print(f"| {name} | {peer} | {peak / MB:.1f}: not below plain | | | | | | |", flush=True)
            continue
        begin = time.perf_counter()
        try:
            plan = optimize(family.model, budget=peak, **call)
        except InfeasibleBudgetError as error:
            seconds = interleaved({"theirs": theirs, "plain": plain}, repeats)
            its = ratio(seconds, "theirs", "plain") - 1
            yield Point(name, peer, plain_peak, peak, error.minimum_bytes, its, math.inf, math.inf, 0.0, 0.0)
            continue
        planning = time.perf_counter() - begin
        ours = step_of(plan.model, family)
        our_peak = peak_of(ours, family)
        ways = {"ours": ours, "theirs": theirs, "plain": plain}
        try:
            on_graph = optimize(family.model, budget=peak, mechanism="graph", **call)
            ways["graph"] = step_of(on_graph.model, family)
            our_peak = max(our_peak, peak_of(ways["graph"], family))
        except UnsupportedModelError:
            pass
        seconds = interleaved(ways, repeats)
        yield Point(
            name,
            peer,
            plain_peak,
            peak,
            our_peak,
            ratio(seconds, "theirs", "plain") - 1,
            ratio(seconds, "ours", "plain") - 1,
            ratio(seconds, "ours", "theirs"),
            plan.gap,
            planning,
            ratio(seconds, "graph", "plain") - 1 if "graph" in seconds else None,
            ratio(seconds, "graph", "theirs") if "graph" in seconds else None,
        )


def summary(points: list[Point]) -> str:
    """How the ratios are spread, for each mechanism."""
    found = []
    for name, values in (
        ("ours", [p.ours_to_its for p in points]),
        ("graph", [p.graph_to_its for p in points if p.graph_to_its is not None]),
    ):
        if values:
            found.append(
                f"{len(values)} points: {name} / its {statistics.median(values):.3f} at the median, at most 1.00 in "
                f"{sum(v <= 1 for v in values) / len(values):.0%}, highest {max(values):.3f}."
            )
    return "\n".join(found)


def rotor(repeats: int) -> None:
    """The two small models at the budgets at which rotor and Rockmate were measured."""
    print(
        "| model | budget | measured peak | ours | rotor | Rockmate | gap | planning |\n"
        "|---|---|---|---|---|---|---|---|"
    )
    for name, (make, cells) in ROTOR.items():
        torch.manual_seed(0)
        family = make()
        family.model.train()
        call = {"example_args": family.args, "example_kwargs": family.kwargs, "loss_fn": family.loss_fn}
        base = optimize(family.model, budget=1 << 50, **call)
        # Theirs ran with the gradients there from the start; ours come and go, and count towards the peak.
        given = base.profile.resident_bytes + base.profile.gradient_bytes
        for room, (chain, graph) in cells.items():
            budget = given + int(room * 2**20)
            begin = time.perf_counter()
            plan = optimize(family.model, budget=budget, **call)
            planning = time.perf_counter() - begin
            ours = step_of(plan.model, family)
            peak = peak_of(ours, family)
            seconds = interleaved({"ours": ours, "plain": step_of(family.model, family)}, repeats)
            print(
                f"| {name} | {room:.1f} MiB | {(peak - given) / 2**20:.1f} MiB | "
                f"{ratio(seconds, 'ours', 'plain') - 1:+.1%} | {chain:+.0%} | {graph:+.0%} | {plan.gap:.1%} | "
                f"{planning:.1f} s |",
                flush=True,
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(SUITE))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--shares", default="0.8,0.5,0.3,0.1", help="of saved bytes, for the compiler's knapsack")
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--rotor", action="store_true", help="the two small models only")
    parser.add_argument("--points", help="a file to which each point is added, for benchmarks.frontier --peers")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.rotor:
        rotor(options.repeats)
        return
    shares = [float(share) for share in options.shares.split(",") if share]
    print(HEAD)
    points = []
    for name in options.models.split(","):
        for point in compare(name, options.repeats, shares):
            points.append(point)
            print(point.row(), flush=True)
            if options.points:
                with Path(options.points).open("a") as file:
                    file.write(json.dumps(point._asdict()) + "\n")
    print(f"\n{summary(points)}")


if __name__ == "__main__":
    main()
