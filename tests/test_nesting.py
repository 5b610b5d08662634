"""Inner boundaries: values that are computed again by a replay of their own, for the replays that read them."""

from __future__ import annotations

import copy
import functools
import random
from collections import Counter
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from profiles import layered, transformer
from torch import nn

from ckpt_planner import CaptureError, Plan, PlanMismatchError, optimize
from ckpt_planner.deciding import Planned
from ckpt_planner.decision import Decision
from ckpt_planner.planfile import read_plan, write_plan
from ckpt_planner.problem import Judged, Problem, make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.schedule import Schedule
from ckpt_planner.simulate import simulate
from ckpt_planner.solve import Solution, SolveStatus, minimum_of, solve, unnested_minimum_of
from ckpt_planner.solve.bound import lower_bound_seconds
from ckpt_planner.solve.state import State
from tests.helpers import same
from tests.random_models import LATER, ROWS, WIDTH, RandomModel, programs

EXAMPLES = 30
BATCH = 2048  # so that activations outweigh generators' states


class Chain(nn.Module):
    """Blocks with all that is hard on a replay: random numbers, statistics, and writes in place.

    Where it is told to turn, it takes another path in the middle.
    """

    turned = False

    def __init__(self, depth: int = 14, width: int = 8) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(
                nn.Linear(width, width), nn.BatchNorm1d(width), nn.Dropout(0.3), nn.ReLU(inplace=True), nn.GELU()
            )
            for _ in range(depth)
        )
        self.out = nn.Linear(width, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x)
            if self.turned and number == 5:
                x = x.sin().add_(1)
        return self.out(x)


def carried_out(plan: Plan, judged: Judged) -> None:
    """Puts a decision in the place of a plan's."""
    solution = Solution(judged.dropped, SolveStatus.FEASIBLE, judged.seconds, judged.peak_bytes, inner=judged.inner)
    planned = Planned(Decision(plan.profile, solution, 1 << 40, "budget"))
    runtime = plan._runtime
    runtime.first = planned
    for key in runtime.cache:
        runtime.cache[key] = planned


def by_lot(problem: Problem, lot: random.Random) -> Judged | None:
    """A decision that has inner boundaries; None where those that were drawn cannot be."""
    share, often = lot.choice([0.3, 0.6, 0.9, 1.0]), lot.choice([0.1, 0.3, 0.6])
    dropped = problem.repaired(s for s in problem.candidates if lot.random() < share)
    storages = problem.profile.storages
    try:
        found = problem.judge(dropped, [s for s in dropped if lot.random() < often and storages[s].kind != "hidden"])
    except ValueError:
        return None
    return found if found.inner else None


class Nested(NamedTuple):
    """A plan with inner boundaries, and its model."""

    model: Chain
    plan: Plan


def below_the_others(mechanism: str) -> Nested:
    """A plan for a budget that no plan without inner boundaries keeps."""
    torch.set_num_threads(1)
    model, x = Chain(), torch.randn(BATCH, 8)
    plan = optimize(model, budget=budget(), example_args=(x,), mechanism=mechanism)
    assert plan.decision.solution.inner
    return Nested(model, plan)


@functools.cache
def budget() -> int:
    problem = make_problem(optimize(Chain(), budget=1 << 40, example_args=(torch.randn(BATCH, 8),)).profile, 0)
    least, without = minimum_of(problem).peak_bytes, unnested_minimum_of(problem).peak_bytes
    assert least < 0.96 * without
    return (least + without) // 2


@pytest.fixture(scope="module")
def nested() -> Nested:
    return below_the_others("slice")


@pytest.mark.parametrize("part", range(2))
def test_any_inner_boundaries_give_the_same_values_and_the_peak_that_is_predicted(part: int) -> None:
    seen: Counter[str] = Counter()

    @seed(part)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(program=programs(more=LATER), number=st.integers(0, 99), leaf=st.booleans())
    def holds(program: list[Any], number: int, leaf: bool) -> None:
        model, lot = RandomModel(program, number), random.Random(number)
        x = torch.randn(ROWS, WIDTH, requires_grad=leaf)
        try:
            plan = optimize(model, budget=1 << 40, example_args=(x,))
        except CaptureError:  # the plain model fails
            return
        problem = make_problem(plan.profile, 1 << 40)
        for judged in filter(None, (by_lot(problem, lot) for _ in range(2))):
            carried_out(plan, judged)
            plan.verify()
            real = plan.measure()
            plan.verify()
            assert abs(plan.peak_bytes - real.peak_bytes) <= 0.02 * real.peak_bytes
            seen["again"] += any(group.lends and group.trigger >= 0 for group in plan.decision.schedule.groups)

    holds()
    assert seen["again"] >= EXAMPLES // 2


@pytest.mark.parametrize("mechanism", ["slice", "graph"])
def test_a_budget_that_nothing_else_keeps_is_kept_with_the_same_values(nested: Nested, mechanism: str) -> None:
    plan = nested.plan if mechanism == "slice" else below_the_others(mechanism).plan
    for _ in range(3):
        plan.verify()
    assert plan.measure().peak_bytes <= plan.budget_bytes
    twice = [i for i, group in enumerate(plan.decision.schedule.groups) if group.lends]
    assert twice
    again = Counter(i for group in plan.decision.schedule.groups for i in group.ops)
    assert max(again.values()) == 2
    assert plan.recompute_seconds == pytest.approx(sum(plan.decision.again_seconds.values()), rel=0.2)
    assert any(note.startswith("Nested: ") for note in plan.notes)


def gradients(model: nn.Module, call: nn.Module, x: torch.Tensor, how: str) -> list[torch.Tensor | None]:
    torch.manual_seed(3)
    model.zero_grad()
    if how == "backward twice":
        loss = call(x).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    elif how == "two forwards first":
        first, second = call(x), call(x * 0.5)
        (first * second).sum().backward()
    elif how == "the last parameters alone":
        loss = call(x).sum()
        last = list(model.parameters())[-8:]
        return [
            *torch.autograd.grad(loss, last, retain_graph=True),
            *torch.autograd.grad(loss, list(model.parameters())),
        ]
    elif how == "autocast":
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = call(x).sum()
        loss.backward()
    else:
        call(x).sum()  # a step without backward
        call(x).sum().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize(
    "how", ["backward twice", "two forwards first", "the last parameters alone", "autocast", "no backward"]
)
def test_steps_of_every_kind_have_the_values_of_eager(nested: Nested, how: str) -> None:
    (model, plan), x = nested, torch.randn(BATCH, 8)
    for _ in range(2):
        plain = copy.deepcopy(model)
        expected = gradients(plain, plain, x, how)
        assert all(map(same, expected, gradients(model, plan.model, x, how)))
        assert all(map(same, plain.buffers(), model.buffers()))


def test_another_path_than_planned_has_the_values_of_eager(nested: Nested) -> None:
    (model, plan), x = nested, torch.randn(BATCH, 8)
    for turned in (True, False, True):
        model.turned = turned
        plain = copy.deepcopy(model)
        expected = gradients(plain, plain, x, "no backward")
        assert all(map(same, expected, gradients(model, plan.model, x, "no backward")))
    model.turned = False


def test_a_file_has_the_inner_boundaries(nested: Nested, tmp_path: Path) -> None:
    write_plan(nested.plan.decision, tmp_path / "plan.json")
    read = read_plan(tmp_path / "plan.json")
    assert read.solution == nested.plan.decision.solution
    assert read.timeline == nested.plan.decision.timeline


@pytest.mark.parametrize("change", ["twice", "none", "backwards"])
def test_a_file_with_storages_that_cannot_be_is_refused(nested: Nested, tmp_path: Path, change: str) -> None:
    decision, path = nested.plan.decision, tmp_path / "plan.json"
    inner, dropped = decision.solution.inner, decision.solution.dropped
    if change == "twice":
        inner = (*inner, inner[-1])
    elif change == "none":
        dropped = (-1, *dropped)
    else:
        dropped = dropped[::-1]
    solution = msgspec.structs.replace(decision.solution, inner=inner, dropped=dropped)
    write_plan(Decision(decision.profile, solution, decision.budget_bytes, decision.strategy), path)
    with pytest.raises(PlanMismatchError, match="cannot be carried out"):
        read_plan(path)


# -- what it means ---------------------------------------------------------------------------------------------------


def blocks(profile: Profile) -> list[int]:
    """The storages that are passed on from block to block, of a made-up transformer."""
    problem = make_problem(profile, 0)
    return [s for s in problem.candidates if len(problem.readers[s]) > 1 and profile.storages[s].kind == "value"]


def test_what_leads_to_an_inner_boundary_runs_twice_and_nothing_else_does() -> None:
    profile = transformer(4)
    problem = make_problem(profile, 0)
    everything = Schedule(profile, problem.candidates)
    boundary = blocks(profile)[len(blocks(profile)) // 2]
    nested = Schedule(profile, problem.candidates, [boundary])
    runs = Counter(i for group in nested.groups for i in group.ops)
    (lender,) = (group for group in nested.groups if boundary in group.lends)
    assert nested.again == everything.again
    assert {i for i, times in runs.items() if times == 2} <= set(lender.ops)
    assert all(i <= profile.storages[boundary].birth for i in lender.ops)
    borrowers = [group for group in nested.groups if boundary in group.borrows]
    assert borrowers and lender.trigger == min(group.trigger for group in borrowers)
    assert simulate(profile, nested).peak_bytes < simulate(profile, everything).peak_bytes
    assert nested.recompute_seconds > everything.recompute_seconds


def test_what_cannot_be_an_inner_boundary_is_refused_by_name() -> None:
    profile = transformer(2)
    problem = make_problem(profile, 0)
    kept, *others = blocks(profile)
    with pytest.raises(ValueError, match=f"storage {kept} cannot be an inner boundary"):
        Schedule(profile, others, [kept])
    hidden = next(s for s in problem.candidates if profile.storages[s].kind == "hidden")
    with pytest.raises(ValueError, match=f"storage {hidden} cannot be an inner boundary"):
        Schedule(profile, problem.candidates, [hidden])


@pytest.mark.parametrize("number", range(6))
def test_solutions_keep_their_budget_by_simulation_and_cost_no_less_than_the_bound(number: int) -> None:
    profile = layered(number, 18)
    problem = make_problem(profile, 0)
    least, without = minimum_of(problem), unnested_minimum_of(problem)
    assert least.peak_bytes <= without.peak_bytes
    for budget in {least.peak_bytes, (least.peak_bytes + without.peak_bytes) // 2, without.peak_bytes}:
        found = solve(make_problem(profile, budget))
        schedule = Schedule(profile, found.dropped, found.inner)
        assert simulate(profile, schedule).peak_bytes == found.peak_bytes <= budget
        assert schedule.recompute_seconds == found.recompute_seconds
        assert found.lower_bound_seconds <= found.recompute_seconds
        assert (lower_bound_seconds(make_problem(profile, budget)) or 0.0) <= found.recompute_seconds
    assert solve(make_problem(profile, least.peak_bytes - 1)).status is SolveStatus.INFEASIBLE


def test_at_least_one_of_many_graphs_needs_them() -> None:
    smaller = 0
    for number in range(6):
        problem = make_problem(layered(number, 18), 0)
        smaller += minimum_of(problem).peak_bytes < unnested_minimum_of(problem).peak_bytes
    assert smaller


class ReadsLastFirst(nn.Module):
    """Of two values, what was made first, with much on the way, is read last."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(512))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            small = torch.cat([x.sin(), x.cos(), x.tan()], -1).exp().tanh().mean(0)[:512].sin()
        large = x.cos() * self.scale
        return torch.add(large, small).exp().sin().sum()


class ReadsTwoAtOnce(nn.Module):
    """One step reads two values that different groups make: what is transient for one may come on top of the other."""

    def __init__(self, flipped: bool) -> None:
        super().__init__()
        self.scale, self.flipped = nn.Parameter(torch.rand(512)), flipped

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            small = torch.cat([x.sin(), x.cos(), x.tan()], -1).exp().tanh().mean(0)[:512].sin()
        large = x.cos() * self.scale
        other = small * self.scale
        return (torch.mul(other, large) if self.flipped else torch.mul(large, other)).sum()


@pytest.mark.parametrize("flipped", [False, True])
def test_groups_of_one_step_are_made_in_the_order_in_which_it_reads_them(flipped: bool) -> None:
    plan = optimize(ReadsTwoAtOnce(flipped), budget=1 << 40, example_args=(torch.randn(512, 512),))
    problem = make_problem(plan.profile, 1 << 40)
    carried_out(plan, problem.judge(problem.candidates))
    assert plan.measure().peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
    state = State(problem)
    state.move_to(problem.candidates)
    assert state.peak_bytes() == plan.peak_bytes


def test_boundaries_are_made_in_the_order_in_which_they_are_predicted_to_be() -> None:
    model, x = ReadsLastFirst(), torch.randn(512, 512)
    plan = optimize(model, budget=1 << 40, example_args=(x,))
    problem, ops = make_problem(plan.profile, 1 << 40), plan.profile.ops
    birth = {s: ops[plan.profile.storages[s].birth].name for s in problem.candidates}
    small = [s for s, name in birth.items() if name.endswith(".sin")][1]
    large = next(s for s, name in birth.items() if name.endswith(".mul"))
    for inner in ((small,), (large,), (small, large)):
        carried_out(plan, problem.judge(problem.candidates, inner))
        assert plan.measure().peak_bytes == pytest.approx(plan.peak_bytes, rel=0.02)
        plan.verify()
