"""`python -m benchmarks.peers`: ours at the measured peak of every other way to place checkpoints, run in turn.

For each model the peers give points (measured peak, step time): every block by hand, `checkpoint_sequential` with
sqrt(N) segments where the blocks are a Sequential, a selective list of what to save (matrix products and attention,
every second product recomputed), and torch's `activation_memory_budget` under `aot_eager`, which runs the kernels of
eager. Ours is planned with each point's peak as its budget. `--rotor` runs the two small models at the budgets at which
chain and graph planners were measured instead.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from benchmarks.family import Family
from benchmarks.peer_models import ROTOR, SUITE
from benchmarks.timing import interleaved, ratio
from ckpt_planner import InfeasibleBudgetError, optimize
from ckpt_planner.profiling.loss import loss_of
from ckpt_planner.profiling.meter import make_meter

MB = 1e6
Step = Callable[[], None]


def step_of(model: Callable[..., Any], family: Family) -> Step:
    """One training step of `model` on the family's call."""

    def run() -> None:
        family.model.zero_grad(set_to_none=True)
        loss, _ = loss_of(model(*family.args, **family.kwargs), family.loss_fn)
        loss.backward()

    return run


def peak_of(step: Step, family: Family) -> int:
    """Measured peak of a step: everything that is live, bytes."""
    step()  # lazy initialisation, compilation
    family.model.zero_grad(set_to_none=True)
    resident = {
        t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in family.model.state_dict().values()
    }
    given = [t for t in (*family.args, *family.kwargs.values()) if isinstance(t, torch.Tensor)]
    meter = make_meter(torch.device("cpu"))
    with meter:
        first = meter.mark()
        step()
        last = meter.mark()
    family.model.zero_grad(set_to_none=True)
    return meter.peak(first, last) + sum(resident.values()) + sum({id(t): t.nbytes for t in given}.values())


# -- the peers ------------------------------------------------------------------------------------------------------


def blocks_of(model: nn.Module) -> list[nn.Module]:
    """The repeated blocks that people wrap: children of lists and sequences that are not inside another block."""
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        for child in module.children():
            repeated = isinstance(module, nn.ModuleList) or (
                isinstance(module, nn.Sequential) and any(True for _ in child.children())
            )
            if repeated and not isinstance(child, (nn.ModuleList, nn.Sequential)):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


@contextmanager
def wrapped(blocks: list[nn.Module], context_fn: Callable[[], Any] | None = None) -> Iterator[None]:
    """Each block's forward inside `torch.utils.checkpoint`."""
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if context_fn is not None:
        how["context_fn"] = context_fn
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **how)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def selective() -> Any:
    """Save matrix products and attention, but recompute every second product."""
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}
    saved = products | {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
    counts = {True: 0, False: 0}

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if function in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sequences(model: nn.Module) -> list[nn.Sequential]:
    """Sequences of at least four blocks."""
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.Sequential) and len(m) >= 4 and all(any(True for _ in c.children()) for c in m)
    ]


@contextmanager
def in_sequence(found: list[nn.Sequential]) -> Iterator[None]:
    """Each sequence in sqrt(N) segments."""
    for sequence in found:
        segments = max(2, round(math.sqrt(len(sequence))))
        functions = list(sequence)
        sequence.forward = partial(checkpoint_sequential, functions, segments, use_reentrant=False)
    try:
        yield
    finally:
        for sequence in found:
            del sequence.forward


def compiled(family: Family, share: float) -> Step:
    """torch's knapsack over saved values, at a share of the saved bytes, with eager kernels."""
    import torch._dynamo
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    model = torch.compile(family.model, backend="aot_eager_decomp_partition")
    run = step_of(model, family)

    def step() -> None:
        with functorch.patch(activation_memory_budget=share):
            run()

    return step


def inside(run: Step, context: Callable[[], Any]) -> Step:
    def step() -> None:
        with context():
            run()

    return step


def peers(family: Family, shares: list[float]) -> Iterator[tuple[str, Step]]:
    """Each peer's name and its step."""
    run, blocks, found = step_of(family.model, family), blocks_of(family.model), sequences(family.model)
    if blocks:
        yield "by hand", inside(run, lambda: wrapped(blocks))
        yield "selective", inside(run, lambda: wrapped(blocks, selective))
    if found:
        yield "sequential", inside(run, lambda: in_sequence(found))
    for share in shares:
        yield f"compiler {share:g}", compiled(family, share)


# -- the comparison -------------------------------------------------------------------------------------------------


def compare(name: str, repeats: int, shares: list[float]) -> list[tuple[str, float]]:
    """Prints a row a point; returns each point's ratio of our time to the peer's."""
    torch.manual_seed(0)
    family = SUITE[name]()
    family.model.train()
    call = {"example_args": family.args, "example_kwargs": family.kwargs, "loss_fn": family.loss_fn}
    plain = step_of(family.model, family)
    plain_peak = peak_of(plain, family)
    ratios = []
    for peer, theirs in peers(family, shares):
        try:
            peak = peak_of(theirs, family)
        except Exception as error:  # a peer that cannot run this model is a result, not an end
            print(f"| {name} | {peer} | failed: {type(error).__name__} | | | | | | |", flush=True)
            continue
        begin = time.perf_counter()
        try:
            plan = optimize(family.model, budget=peak, **call)
        except InfeasibleBudgetError as error:
            print(
                f"| {name} | {peer} | {peak / MB:.1f} | refused: {error.minimum_bytes / MB:.1f} | | | | | |", flush=True
            )
            ratios.append((peer, math.inf))
            continue
        planning = time.perf_counter() - begin
        ours = step_of(plan.model, family)
        our_peak = peak_of(ours, family)
        seconds = interleaved({"ours": ours, "theirs": theirs, "plain": plain}, repeats)
        better = ratio(seconds, "ours", "theirs")
        ratios.append((peer, better))
        print(
            f"| {name} | {peer} | {peak / MB:.1f} of {plain_peak / MB:.1f} | {our_peak / MB:.1f} | "
            f"{ratio(seconds, 'theirs', 'plain') - 1:+.1%} | {ratio(seconds, 'ours', 'plain') - 1:+.1%} | "
            f"{better:.3f} | {plan.gap:.1%} | {planning:.1f} s |",
            flush=True,
        )
    return ratios


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
        resident, whole = base.profile.resident_bytes, base.baseline_peak_bytes
        for share, (chain, graph) in cells.items():
            budget = resident + int(share * (whole - resident))
            begin = time.perf_counter()
            plan = optimize(family.model, budget=budget, **call)
            planning = time.perf_counter() - begin
            ours = step_of(plan.model, family)
            peak = peak_of(ours, family)
            seconds = interleaved({"ours": ours, "plain": step_of(family.model, family)}, repeats)
            print(
                f"| {name} | {share:.0%}: {(budget - resident) / 2**20:.1f} MiB | "
                f"{(peak - resident) / 2**20:.1f} MiB | "
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
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    if options.rotor:
        rotor(options.repeats)
        return
    shares = [float(share) for share in options.shares.split(",") if share]
    print("| model | peer | its peak, MB | ours | its time | ours | ours / its | gap | planning |")
    print("|---|---|---|---|---|---|---|---|---|")
    ratios = [r for name in options.models.split(",") for r in compare(name, options.repeats, shares)]
    values = [r for _, r in ratios]
    if values:
        print(
            f"\n{len(values)} points: ours / its {statistics.median(values):.3f} at the median, at most 1.00 in "
            f"{sum(v <= 1 for v in values) / len(values):.0%}, highest {max(values):.3f}."
        )


if __name__ == "__main__":
    main()
