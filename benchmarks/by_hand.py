"""`python -m benchmarks.by_hand`: the time that recomputation takes, ours against every block wrapped by hand.

For each transformer: ours where half of what forward leaves for backward is gone from the plain step's peak; where half
of all is gone that the peak has above parameters, buffers and inputs, gradients among it; and at the peak that wrapping
every block reaches. What counts is the time above the plain step's, of which the last column of each pair gives ours as
a share of by-hand's. Interleaved steps, medians over the rounds.
"""

from __future__ import annotations

import argparse
import statistics
from functools import partial

import torch

from benchmarks.family import Family
from benchmarks.peer_models import BLOCKS, SUITE, bert_large_full, gpt2
from benchmarks.peer_ways import blocks_of, inside, peak_of, step_of, wrapped
from benchmarks.timing import interleaved
from ckpt_planner import InfeasibleBudgetError, optimize
from ckpt_planner.profiling.loss import loss_of
from ckpt_planner.profiling.meter import make_meter

MB = 1e6
MODELS = {**{name: SUITE[name] for name in ("gpt2", "bert_large", "vit", "swin", "t5", "mixtral")}}
MODELS["bert_large_full"] = bert_large_full
MODELS["gpt2_batch_8"] = partial(gpt2, 8)  # of a batch of 2, parameters and gradients are most of the peak
HEAD = (
    "| model | plain, MB | by hand, MB | its time | budget | peak, MB | ours | ours / its time above plain | gap |\n"
    "|---|---|---|---|---|---|---|---|---|"
)


def left_by_forward(family: Family) -> int:
    """Bytes of the plain step's activations: what is live when its forward has ended and was not before."""
    with make_meter(torch.device("cpu")) as meter:
        begin = meter.mark()
        loss, _ = loss_of(family.model(*family.args, **family.kwargs), family.loss_fn)
        end = meter.mark()
        del loss
    return meter.live(end) - meter.live(begin)


def rows(name: str, repeats: int, half: bool) -> None:
    """Prints a row for each budget."""
    torch.manual_seed(0)
    family = MODELS[name]()
    family.model.train()
    call = {"example_args": family.args, "example_kwargs": family.kwargs, "loss_fn": family.loss_fn}
    blocks = blocks_of(family.model, BLOCKS[name])
    plain = step_of(family.model, family)
    hand = inside(plain, lambda: wrapped(blocks))
    plain_peak, hand_peak = peak_of(plain, family), peak_of(hand, family)
    given = sum(p.untyped_storage().nbytes() for p in {*family.model.parameters(), *family.model.buffers()})
    budgets = {
        "half of the activations": plain_peak - left_by_forward(family) // 2,
        "half of them and of gradients": given + (plain_peak - given) // 2,
        "by hand's": hand_peak,
    }
    for what, budget in list(budgets.items())[0 if half else 2 :]:
        start = f"| {name} | {plain_peak / MB:.0f} | {hand_peak / MB:.0f} |"
        try:
            plan = optimize(family.model, budget=budget, **call)
        except InfeasibleBudgetError as error:
            print(f"{start} | {what}: {budget / MB:.0f} | refused: {error.minimum_bytes / MB:.0f} | | | |", flush=True)
            continue
        ours = step_of(plan.model, family)
        peak = peak_of(ours, family)
        seconds = interleaved({"ours": ours, "hand": hand, "plain": plain}, repeats)
        above = {
            way: statistics.median(a - b for a, b in zip(seconds[way], seconds["plain"], strict=True))
            for way in ("ours", "hand")
        }
        step = statistics.median(seconds["plain"])
        print(
            f"{start} {above['hand'] / step:+.1%} | {what}: {budget / MB:.0f} | {peak / MB:.0f} | "
            f"{above['ours'] / step:+.1%} | {above['ours'] / above['hand']:.0%} | {plan.gap:.1%} |",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--models", default=",".join(MODELS))
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--only-its-peak", action="store_true", help="leave out half of the activations")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    print(HEAD)
    for name in options.models.split(","):
        rows(name, options.repeats, not options.only_its_peak)


if __name__ == "__main__":
    main()
