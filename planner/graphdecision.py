"""Deciding for mechanism "graph": what is dropped from a step whose forward a captured graph runs. Free of torch."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .decision import Decision, decide
from .problem import Problem
from .profile import Profile
from .released import run_by_graph
from .schedule import Schedule
from .simulate import Timeline, simulate
from .solve import minimum


@dataclass(frozen=True)
class GraphDecision(Decision):
    """A decision that is carried out on a captured graph; see `Decision`."""

    mechanism: ClassVar[str] = "graph"

    @classmethod
    def of(cls, profile: Profile, decision: Decision) -> GraphDecision:
        """A decision for `run_by_graph(profile)`, carried out on a captured graph."""
        return cls(profile, decision.solution, decision.budget_bytes, decision.strategy, decision.target_bytes)

    @property
    def mechanism_reason(self) -> str:
        """What the mechanism is, and why it was taken; a sentence."""
        if not self.runs:
            return "As asked for; the plain step fits, so the model's own forward runs."
        return "As asked for: a captured graph runs, and backward runs only what was dropped again."

    @cached_property
    def runs(self) -> bool:
        """Whether the graph runs, because something is dropped, or because the model's Python holds too much."""
        return bool(self.schedule.groups) or (self.strategy == "budget" and self.plain.peak_bytes > self.budget_bytes)

    @cached_property
    def _as_run(self) -> Profile:
        return run_by_graph(self.profile) if self.runs else self.profile

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every moment of the planned step."""
        return simulate(self._as_run, Schedule(self._as_run, self.solution.dropped, self.solution.inner))

    @cached_property
    def let_go(self) -> tuple[int, ...]:
        """For each storage, the operation before which forward lets go of it, unless backward needs it."""
        return tuple(storage.death for storage in self._as_run.storages)

    @property
    def follow_seconds(self) -> float:
        """Nothing: a graph is not followed once its calls are known."""
        return 0.0


def decide_on_graph(
    profile: Profile, budget_bytes: int, strategy: str, target_bytes: int, problem: Problem
) -> GraphDecision:
    """Decide what to drop, and check it by simulation; like `decide`, with the problem of `run_by_graph(profile)`.

    Raises:
        InfeasibleBudgetError: the strategy cannot keep the budget.
    """
    return GraphDecision.of(profile, decide(problem.profile, budget_bytes, strategy, target_bytes, problem))


def smallest_on_graph(profile: Profile, budget_bytes: int, strategy: str, problem: Problem) -> GraphDecision:
    """The decision with the smallest peak that is found; `problem` as in `decide_on_graph`."""
    return GraphDecision(profile, minimum(problem.profile, problem), budget_bytes, strategy, 0)
