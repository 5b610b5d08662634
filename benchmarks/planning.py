"""`python -m benchmarks.planning`: what planning a 12-layer GPT-2 (d=768) takes, in seconds and in bytes."""

from __future__ import annotations

import time
from pathlib import Path

from ckpt_planner import optimize, userfile
from ckpt_planner.budget import format_bytes
from ckpt_planner.profiling.measure import measure_profile
from ckpt_planner.solve import make_problem, minimum, solve

EXAMPLE = Path(__file__).parent.parent / "examples" / "gpt2" / "model.py"


def main() -> None:
    subject = userfile.load(EXAMPLE)
    begin = time.perf_counter()
    profile = measure_profile(subject.model, subject.args, subject.kwargs)
    profiled = time.perf_counter() - begin
    smallest = minimum(profile).peak_bytes
    plain = solve(make_problem(profile, 1 << 50)).peak_bytes
    print(f"{len(profile.ops)} operations, {len(profile.steps)} backward steps; profiled in {profiled:.1f} s")
    for share in (0.9, 0.75, 0.6):
        budget = int(share * plain)
        begin = time.perf_counter()
        solution = solve(make_problem(profile, budget))
        print(
            f"budget {share:.0%}: solved in {time.perf_counter() - begin:.1f} s, recompute "
            f"{solution.recompute_seconds / profile.step_seconds:.1%} of a step, gap {solution.gap:.1%}"
        )
    print(
        f"peak while profiling {format_bytes(profile.profiling_peak_bytes)}; smallest budget {format_bytes(smallest)}"
    )
    begin = time.perf_counter()
    optimize(subject.model, "75%", subject.args, subject.kwargs)
    print(f"optimize, profile, solver and rehearsal included: {time.perf_counter() - begin:.1f} s")


if __name__ == "__main__":
    main()
