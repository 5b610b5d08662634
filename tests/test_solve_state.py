"""A decision that is changed step by step costs and takes what the simulation says of it."""

from __future__ import annotations

import random

import pytest
from profiles import layered, transformer
from tangled import tangled

from ckpt_planner.problem import Problem, make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.solve.local import LocalSearch
from ckpt_planner.solve.state import State

PROFILES = [*(layered(seed, 6 + seed) for seed in range(40)), *(tangled(seed, 6 + seed % 20) for seed in range(80))]


def check(problem: Problem, state: State) -> None:
    judged = problem.judge(state.dropped)
    assert tuple(state.forward().tolist()) == judged.timeline.forward
    assert tuple(state.backward().tolist()) == judged.timeline.backward
    assert state.peak_bytes() == judged.peak_bytes
    assert state.seconds == pytest.approx(judged.seconds, abs=1e-9)
    assert {i for group in state.groups.values() for i in group.ops} == judged.again


def changed(state: State, problem: Problem, numbers: random.Random) -> object:
    if numbers.random() < 0.2:
        return state.move_to(numbers.sample(problem.candidates, numbers.randint(0, len(problem.candidates))))
    s = numbers.choice(problem.candidates)
    return state.change((), {s}) if s in state.dropped else state.change({s}, ())


@pytest.mark.parametrize("profile", [*PROFILES, transformer(2)])
def test_any_change_gives_what_the_simulation_says(profile: Profile) -> None:
    problem, numbers = make_problem(profile, 0), random.Random(1)
    if not problem.candidates:
        return
    state = State(problem)
    check(problem, state)
    for _ in range(12):
        changed(state, problem, numbers)
        check(problem, state)


@pytest.mark.parametrize("profile", PROFILES[::4])
def test_changes_are_taken_back_in_reverse_order(profile: Profile) -> None:
    problem, numbers = make_problem(profile, 0), random.Random(2)
    state = State(problem, problem.candidates)
    before = set(state.dropped), state.forward().tolist(), state.backward().tolist()
    done = [changed(state, problem, numbers) for _ in range(8)]
    for undo in reversed(done):
        state.undo(undo)  # type: ignore[arg-type]
    assert (set(state.dropped), state.forward().tolist(), state.backward().tolist()) == before
    check(problem, state)


@pytest.mark.parametrize("profile", [layered(5, 60), transformer(2)], ids=["graph", "blocks"])
def test_repair_and_improvement_keep_the_budget_and_lower_the_price(profile: Profile) -> None:
    problem = make_problem(profile, 0)
    plain, everything = problem.judge(()), problem.judge(problem.candidates)
    problem = problem.with_budget((plain.peak_bytes + min(plain.peak_bytes, everything.peak_bytes)) // 2)
    search = LocalSearch(problem, 200_000, lambda: False)
    state = State(problem)
    if not search.repair(state, [], 1 << 30):
        state.move_to(problem.candidates)
    assert problem.judge(state.dropped).peak_bytes <= problem.budget_bytes
    before = state.seconds
    assert search.run(state)
    judged = problem.judge(state.dropped)
    assert judged.peak_bytes <= problem.budget_bytes
    assert 0 < judged.seconds <= before * (1 + 1e-9)
