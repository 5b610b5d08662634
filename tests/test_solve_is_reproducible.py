"""The same profile and budget give the same plan everywhere, and deciding does not load torch."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from profiles import transformer

from ckpt_planner.problem import make_problem
from ckpt_planner.solve import segments_by_bytes, solve

SOLVE = """
import sys
from ckpt_planner.problem import make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.solve import minimum, solve
profile = Profile.load(sys.argv[1])
least = minimum(profile)
for share in (0.9, 0.5, 0.0):
    budget = int(least.peak_bytes + share * (make_problem(profile, 0).judge(()).peak_bytes - least.peak_bytes))
    print(solve(make_problem(profile, budget)))
print(least)
assert "torch" not in sys.modules, "deciding has loaded torch"
"""


def test_the_same_plan_whatever_the_order_of_sets_and_the_number_of_threads_and_without_torch(tmp_path: Path) -> None:
    transformer(2).save(tmp_path / "profile.json")
    answers = {
        subprocess.run(
            [sys.executable, "-c", SOLVE, str(tmp_path / "profile.json")],
            env={**os.environ, "PYTHONHASHSEED": seed, "OMP_NUM_THREADS": threads, "OPENBLAS_NUM_THREADS": threads},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for seed, threads in (("0", "1"), ("1", "2"), ("2", "8"))
    }
    assert len(answers) == 1


def test_the_same_plan_whatever_was_solved_before() -> None:
    profile = transformer(3)
    problem = make_problem(profile, 0)
    budget = (problem.judge(()).peak_bytes * 2) // 3
    first = solve(problem.with_budget(budget))
    solve(problem.with_budget(budget + 10_000_000))
    assert solve(problem.with_budget(budget)) == first == solve(make_problem(profile, budget))


def test_segments_need_no_backward_pass() -> None:
    full = transformer(6)
    slots = tuple(
        type(slot)(slot.op, slot.position, slot.storage, slot.producer, -1, slot.fixed) for slot in full.slots
    )
    forward_only = type(full)(**{**{f: getattr(full, f) for f in full.__struct_fields__}, "slots": slots, "steps": ()})
    dropped = segments_by_bytes(forward_only)
    assert dropped == segments_by_bytes(full)
    assert len(dropped) > 60
    assert len(segments_by_bytes(forward_only, 2)) > len(segments_by_bytes(forward_only, 12)) > 0
