"""Whatever is decided, the simulation agrees that the budget is kept, and no other strategy is cheaper within it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from profiles import layered, transformer

from ckpt_planner.problem import make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.schedule import Schedule
from ckpt_planner.simulate import simulate
from ckpt_planner.solve import Solution, SolveStatus, minimum, solve


def plain_peak(profile: Profile) -> int:
    return simulate(profile, Schedule(profile, ())).peak_bytes


def check(profile: Profile, budget: int, solution: Solution) -> None:
    schedule = Schedule(profile, solution.dropped, solution.inner)
    assert simulate(profile, schedule).peak_bytes == solution.peak_bytes <= budget
    assert schedule.recompute_seconds == solution.recompute_seconds
    assert 0 <= solution.lower_bound_seconds <= solution.recompute_seconds
    assert 0 <= solution.gap <= 1
    assert list(solution.dropped) == sorted(set(solution.dropped))


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), size=st.integers(3, 30), share=st.floats(0, 1))
def test_every_budget_from_the_minimum_on_is_kept(seed: int, size: int, share: float) -> None:
    profile = layered(seed, size)
    smallest = minimum(profile)
    budget = int(smallest.peak_bytes + share * (plain_peak(profile) - smallest.peak_bytes))
    check(profile, budget, solve(make_problem(profile, budget)))


@settings(max_examples=10, deadline=None, derandomize=True)
@given(seed=st.integers(0, 10_000), size=st.integers(3, 30))
def test_minimum_keeps_itself_and_nothing_keeps_less(seed: int, size: int) -> None:
    profile = layered(seed, size)
    smallest = minimum(profile)
    check(profile, smallest.peak_bytes, smallest)
    check(profile, smallest.peak_bytes, solve(make_problem(profile, smallest.peak_bytes)))
    below = solve(make_problem(profile, smallest.peak_bytes - 1))
    assert below.status is SolveStatus.INFEASIBLE
    assert (below.dropped, below.peak_bytes) == (smallest.dropped, smallest.peak_bytes)


@pytest.mark.parametrize("strategy", ["sqrt", "all"])
@pytest.mark.parametrize("profile", [transformer(4), layered(7, 40), layered(8, 40)], ids=["blocks", "graph", "other"])
def test_never_slower_than_the_strategies_by_hand_at_their_own_peak(strategy: str, profile: Profile) -> None:
    by_hand = solve(make_problem(profile, 0), strategy)
    planned = solve(make_problem(profile, by_hand.peak_bytes))
    assert planned.peak_bytes <= by_hand.peak_bytes
    assert planned.recompute_seconds <= by_hand.recompute_seconds


def test_a_strategy_by_hand_says_that_it_breaks_the_budget() -> None:
    profile = transformer(3)
    for strategy in ("none", "sqrt", "all"):
        solution = solve(make_problem(profile, profile.resident_bytes), strategy)
        assert solution.status is SolveStatus.INFEASIBLE
        assert solution.peak_bytes > profile.resident_bytes


@pytest.mark.parametrize("strategy", ["sqrt", "all"])
def test_a_strategy_by_hand_is_measured_by_the_best_plan_for_the_budget(strategy: str) -> None:
    profile = transformer(3)
    budget = solve(make_problem(profile, 0), strategy).peak_bytes
    by_hand, best = solve(make_problem(profile, budget), strategy), solve(make_problem(profile, budget))
    assert by_hand.status is SolveStatus.BY_RULE
    assert by_hand.lower_bound_seconds <= best.recompute_seconds
    assert by_hand.gap == pytest.approx(1 - by_hand.lower_bound_seconds / by_hand.recompute_seconds)


@pytest.mark.parametrize("strategy", ["budget", "none"])
def test_nothing_is_dropped_where_the_plain_step_fits(strategy: str) -> None:
    profile = transformer(2)
    solution = solve(make_problem(profile, plain_peak(profile)), strategy)
    assert solution == Solution((), SolveStatus.NOTHING_TO_DO, 0.0, plain_peak(profile))


def test_an_unknown_strategy_is_refused() -> None:
    with pytest.raises(ValueError, match="choose one of budget, sqrt, all, none"):
        solve(make_problem(transformer(1), 0), "fastest")
