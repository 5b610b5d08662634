"""`python -m benchmarks.overhead`: what a recomputed block costs beyond its kernels, against `torch.utils.checkpoint`.

Transformer blocks on tiny tensors, where kernels take next to no time: each block recomputed as a whole, and with the
results of matrix products and attention kept inside, by us (mechanisms "slice" and "graph") and by non-reentrant
checkpoints without and with a selective policy. Microseconds of CPU a block above the plain step: of each way, what a
fifth of its interleaved steps stay below, since a shared machine disturbs some of any number of steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from benchmarks.timing import interleaved
from ckpt_planner import Plan, optimize
from ckpt_planner.frontier import FrontierPoint
from ckpt_planner.problem import make_problem
from ckpt_planner.replay import forward_program
from ckpt_planner.solve import rate

BLOCKS, WIDTH, TOKENS = 8, 16, 4
PRODUCTS = ("linear", "scaled_dot_product_attention", "matmul")


class Block(nn.Module):
    """A transformer block of about twenty operations."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(self.first(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in (q, k, v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Blocks(nn.Module):
    """Blocks one after another, each called through `around`."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.around: Callable[..., Any] | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if self.around is None else self.around(block, x)
        return x.sum()


def selective() -> Any:
    aten = torch.ops.aten
    kept = {
        aten.mm.default, aten.addmm.default, aten.bmm.default, aten._scaled_dot_product_flash_attention_for_cpu.default,
    }  # fmt: skip

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if function in kept else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def keeping_products(plan: Plan) -> Plan:
    """The same plan, but for what matrix products and attention make, which is kept."""
    problem = make_problem(plan.profile, plan.budget_bytes)
    products = [op for op in plan.profile.ops if op.name.rsplit(".", 1)[-1] in PRODUCTS]
    made = {s for op in products for s in (*op.makes, *op.hides)}
    wish = [s for s in plan.decision.solution.dropped if s not in made]
    judged = problem.judge(wish)
    solution = rate(problem, judged, by_rule=True)
    point = FrontierPoint(1 << 50, judged.peak_bytes, judged.seconds, 0.0, 0.0, 0.0, solution, plan.mechanism)
    return plan.at(point)


def blindly(plan: Plan, x: torch.Tensor) -> Plan:
    """The same plan, carried out without looking at arguments: what that look costs is the difference."""
    solution = plan.decision.solution
    blind = plan.at(FrontierPoint(1 << 50, solution.peak_bytes, solution.recompute_seconds, 0.0, 0.0, 0.0, solution))
    with mock.patch.object(forward_program._Looker, "lines", lambda self, name, part: []):
        for _ in range(3):  # calls are learnt in the first step
            blind.model(x).backward()
    return blind


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=400)
    options = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model, x = Blocks(), torch.randn(1, TOKENS, WIDTH, requires_grad=True)
    whole = optimize(model, budget=1 << 50, strategy="all", example_args=(x,))
    kept = keeping_products(whole)
    graph = optimize(model, budget=1 << 50, strategy="all", example_args=(x,), mechanism="graph")
    kept_by_graph = keeping_products(graph)
    blind = blindly(whole, x)
    rerun = [sum(s.nodes for s in plan.segments) for plan in (whole, kept)]
    assert 0 < rerun[1] < rerun[0], f"operations that run again: {rerun}"  # or both rows would measure the same
    how = partial(checkpoint, use_reentrant=False)

    def step(run: Callable[..., torch.Tensor], around: Callable[..., Any] | None = None) -> Callable[[], None]:
        def one() -> None:
            model.around = around
            model.zero_grad(set_to_none=True)
            run(x).backward()

        return one

    ways = {
        "plain": step(model),
        "checkpoint": step(model, how),
        "checkpoint, products kept": step(model, partial(how, context_fn=selective)),
        "ours": step(whole.model),
        "ours, products kept": step(kept.model),
        "graph": step(graph.model),
        "graph, products kept": step(kept_by_graph.model),
        "ours, blindly": step(blind.model),
    }
    seconds = {n: _low(times) for n, times in interleaved(ways, options.repeats, time.process_time).items()}
    above = {name: (each - seconds["plain"]) / BLOCKS * 1e6 for name, each in seconds.items()}
    again = len(whole.profile.ops) // BLOCKS
    print(f"{BLOCKS} blocks of {again} operations on {TOKENS} x {WIDTH} numbers, 1 thread; µs a block above plain\n")
    print("| kept inside | torch.utils.checkpoint | slice | slice / its | graph | graph / its |")
    print("|---|---|---|---|---|---|")
    for label, suffix in (("nothing", ""), ("products and attention", ", products kept")):
        theirs, ours, ran = (above[f"{way}{suffix}"] for way in ("checkpoint", "ours", "graph"))
        print(f"| {label} | {theirs:.0f} | {ours:.0f} | {ours / theirs:.0%} | {ran:.0f} | {ran / theirs:.0%} |")
    looking = (above["ours"] - above["ours, blindly"]) / (rerun[0] / BLOCKS)
    print(f"of slice, looking whether a call is the same again: {looking:.1f} µs for each that runs again")
    print(f"operations that run again: {rerun[0]} and {rerun[1]} of {len(whole.profile.ops)}")


def _low(times: list[float]) -> float:
    return sorted(times)[len(times) // 5]


if __name__ == "__main__":
    main()
