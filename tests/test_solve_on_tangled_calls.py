"""Bounds and proofs hold for calls that look into one tensor while they read another, write late, and save in vain."""

from __future__ import annotations

from itertools import pairwise

import msgspec
import pytest
from decisions import assert_bound_is_below, cheapest_of_budgets, every_decision
from profiles import MB, Builder
from tangled import tangled

from ckpt_planner.problem import Problem, make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.schedule import Schedule
from ckpt_planner.solve import exact, minimum, solve
from ckpt_planner.solve.bound import used_until

SHARES = (0.0, 0.35, 0.7)


def drawn(seed: int) -> Problem | None:
    problem = make_problem(tangled(seed, 4 + seed % 7), 0)
    return problem if 1 <= len(problem.candidates) <= 6 else None


# In the first of these a bound, a floor or a smallest budget was once wrong.
SEEDS = [140, 365, 1309, 2081, 2925, 301567, 302873, 400179, *(seed for seed in range(90) if drawn(seed))]


def late_write() -> Profile:
    """y = h + 0.1; h += k; f = (h + 0.5).exp(); e = y.sin(): where y is dropped, the write runs again for y's sake."""
    b = Builder()
    x = b.external(MB, "input")
    k = b.op("k", "", [x], 40 * MB, 50e-3)
    h = b.op("h", "", [x], 10 * MB, 1e-3)
    y = b.op("y", "", [h], 10 * MB, 1e-3)
    h = b.op("add_", "", [h, k], 0, 1e-3, in_place=True)
    f = b.op("f", "", [b.op("g", "", [h], 10 * MB, 1e-3)], 10 * MB, 1e-3, saves_output=True)
    e = b.op("e", "", [y], 10 * MB, 1e-3, saves=[y])
    loss = b.op("loss", "", [e, f], 4, 1e-4, inside=False)
    b.hold(loss, len(b.ops) + 1)
    profile = b.build(op_seconds=1e-4, group_seconds=5e-4)
    steps = [msgspec.structs.replace(step, live_bytes=2 * MB, peak_bytes=2 * MB) for step in profile.steps]
    for at, peak in ((0, 150), (1, 62), (2, 170)):
        steps[at] = msgspec.structs.replace(steps[at], peak_bytes=peak * MB)
    return msgspec.structs.replace(profile, steps=tuple(steps))


@pytest.mark.parametrize("seed", SEEDS)
def test_bound_proof_and_smallest_budget_are_those_of_every_decision(seed: int) -> None:
    problem = drawn(seed)
    assert problem is not None
    assert_equal_to_every_decision(problem)


def test_a_write_that_runs_again_for_an_earlier_reader_keeps_what_it_reads_no_longer_than_that() -> None:
    problem = make_problem(late_write(), 0)
    assert_equal_to_every_decision(problem)
    peaks = sorted({j.peak_bytes for j in every_decision(problem)})
    for budget in {*peaks, *(b - 1 for _, b in pairwise(peaks))}:
        cheapest = min(j.seconds for j in every_decision(problem) if j.peak_bytes <= budget)
        assert_bound_is_below(problem, budget, cheapest)


def assert_equal_to_every_decision(problem: Problem) -> None:
    decisions = every_decision(problem)
    assert minimum(problem.profile).peak_bytes == min(j.peak_bytes for j in decisions)
    for budget, cheapest in cheapest_of_budgets(problem, SHARES):
        assert_bound_is_below(problem, budget, cheapest)
        found = solve(make_problem(problem.profile, budget))
        assert found.peak_bytes <= budget
        assert found.recompute_seconds == pytest.approx(cheapest)
        assert found.lower_bound_seconds <= cheapest * (1 + 1e-12)


@pytest.mark.parametrize("profile", [late_write(), *(tangled(seed, 12) for seed in range(40))])
def test_what_runs_again_is_needed_until_its_group_ends(profile: Profile) -> None:
    problem = make_problem(profile, 0)
    until = used_until(problem)
    for s in problem.candidates:
        for dropped in {problem.repaired([s]), problem.repaired(problem.candidates)}:
            for group in Schedule(profile, dropped).groups:
                assert all(until[i] <= group.end for i in group.ops if group.trigger >= 0)


@pytest.mark.parametrize("seed", SEEDS)
def test_inner_boundaries_cost_and_hold_no_less_than_the_floors_say(seed: int) -> None:
    problem = drawn(seed)
    assert problem is not None
    floors, plain = exact.floors_of(problem), {d.dropped: d for d in exact.every_decision(problem)}
    for judged in every_decision(problem):
        assert judged.peak_bytes >= floors.peak_bytes(judged.dropped)
        without = plain[judged.dropped]
        least = min(without.seconds, floors.seconds(judged.dropped, without.groups))
        assert judged.seconds >= least * (1 - 1e-12)
