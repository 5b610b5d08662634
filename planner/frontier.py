"""The frontier of one step: the least recompute time that was found for each peak, from the smallest peak to the plain.

Sizes are bytes, times seconds. Free of torch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from .decision import Decision
from .graphdecision import GraphDecision
from .problem import Problem, make_problem
from .profile import Profile
from .regional import RegionDecision, decide_for_budgets
from .regions import Region
from .released import run_by_graph
from .solve import Solution, minimum_of, rate, solve
from .solve.tables import tables_of

POINTS = 16


class FrontierPoint(msgspec.Struct, frozen=True, omit_defaults=True):
    """One plan of the frontier.

    Attributes:
        budget_bytes: the budget that it was decided for, bytes of peak.
        peak_bytes: predicted peak of a whole training step, at most the budget.
        recompute_seconds: time of everything that runs again.
        overhead: that, and following forward, as a share of the plain step's time.
        lower_bound_seconds: no plan within `budget_bytes` recomputes for less.
        gap: the share of the recomputation that may be avoidable.
        solution: the decision; `Plan.at` makes a plan of the point.
        mechanism: what carries it out: "slice", "graph" or "torch".
        regions: what is checkpointed, with mechanism "torch".
    """

    budget_bytes: int
    peak_bytes: int
    recompute_seconds: float
    overhead: float
    lower_bound_seconds: float
    gap: float
    solution: Solution
    mechanism: str = "slice"
    regions: tuple[Region, ...] = ()


Progress = Callable[[int, int], None]


class Frontier(msgspec.Struct, frozen=True):
    """Plans of which none has both a smaller peak and a smaller overhead than another.

    Attributes:
        points: by peak, the smallest first: peaks go up, overheads go down. The last is the plain step where that is
            the cheapest.
        knee: index of the point where the curve bends most; see `knee_of`.
    """

    points: tuple[FrontierPoint, ...]
    knee: int


def frontier(profile: Profile, points: int = POINTS, progress: Progress | None = None, graph: bool = False) -> Frontier:
    """The frontier of the step that `profile` describes.

    Budgets are spaced evenly from the smallest peak that can be planned to the plain step's. They are decided together:
    whatever was found for one budget is a candidate for all the others.

    Args:
        profile: the measured step.
        points: how many budgets are decided, at least 2. Where two of them have the same plan, fewer points come back.
        progress: told how many budgets of how many are decided.
        graph: the plans are to be carried out by mechanism "graph", and not by "slice".

    Raises:
        ValueError: fewer than 2 points.

    Example:
        >>> curve = frontier(profile, points=8)  # doctest: +SKIP
        >>> [(point.peak_bytes, point.overhead) for point in curve.points]  # doctest: +SKIP
    """
    check_points(points)
    problem = make_problem(run_by_graph(profile) if graph else profile, 0)
    tables_of(problem)  # before there are copies for each budget, so that all of them have the same
    budgets = spaced(minimum_of(problem).peak_bytes, problem.judge(()).peak_bytes, points)
    # From the largest down: what one search meets above its own budget is often the answer to the next one up.
    for done, budget in enumerate(budgets):
        if progress is not None:
            progress(done, len(budgets))
        solve(problem.with_budget(budget))
    decided = [_decided(problem.with_budget(budget)) for budget in budgets]
    return curve_of([GraphDecision.of(profile, d) for d in decided] if graph else decided)


def frontier_of_regions(
    profile: Profile,
    points: int = POINTS,
    barriers: Iterable[int] = (),
    whole: Iterable[int] = (),
    progress: Progress | None = None,
) -> Frontier:
    """The frontier of mechanism "torch"; like `frontier`.

    Args:
        profile, points, progress: as `frontier` takes them.
        barriers, whole: as `Regional` takes them.

    Raises:
        ValueError: fewer than 2 points.

    Example:
        >>> frontier_of_regions(profile, points=8).points[0].regions  # doctest: +SKIP
        (Region(first=0, stop=12, kept=()), Region(first=12, stop=24, kept=()))
    """
    check_points(points)

    def budgets(least: int, plain: int) -> list[int]:
        return spaced(least, plain, points)

    return curve_of(decide_for_budgets(profile, budgets, barriers, whole, progress))


def _decided(problem: Problem) -> Decision:
    return Decision(problem.profile, rate(problem, problem.cheapest_known()), problem.budget_bytes, "budget")


def check_points(points: int) -> None:
    """Raises a ValueError where so many budgets make no frontier."""
    if points < 2:
        raise ValueError(f"a frontier has at least 2 points, not {points}")


def spaced(least_bytes: int, plain_bytes: int, points: int) -> list[int]:
    """Budgets in bytes, evenly from the plain step's peak down to the smallest, each once.

    Example:
        >>> spaced(100, 200, 3)
        [200, 150, 100]
    """
    steps = ((plain_bytes - least_bytes) * k // (points - 1) for k in range(points))
    return sorted({least_bytes + step for step in steps}, reverse=True)


def curve_of(decisions: Iterable[Decision]) -> Frontier:
    """The frontier of decisions that come from the largest budget down.

    Example:
        >>> curve_of([decide(profile, 2 * 10**9), decide(profile, 10**9)]).knee  # doctest: +SKIP
        1
    """
    found: list[FrontierPoint] = []
    least_seconds = 0.0
    for decision in decisions:
        # What bounds a larger budget bounds a smaller one, too.
        point = _point(decision, least_seconds)
        least_seconds = point.lower_bound_seconds
        # Cheaper with a larger budget, or else that was no better plan, and this one has the tighter bound.
        if found and point.recompute_seconds <= found[-1].recompute_seconds:
            found.pop()
        found.append(point)
    found.reverse()
    return Frontier(tuple(found), knee_of([(p.peak_bytes, p.recompute_seconds) for p in found]))


def _point(decision: Decision, least_seconds: float) -> FrontierPoint:
    solution = decision.solution
    if solution.lower_bound_seconds < least_seconds:
        bound = min(least_seconds, solution.recompute_seconds)
        gap = (solution.recompute_seconds - bound) / solution.recompute_seconds if bound else 0.0
        solution = msgspec.structs.replace(solution, lower_bound_seconds=bound, gap=gap)
    return FrontierPoint(
        budget_bytes=decision.budget_bytes,
        peak_bytes=solution.peak_bytes,
        recompute_seconds=solution.recompute_seconds,
        overhead=decision.overhead,
        lower_bound_seconds=solution.lower_bound_seconds,
        gap=solution.gap,
        solution=solution,
        mechanism=decision.mechanism,
        regions=decision.regions if isinstance(decision, RegionDecision) else (),
    )


def decision_at(profile: Profile, point: FrontierPoint) -> Decision:
    """The decision that a point of the profile's frontier stands for.

    Example:
        >>> decision_at(profile, frontier(profile).points[0]).timeline.peak_bytes  # doctest: +SKIP
        1073741824
    """
    asked = (profile, point.solution, point.budget_bytes, "budget")
    if point.mechanism == "torch":
        return RegionDecision(*asked, regions=point.regions)
    return GraphDecision(*asked) if point.mechanism == "graph" else Decision(*asked)


def knee_of(curve: Sequence[tuple[float, float]]) -> int:
    """Index of the knee of a falling curve.

    Both axes are scaled to 0..1; the knee is the point that lies farthest below the line from the first point to the
    last. This is the criterion of Satopää, Albrecht, Irwin and Raghavan, "Finding a 'Kneedle' in a Haystack" (ICDCS
    workshops 2011), without its smoothing, which the noise of measured curves needs and this one has none of. Of equal
    points the cheapest is taken, as where there are two points and so no bend.

    Args:
        curve: (x, y) of each point, x going up and y going down; at least one.
    """
    (left, top), (right, bottom) = curve[0], curve[-1]
    width, height = (right - left) or 1, (top - bottom) or 1
    below = [1 - (x - left) / width - (y - bottom) / height for x, y in curve]
    most = max(below)
    return max(k for k, depth in enumerate(below) if depth >= most - 1e-12)
