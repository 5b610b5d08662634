"""The three ways to carry out a plan, behind one interface.

"slice": the model's own forward is followed, and backward runs only dropped operations again. "graph": the same on a
captured graph of the forward. "torch": that graph with regions in `torch.utils.checkpoint`.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
from torch import nn

from .decision import Decision, decide
from .frontier import Frontier, frontier, frontier_of_regions
from .graphdecision import GraphDecision, decide_on_graph, smallest_on_graph
from .graphed.graphed import Graphed
from .problem import Problem, make_problem
from .profile import Profile
from .regional import RegionDecision, decide_regions, minimum_regions
from .released import run_by_graph
from .rewrite.capture import Captured, record
from .rewrite.ongraph import fitting
from .rewrite.partition import positions
from .rewrite.rewritten import Rewritten
from .solve import minimum


class Mechanism(Protocol):
    """Decides within what it can do."""

    def decide(self, profile: Profile, budget: int, strategy: str, target: int) -> Decision:
        """Like `ckpt_planner.decision.decide`."""

    def smallest(self, profile: Profile, budget: int, strategy: str) -> Decision:
        """The decision with the smallest peak that is found."""

    def frontier(self, profile: Profile, points: int) -> Frontier:
        """Like `ckpt_planner.frontier.frontier`."""

    def rewritten(self, decision: Decision) -> Rewritten | Graphed | None:
        """The forward that carries a decision out; None where the model's own is followed."""


class _Problems:
    """The problem of the profile that was decided for last, so that what was found out for one budget stays known."""

    def __init__(self) -> None:
        self._of: tuple[Profile, Problem] | None = None

    def __call__(self, profile: Profile, graph: bool = False) -> Problem:
        """The problem of a profile, or of it as run by a graph."""
        if self._of is None or self._of[0] is not profile:
            self._of = profile, make_problem(run_by_graph(profile) if graph else profile, 0)
        return self._of[1]


class Slice:
    """Follows the model's forward."""

    def __init__(self) -> None:
        self._problem = _Problems()

    def decide(self, profile: Profile, budget: int, strategy: str, target: int) -> Decision:
        """Like `ckpt_planner.decision.decide`."""
        return decide(profile, budget, strategy, target, self._problem(profile))

    def smallest(self, profile: Profile, budget: int, strategy: str) -> Decision:
        """The decision with the smallest peak that is found."""
        return Decision(profile, minimum(profile, self._problem(profile)), budget, strategy, 0)

    def frontier(self, profile: Profile, points: int) -> Frontier:
        """Like `ckpt_planner.frontier.frontier`."""
        return frontier(profile, points)

    def rewritten(self, decision: Decision) -> None:
        """None: the model's own forward is followed."""
        return None


class Graph:
    """Runs the captured graph, and drops what "slice" would.

    Args:
        captured: the graph of the planned call; None: it is captured at the first step under each decision.
    """

    def __init__(self, captured: Captured | None = None) -> None:
        self._captured = captured
        self._problem = _Problems()

    def decide(self, profile: Profile, budget: int, strategy: str, target: int) -> GraphDecision:
        """Like `ckpt_planner.decision.decide`."""
        return decide_on_graph(profile, budget, strategy, target, self._problem(profile, graph=True))

    def smallest(self, profile: Profile, budget: int, strategy: str) -> GraphDecision:
        """The decision with the smallest peak that is found."""
        return smallest_on_graph(profile, budget, strategy, self._problem(profile, graph=True))

    def frontier(self, profile: Profile, points: int) -> Frontier:
        """Like `ckpt_planner.frontier.frontier`."""
        return frontier(profile, points, graph=True)

    def rewritten(self, decision: Decision) -> Graphed | None:
        """The forward that carries the decision out; None where the model's own does."""
        assert isinstance(decision, GraphDecision)
        return Graphed(decision, self._captured) if decision.runs else None


class Checkpoints:
    """Runs the captured graph with regions in checkpoints.

    Args:
        captured: the graph of the planned call.
    """

    def __init__(self, captured: Captured) -> None:
        self._captured = captured
        self._barriers, self._whole = positions(captured.graph)

    def decide(self, profile: Profile, budget: int, strategy: str, target: int) -> RegionDecision:
        """Like `ckpt_planner.regional.decide_regions`."""
        return decide_regions(profile, budget, strategy, target, self._barriers, self._whole)

    def smallest(self, profile: Profile, budget: int, strategy: str) -> RegionDecision:
        """The decision with the smallest peak that is found."""
        return minimum_regions(profile, budget, strategy, self._barriers, self._whole)

    def frontier(self, profile: Profile, points: int) -> Frontier:
        """Like `ckpt_planner.frontier.frontier_of_regions`."""
        return frontier_of_regions(profile, points, self._barriers, self._whole)

    def rewritten(self, decision: Decision) -> Rewritten | None:
        """The forward that carries the decision out; None where nothing is checkpointed."""
        assert isinstance(decision, RegionDecision)
        return Rewritten(decision, self._captured) if decision.regions else None


def mechanism(name: str, profile: Profile, model: nn.Module, args: Any, kwargs: Any) -> Mechanism:
    """The mechanism of that name for a call.

    Raises:
        UnsupportedModelError: a graph cannot repeat what the model's forward does.
    """
    if name == "slice":
        return Slice()
    with torch.enable_grad():
        captured = fitting(record(model, args, kwargs), profile, name)
    return Graph(captured) if name == "graph" else Checkpoints(captured)
