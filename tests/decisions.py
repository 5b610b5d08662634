"""Every decision of a small problem, judged by the simulation: what the solvers are compared with."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations

from ckpt_planner.problem import Judged, Problem
from ckpt_planner.solve.bound import lower_bound_seconds


def every_decision(problem: Problem) -> list[Judged]:
    """Each storage kept, dropped, or dropped as an inner boundary."""
    found = {}
    for dropped in {problem.repaired(wish) for wish in subsets(problem.candidates)}:
        for inner in subsets(dropped):
            try:
                judged = problem.judge(dropped, inner)
            except ValueError:  # these separate nothing, or are never returned
                continue
            found[judged.dropped, judged.inner] = judged
    return list(found.values())


def subsets(choices: tuple[int, ...]) -> Iterator[tuple[int, ...]]:
    for count in range(len(choices) + 1):
        yield from combinations(choices, count)


def cheapest_of_budgets(problem: Problem, shares: tuple[float, ...]) -> Iterator[tuple[int, float]]:
    """Budgets from the least that any decision keeps, each with the seconds of the cheapest that keeps it."""
    decisions = every_decision(problem)
    least, most = min(j.peak_bytes for j in decisions), problem.judge(()).peak_bytes
    for share in shares:
        budget = int(least + share * (most - least))
        yield budget, min(j.seconds for j in decisions if j.peak_bytes <= budget)


def assert_bound_is_below(problem: Problem, budget: int, cheapest: float) -> None:
    for nodes in (0, 3):
        bound = lower_bound_seconds(problem.with_budget(budget), nodes)
        assert bound is not None
        assert bound <= cheapest
