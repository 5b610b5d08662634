"""`python -m benchmarks.compare`: "budget" against "sqrt" and "all" at their own peaks, and against plain and by hand.

For each example model: the peak that "sqrt" and "all" reach is given to "budget" as its budget, and the two are run in
turn. Then a plan without segments against the plain model, and `torch.utils.checkpoint` around every block (as
transformers does it) against "all", which recomputes the same blocks.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.timing import interleaved, ratio
from ckpt_planner import optimize, userfile
from ckpt_planner.budget import format_bytes

EXAMPLES = Path(__file__).parent.parent / "examples"


def step(model: torch.nn.Module, args: Any, kwargs: Any, loss_fn: Any) -> Callable[[], None]:
    def run() -> None:
        model.zero_grad(set_to_none=True)
        out = model(*args, **kwargs)
        loss = loss_fn(out) if loss_fn is not None else out if isinstance(out, torch.Tensor) else out.loss
        loss.backward()

    return run


def by_hand(model: torch.nn.Module) -> bool:
    """Switch on the model's own checkpointing of every block; False if it has none."""
    if not getattr(model, "supports_gradient_checkpointing", False):
        return False
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return True


def compare(name: str, repeats: int) -> list[str]:
    subject = userfile.load(EXAMPLES / name / "model.py")
    model, args, kwargs, loss_fn = subject.model, subject.args, subject.kwargs, subject.loss_fn
    how = {"example_args": args, "example_kwargs": kwargs, "loss_fn": loss_fn}
    rows = []
    for strategy in ("sqrt", "all"):
        theirs = optimize(model, budget=1 << 50, strategy=strategy, **how)
        peak = theirs.measure().peak_bytes
        ours = optimize(model, budget=peak, **how)
        # The same profile for both, so that the model's cost is compared like with like.
        share = ours.recompute_seconds / ours.baseline_step_seconds
        seconds = interleaved(
            {
                "ours": step(ours.model, args, kwargs, loss_fn),
                "theirs": step(theirs.model, args, kwargs, loss_fn),
                "plain": step(model, args, kwargs, loss_fn),
            },
            repeats,
        )
        rows.append(
            f"| {name} | {strategy} | {format_bytes(peak)} | {format_bytes(ours.measure().peak_bytes)} | "
            f"{theirs.overhead:+.1%} | {share:+.1%} | {ratio(seconds, 'theirs', 'plain') - 1:+.1%} | "
            f"{ratio(seconds, 'ours', 'plain') - 1:+.1%} | {ratio(seconds, 'ours', 'theirs'):.3f} |"
        )
    return rows


def overheads(name: str, repeats: int) -> str:
    subject = userfile.load(EXAMPLES / name / "model.py")
    model, args, kwargs, loss_fn = subject.model, subject.args, subject.kwargs, subject.loss_fn
    how = {"example_args": args, "example_kwargs": kwargs, "loss_fn": loss_fn}
    nothing = optimize(model, budget=1 << 50, **how)
    every = optimize(model, budget=1 << 50, strategy="all", **how)
    seconds = interleaved(
        {"plain": step(model, args, kwargs, loss_fn), "empty": step(nothing.model, args, kwargs, loss_fn)}, repeats
    )
    empty = ratio(seconds, "empty", "plain")
    hand = "—"
    other = userfile.load(EXAMPLES / name / "model.py").model
    if by_hand(other):
        seconds = interleaved(
            {"all": step(every.model, args, kwargs, loss_fn), "hand": step(other, args, kwargs, loss_fn)}, repeats
        )
        hand = f"{ratio(seconds, 'all', 'hand'):.3f}"
    return f"| {name} | {empty:.3f} | {hand} | {statistics.median(seconds[next(iter(seconds))]):.2f} s |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", default="gpt2,bert,vit,resnet,unet")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=0)
    parser.add_argument("--parts", default="strategies,overheads")
    options = parser.parse_args()
    if options.threads:
        torch.set_num_threads(options.threads)
    names = options.examples.split(",")
    if "strategies" in options.parts:
        print("| model | against | its peak | ours at it | its cost | ours | its time | ours | ours / its |")
        print("|---|---|---|---|---|---|---|---|---|")
        for name in names:
            for row in compare(name, options.repeats):
                print(row, flush=True)
    if "overheads" in options.parts:
        print("\n| model | no segments / plain | ours at every block / by hand | step |\n|---|---|---|---|")
        for name in names:
            print(overheads(name, options.repeats), flush=True)


if __name__ == "__main__":
    main()
