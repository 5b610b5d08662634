"""From a profile and a budget to a checked decision, its figures and its explanation. Free of torch."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

import msgspec

from .budget import format_bytes
from .errors import InfeasibleBudgetError
from .problem import Problem
from .profile import Profile
from .schedule import EXTERNAL, Group, Schedule
from .simulate import Timeline, needed_until, simulate
from .solve import Solution, SolveStatus, make_problem, minimum_of, solve


class Segment(msgspec.Struct, frozen=True):
    """One group of operations that backward runs again together.

    Attributes:
        modules: paths of the modules whose operations run again, in order.
        nodes: how many operations.
        bytes_freed: what is not kept for backward because of it.
        bytes_kept: what it needs kept from outside itself.
        recompute_seconds: its time in backward.
    """

    modules: tuple[str, ...]
    nodes: int
    bytes_freed: int
    bytes_kept: int
    recompute_seconds: float


class Breakdown(msgspec.Struct, frozen=True):
    """Where the bytes of a step's peak are.

    Attributes:
        parameters, buffers, inputs, optimizer: resident during the whole step.
        gradients: parameter gradients that exist at the peak, and the buckets that they are averaged in.
        activations: what is saved for backward or held by Python.
        workspace: everything else: gradients of activations, temporary memory, replayed values.
    """

    parameters: int
    buffers: int
    gradients: int
    optimizer: int
    inputs: int
    activations: int
    workspace: int


@dataclass(frozen=True)
class Decision:
    """What was decided for one profile, with everything that follows from it.

    Attributes:
        profile: what it was decided from.
        solution: what the solver found.
        budget_bytes: what was asked for, bytes of peak.
        strategy: how it was looked for.
        target_bytes: what the solver aimed for, where that was less than the budget; 0: the smallest peak of all.
    """

    profile: Profile
    solution: Solution
    budget_bytes: int
    strategy: str
    target_bytes: int | None = None
    mechanism: ClassVar[str] = "slice"

    @property
    def mechanism_reason(self) -> str:
        """What the mechanism is, and why it was taken; a sentence."""
        return "The default: forward is followed, and backward runs only what was dropped again."

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how this was planned; sentences."""
        notes = list(self.profile.notes)
        if self.profile.loss.startswith("a stand-in"):
            notes.append(f"Planned with {self.profile.loss}.")
        if inner := len(self.solution.inner):
            what, whose = (f"{inner} inner boundaries are", "their") if inner > 1 else ("1 inner boundary is", "its")
            notes.append(
                f"Nested: {what} computed again by a replay of {whose} own, so what leads there runs twice in backward."
            )
        return tuple(notes)

    @cached_property
    def schedule(self) -> Schedule:
        """What runs again, in which groups."""
        return Schedule(self.profile, self.solution.dropped, self.solution.inner)

    @cached_property
    def timeline(self) -> Timeline:
        """Live bytes at every moment of the planned step."""
        return simulate(self.profile, self.schedule)

    @cached_property
    def unplanned(self) -> Decision:
        """The plain step of the same profile, as a decision for nothing."""
        return unplanned(self.profile)

    @cached_property
    def plain(self) -> Timeline:
        """Live bytes at every moment of the plain step."""
        return self.unplanned.timeline

    @cached_property
    def needed_until(self) -> dict[int, int]:
        """For each storage that is kept for backward, the last backward step that needs it."""
        return needed_until(self.profile, self.schedule)

    @cached_property
    def let_go(self) -> tuple[int, ...]:
        """For each storage, the operation before which forward lets go of it, unless backward needs it."""
        return tuple(storage.death for storage in self.profile.storages)

    @cached_property
    def freed(self) -> frozenset[int]:
        """Storages that the plain step keeps for backward, and this one does not."""
        return self.schedule.dropped & {slot.storage for slot in self.profile.slots}

    @cached_property
    def again_seconds(self) -> dict[int, float]:
        """For each operation that runs again, its time in backward; what starts the replays is not in it."""
        again = Counter(i for group in self.schedule.groups if group.trigger >= 0 for i in group.ops)
        each = self.profile.replay_op_seconds
        return {i: times * (self.profile.ops[i].seconds + each) for i, times in again.items()}

    @cached_property
    def segments(self) -> tuple[Segment, ...]:
        """The groups that backward replays, in the order of forward."""
        return tuple(_segment(self.profile, self.schedule, g) for g in self.schedule.groups if g.trigger >= 0)

    @cached_property
    def segment_of(self) -> dict[int, int]:
        """For each operation that runs again, the number of its segment, and not of one that makes inner boundaries."""
        groups = enumerate(g for g in self.schedule.groups if g.trigger >= 0)
        return {i: number for number, g in sorted(groups, key=lambda pair: not pair[1].lends) for i in g.ops}

    @property
    def follow_seconds(self) -> float:
        """What following the forward costs, beyond what is computed again; 0 where nothing is."""
        ops = sum(op.inside for op in self.profile.ops) if self.segments else 0
        return ops * self.profile.follow_op_seconds

    @property
    def step_seconds(self) -> float:
        """Time of the planned step's forward and backward."""
        return self.profile.step_seconds + self.solution.recompute_seconds + self.follow_seconds

    @property
    def overhead(self) -> float:
        """What the plan costs, as a share of the plain step's time."""
        plain = self.profile.step_seconds
        return self.step_seconds / plain - 1 if plain else 0.0

    @property
    def memory(self) -> Breakdown:
        """Where the bytes of the planned step's peak are."""
        return _breakdown(self.profile, self.timeline)

    @property
    def baseline_memory(self) -> Breakdown:
        """Where the bytes of the plain step's peak are."""
        return self.unplanned.memory


def unplanned(profile: Profile) -> Decision:
    """The plain step as a decision: nothing is dropped.

    Example:
        >>> unplanned(profile).timeline.peak_bytes  # doctest: +SKIP
    """
    return Decision(profile, Solution((), SolveStatus.NOTHING_TO_DO, 0.0, 0), 0, "none")


def decide(
    profile: Profile,
    budget_bytes: int,
    strategy: str = "budget",
    target_bytes: int | None = None,
    problem: Problem | None = None,
) -> Decision:
    """Decide what to drop, and check it by simulation.

    Args:
        profile: the measured step.
        budget_bytes: bytes of peak that must not be exceeded.
        strategy: "budget", "sqrt", "all" or "none".
        target_bytes: what the solver aims for, if less than the budget (a measured step took more than predicted).
        problem: the profile's, if there is one: what was found out for other budgets need not be looked for again.

    Raises:
        InfeasibleBudgetError: the strategy cannot keep the budget.
    """
    problem = problem or make_problem(profile, budget_bytes)
    target = budget_bytes if target_bytes is None else min(target_bytes, budget_bytes)
    solution = solve(problem.with_budget(target), strategy)
    decision = Decision(profile, solution, budget_bytes, strategy, target if target < budget_bytes else None)
    if solution.status is SolveStatus.INFEASIBLE or decision.timeline.peak_bytes > target:
        # The budget's own strategy has come back with the smallest peak there is.
        least = solution.peak_bytes if strategy == "budget" else minimum_of(problem).peak_bytes
        raise infeasible(decision, least + budget_bytes - target)
    return decision


def infeasible(decision: Decision, smallest: int) -> InfeasibleBudgetError:
    """The error that says what the smallest budget is, and what it is made of."""
    profile, budget = decision.profile, decision.budget_bytes
    parts = decision.memory
    needs = ", ".join(
        f"{name} {format_bytes(getattr(parts, name))}" for name in parts.__struct_fields__ if getattr(parts, name)
    )
    if decision.strategy != "budget":
        found = decision.timeline.peak_bytes
        other = f' with mechanism "{decision.mechanism}"' if decision.mechanism != "slice" else ""
        return InfeasibleBudgetError(
            f'strategy "{decision.strategy}" needs {format_bytes(found)}, over the budget of {format_bytes(budget)}; '
            f'strategy "budget" can keep {format_bytes(smallest)} ({smallest} bytes){other}',
            budget_bytes=budget,
            minimum_bytes=smallest,
        )
    if decision.mechanism != "slice":
        return InfeasibleBudgetError(
            f'mechanism "{decision.mechanism}" cannot do a step of {profile.model} in {format_bytes(budget)}: the '
            f"smallest budget that it can keep is {format_bytes(smallest)} ({smallest} bytes). At that peak: {needs}. "
            'Mechanism "slice" may keep a smaller one.',
            budget_bytes=budget,
            minimum_bytes=smallest,
        )
    return InfeasibleBudgetError(
        f"a step of {profile.model} cannot be done in {format_bytes(budget)}: the smallest budget that this planner "
        f"can keep is {format_bytes(smallest)} ({smallest} bytes). At that peak: {needs}. Make the batch smaller, "
        "freeze parameters, or raise the budget.",
        budget_bytes=budget,
        minimum_bytes=smallest,
    )


def _segment(profile: Profile, schedule: Schedule, group: Group) -> Segment:
    modules = tuple(dict.fromkeys(profile.ops[i].module for i in group.ops))
    freed = {profile.slots[i].storage for i in group.slots}
    return Segment(
        modules=modules,
        nodes=len(group.ops),
        bytes_freed=sum(profile.storages[s].bytes for s in freed),
        bytes_kept=sum(profile.storages[s].bytes for s in group.sources),
        recompute_seconds=math.fsum(profile.ops[i].seconds + profile.replay_op_seconds for i in group.ops)
        + profile.replay_group_seconds,
    )


def _breakdown(profile: Profile, timeline: Timeline) -> Breakdown:
    peak = timeline.peak_bytes
    gradients, activations = 0, 0
    if peak == timeline.optimizer_bytes:
        gradients = profile.gradient_bytes
        activations = sum(s.bytes for s in profile.storages if s.death > len(profile.ops) and s.kind not in EXTERNAL)
    elif peak in timeline.backward:
        at = timeline.backward.index(peak)
        gradients = profile.gradients_before(at)
        activations = timeline.kept[at] - profile.resident_bytes
    else:
        at = timeline.forward.index(peak)
        activations = peak - profile.resident_bytes - profile.ops[at].workspace_bytes
    activations = max(0, activations)
    return Breakdown(
        parameters=profile.parameter_bytes,
        buffers=profile.buffer_bytes,
        gradients=gradients + profile.bucket_bytes,
        optimizer=profile.optimizer_state_bytes,
        inputs=profile.input_bytes,
        activations=activations,
        workspace=peak - profile.resident_bytes - gradients - activations,
    )
