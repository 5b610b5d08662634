"""A search that is interrupted or runs out of time gives its best plan so far, and says that nothing is proven."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from profiles import transformer

from ckpt_planner.problem import Problem, make_problem
from ckpt_planner.schedule import Schedule
from ckpt_planner.simulate import simulate
from ckpt_planner.solve import Solution, SolveStatus, solve
from ckpt_planner.solve.budget import Search
from ckpt_planner.solve.compose import Composer
from ckpt_planner.solve.state import State


def problem(share: float = 0.6) -> Problem:
    made = make_problem(transformer(3), 0)
    least = made.judge(made.candidates).peak_bytes
    return made.with_budget(int(least + share * (made.judge(()).peak_bytes - least)))


def check(asked: Problem, solution: Solution) -> None:
    assert solution.status is SolveStatus.STOPPED
    assert "nothing is proven" in solution.status.value
    assert (solution.lower_bound_seconds, solution.gap) == (0.0, 1.0)
    peak = simulate(asked.profile, Schedule(asked.profile, solution.dropped, solution.inner)).peak_bytes
    assert peak == solution.peak_bytes <= asked.budget_bytes


def interrupting(after: int, method: Callable[..., Any]) -> Callable[..., Any]:
    calls = [0]

    def called(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] > after:
            raise KeyboardInterrupt
        return method(*args, **kwargs)

    return called


@pytest.mark.parametrize("after", [1, 4])
def test_an_interrupt_gives_the_best_plan_so_far(after: int, monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem()
    monkeypatch.setattr(Search, "compose", lambda *_: None)  # it would leave nothing to try here
    monkeypatch.setattr(Search, "try_cuts", interrupting(after, Search.try_cuts))
    check(asked, solve(asked))


@pytest.mark.parametrize("method", ["__init__", "compose"])
def test_an_interrupt_while_blocks_are_composed_gives_the_best_plan_so_far(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = problem()
    monkeypatch.setattr(Composer, method, interrupting(0, getattr(Composer, method)))
    check(asked, solve(asked))


def test_an_interrupt_in_the_midst_of_a_change_does_not_spoil_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = problem()
    monkeypatch.setattr(State, "_add", interrupting(3000, State._add))
    check(asked, solve(asked))


def test_an_interrupt_before_there_is_a_plan_goes_on() -> None:
    asked = problem()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "add", interrupting(0, Search.add))
        with pytest.raises(KeyboardInterrupt):
            solve(asked)


def test_no_time_left_gives_a_plan_that_keeps_the_budget() -> None:
    for share in (0.9, 0.6, 0.5):
        asked = problem(share)
        check(asked, solve(asked, time_limit=0.0))
