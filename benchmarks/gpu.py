"""`python -m benchmarks.gpu`: budgets kept on a CUDA GPU, with allocated and reserved peaks and CUDA-event times.

Without a GPU it runs the same steps on the CPU and says what it did not measure.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from benchmarks.compare import step
from ckpt_planner import InfeasibleBudgetError, VerificationError, optimize, userfile
from ckpt_planner.budget import format_bytes

EXAMPLES = Path(__file__).parent.parent / "examples"
LIMIT_SECONDS = 7 * 60  # the whole run stays under eight minutes


def timed(run: Callable[[], None], cuda: bool, repeats: int = 5) -> float:
    """Median seconds of a step, by CUDA events on a GPU."""
    run()
    seconds = []
    for _ in range(repeats):
        if cuda:
            first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            first.record()
            run()
            last.record()
            torch.cuda.synchronize()
            seconds.append(first.elapsed_time(last) / 1e3)
        else:
            begin = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def peaks(run: Callable[[], None], cuda: bool) -> tuple[str, str]:
    """Allocated and reserved peak of one step; unknown on a CPU."""
    if not cuda:
        return "not measured", "not measured"
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    run()
    torch.cuda.synchronize()
    return format_bytes(torch.cuda.max_memory_allocated()), format_bytes(torch.cuda.max_memory_reserved())


def rows(name: str, device: str) -> list[str]:
    """One row a budget for an example."""
    cuda = device == "cuda"
    subject = userfile.load(EXAMPLES / name / "model.py", device=device)
    model, args, kwargs, loss_fn = subject.model, subject.args, subject.kwargs, subject.loss_fn
    args, kwargs = pytree.tree_map(lambda v: v.to(device) if isinstance(v, torch.Tensor) else v, (args, kwargs))
    how: dict[str, Any] = {"example_args": args, "example_kwargs": kwargs, "loss_fn": loss_fn}
    plain = optimize(model, budget=1 << 50, **how)
    above = plain.baseline_peak_bytes - plain.profile.resident_bytes
    found = []
    plain_seconds = timed(step(model, args, kwargs, loss_fn), cuda)
    for share in (0.7, 0.45):
        budget = plain.profile.resident_bytes + int(share * above)
        try:
            plan = optimize(model, budget=budget, **how)
            note = ""
        except InfeasibleBudgetError as error:
            plan = optimize(model, budget=error.minimum_bytes, **how)
            note = " (its smallest)"
        measured = plan.measure()
        try:
            plan.verify()
            verified = "yes"
        except VerificationError as error:
            verified = f"NO: {error}"
        model.zero_grad(set_to_none=True)
        run = step(plan.model, args, kwargs, loss_fn)
        seconds = timed(run, cuda)
        allocated, reserved = peaks(run, cuda)
        kept = "yes" if measured.peak_bytes <= plan.budget_bytes else "NO"
        found.append(
            f"| {name} | {share:.0%}{note} | {format_bytes(plan.budget_bytes)} | {format_bytes(plan.peak_bytes)} | "
            f"{format_bytes(measured.peak_bytes)} | {kept} | {allocated} | {reserved} | {plan.overhead:+.1%} | "
            f"{seconds / plain_seconds - 1:+.1%} | {verified} |"
        )
    model.zero_grad(set_to_none=True)
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--examples", default="gpt2,bert,vit,resnet,unet")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    begin = time.monotonic()
    where = torch.cuda.get_device_name() if device == "cuda" else "cpu"
    print(f"torch {torch.__version__}, {where}")
    if device == "cpu":
        print("No GPU: allocated and reserved peaks and CUDA-event times are not measured.")
    print("| model | share | budget | predicted | measured | kept | allocated | reserved | cost | time | same values |")
    print("|---|---|---|---|---|---|---|---|---|---|---|")
    for name in options.examples.split(","):
        if time.monotonic() - begin > LIMIT_SECONDS:
            print(f"| {name} | left out: the time limit was reached | | | | | | | | | |")
            continue
        for row in rows(name, device):
            print(row, flush=True)


if __name__ == "__main__":
    main()
