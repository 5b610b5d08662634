"""A decision with inner boundaries that is changed step by step costs and takes what the simulation says of it."""

from __future__ import annotations

import random

import pytest
from profiles import layered, transformer
from tangled import tangled

from ckpt_planner.problem import Problem, make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.solve.nestedstate import NestedState

PROFILES = [*(layered(seed, 6 + seed) for seed in range(40)), *(tangled(seed, 6 + seed % 20) for seed in range(80))]


def check(problem: Problem, state: NestedState) -> None:
    moments = state.moments()
    try:
        judged = problem.judge(state.dropped, state.inner)
    except ValueError:
        assert moments is None
        return
    assert moments is not None
    assert judged.inner == tuple(sorted(state.inner))
    assert tuple(moments.forward.tolist()) == judged.timeline.forward
    assert tuple(moments.backward.tolist()) == judged.timeline.backward
    assert moments.peak_bytes == judged.peak_bytes
    assert moments.seconds == pytest.approx(judged.seconds, abs=1e-9)
    assert moments.excess(0) == sum(judged.timeline.forward) + sum(judged.timeline.backward) + moments.optimizer


def changed(state: NestedState, problem: Problem, lot: random.Random) -> None:
    dropped, inner, candidates = set(state.dropped), set(state.inner), problem.candidates
    many = lot.random() < 0.2
    for s in lot.sample(candidates, lot.randint(1, len(candidates)) if many else 1):
        (dropped.add if lot.random() < 0.7 else dropped.discard)(s)
        (inner.add if lot.random() < 0.4 else inner.discard)(s)
    before = set(state.dropped), set(state.inner)
    if not state.move_to(dropped, inner):
        assert (state.dropped, state.inner) == before
        with pytest.raises(ValueError, match=r"boundar|overwritten|which is kept"):
            problem.judge(dropped, inner)


@pytest.mark.parametrize("profile", [*PROFILES, transformer(2)])
def test_any_change_gives_what_the_simulation_says(profile: Profile) -> None:
    problem, lot = make_problem(profile, 0), random.Random(1)
    if not problem.candidates:
        return
    state = NestedState(problem)
    check(problem, state)
    for _ in range(25):
        changed(state, problem, lot)
        check(problem, state)
    state.move_to((), ())
    check(problem, state)
