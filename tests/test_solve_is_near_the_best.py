"""On profiles small enough to try every decision, plans are the cheapest or close, and the bound is below them all."""

from __future__ import annotations

import random

import msgspec
import pytest
from decisions import assert_bound_is_below, cheapest_of_budgets, every_decision
from profiles import layered, transformer

from ckpt_planner.problem import Problem, make_problem
from ckpt_planner.schedule import Schedule
from ckpt_planner.simulate import simulate
from ckpt_planner.solve import SolveStatus, exact, minimum, solve
from ckpt_planner.solve.bound import lower_bound_seconds
from ckpt_planner.solve.budget import Search

SHARES = (0.0, 0.2, 0.4, 0.6, 0.8)


def small(seed: int) -> Problem | None:
    problem = make_problem(layered(seed, 4 + seed % 7), 0)
    return problem if 2 <= len(problem.candidates) <= 7 else None


SMALL = [seed for seed in range(90) if small(seed)][:40]


@pytest.mark.parametrize("seed", SMALL)
def test_bound_is_below_every_decision(seed: int) -> None:
    problem = small(seed)
    assert problem is not None
    group_seconds = (0.0, 1e-4, 3e-2)[seed % 3]
    problem = make_problem(msgspec.structs.replace(problem.profile, replay_group_seconds=group_seconds), 0)
    for budget, cheapest in cheapest_of_budgets(problem, SHARES):
        assert_bound_is_below(problem, budget, cheapest)


def odd(seed: int) -> Problem | None:
    """Where running again costs by the call, even for a mere look, and some slots are never read."""
    lot, profile = random.Random(seed), layered(seed, 4 + seed % 8)
    slots = [msgspec.structs.replace(s, step=-1) if lot.random() < 0.3 else s for s in profile.slots]
    costs = {"replay_op_seconds": lot.choice([1e-3, 1e-2]), "replay_group_seconds": lot.choice([0.0, 1e-4, 1e-2])}
    problem = make_problem(msgspec.structs.replace(profile, slots=tuple(slots), **costs), 0)
    return problem if 2 <= len(problem.candidates) <= 7 else None


ODD = [seed for seed in range(200) if odd(seed)][:60]


@pytest.mark.parametrize("seed", ODD)
def test_bound_and_proof_hold_where_slots_are_never_read_and_looks_cost_much(seed: int) -> None:
    problem = odd(seed)
    assert problem is not None
    for budget, cheapest in cheapest_of_budgets(problem, SHARES):
        assert_bound_is_below(problem, budget, cheapest)
        found = solve(make_problem(problem.profile, budget))
        assert found.lower_bound_seconds <= cheapest * (1 + 1e-12)
        assert found.recompute_seconds == pytest.approx(cheapest)


def test_bound_counts_groups_where_they_cost_much() -> None:
    free, dear = (transformer(4) for _ in range(2))
    free, dear = (msgspec.structs.replace(p, replay_group_seconds=g) for p, g in ((free, 0.0), (dear, 1e-3)))
    plain = make_problem(free, 0).judge(()).peak_bytes
    budget = free.resident_bytes + int(0.6 * (plain - free.resident_bytes))
    bounds = [lower_bound_seconds(make_problem(p, budget)) for p in (free, dear)]
    assert bounds[0] is not None and bounds[1] is not None
    assert bounds[1] > bounds[0] + 1e-3


def test_bound_says_when_no_decision_can_keep_the_budget() -> None:
    problem = make_problem(transformer(2), 0)
    assert lower_bound_seconds(problem.with_budget(problem.profile.resident_bytes)) is None


def test_small_problems_are_solved_exactly_and_proven() -> None:
    asked = 0
    for seed in SMALL:
        problem = small(seed)
        assert problem is not None
        decisions = every_decision(problem)
        least, most = min(j.peak_bytes for j in decisions), problem.judge(()).peak_bytes
        assert minimum(problem.profile).peak_bytes == least
        for share in SHARES:
            budget = int(least + share * (most - least))
            cheapest = min(j.seconds for j in decisions if j.peak_bytes <= budget)
            found = solve(make_problem(problem.profile, budget))
            assert found.recompute_seconds == pytest.approx(cheapest)
            assert found.gap < 1e-9
            assert found.status in (SolveStatus.OPTIMAL, SolveStatus.NOTHING_TO_DO) or not cheapest
            asked += 1
    assert asked > 100


def test_the_search_for_large_problems_is_nearly_always_the_best_on_small_ones() -> None:
    asked = missed = 0
    for seed in SMALL:
        problem = small(seed)
        assert problem is not None
        least, most = exact.smallest(problem).peak_bytes, problem.judge(()).peak_bytes
        for share in SHARES[1:]:
            asked_for = problem.with_budget(int(least + share * (most - least)))
            best = exact.cheapest(asked_for)
            assert best is not None
            if not best.seconds:
                continue
            search = Search(asked_for, lambda: False)
            search.add(problem.judge(exact.smallest(problem).dropped))
            search.run()
            found = search.result()
            assert found is not None
            asked += 1
            missed += found.seconds > best.seconds * (1 + 1e-9)
            assert found.seconds <= 2 * best.seconds
    assert asked > 80
    assert missed <= 0.05 * asked


def test_what_is_judged_is_what_the_simulation_says() -> None:
    profile = transformer(2)
    problem = make_problem(profile, 0)
    judged = problem.judge(problem.candidates)
    schedule = Schedule(profile, judged.dropped, judged.inner)
    assert judged.timeline == simulate(profile, schedule)
    assert judged.seconds == schedule.recompute_seconds
