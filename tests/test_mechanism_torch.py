"""Mechanism "torch": what its checkpoints save and compute again."""

from __future__ import annotations

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_planner import Plan, optimize
from ckpt_planner.deciding import Planned
from ckpt_planner.regional import RegionDecision
from ckpt_planner.regions import Region
from ckpt_planner.rewrite.partition import Checkpointed
from ckpt_planner.solve import Solution, SolveStatus
from tests.on_a_graph import TOLERANCE, Wide, assert_kept_as_predicted, assert_same_steps, planned, rows
from tests.random_models import ROWS, WIDTH, RandomModel, programs


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def checkpoints(plan: Plan) -> list[Checkpointed]:
    """The checkpoints that run in a step."""
    first = plan._runtime.first
    assert first is not None and first.rewritten is not None
    _, values = first.rewritten._split
    return list(values.values())


def test_random_draws_statistics_and_counters_are_those_of_eager() -> None:
    model, x = Wide(), rows()
    plan = planned("torch", model, (x,), share=0.5)
    regions = checkpoints(plan)
    assert any(r.state for r in regions) and any(r._options["preserve_rng_state"] for r in regions)
    assert_kept_as_predicted(plan)
    assert_same_steps(plan, model, (x,), {})


def test_generators_are_saved_only_where_something_is_drawn() -> None:
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]), rows()
    plan = planned("torch", model, (x,), loss_fn=lambda y: y.mean())
    assert checkpoints(plan) and not any(r._options["preserve_rng_state"] for r in checkpoints(plan))
    assert_kept_as_predicted(plan)


def test_values_kept_within_a_region_are_not_computed_again() -> None:
    model, x = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh(), nn.GELU())]), rows()
    plain = optimize(model, 1 << 40, (x,), loss_fn=lambda y: y.mean(), mechanism="torch")
    ops = plain.profile.ops
    kept = tuple(i for i, op in enumerate(ops[:-1]) if op.name.endswith("linear"))
    solution = Solution((), SolveStatus.FEASIBLE, 0.0, 0)
    peaks = []
    for keep in ((), kept[1:3], kept):
        decision = RegionDecision(plain.profile, solution, 1 << 40, "budget", regions=(Region(0, len(ops) - 1, keep),))
        plain._runtime.first = Planned(decision)
        for key in plain._runtime.cache:
            plain._runtime.cache[key] = plain._runtime.first
        assert_kept_as_predicted(plain)
        assert_same_steps(plain, model, (x,), {}, lambda y: y.mean())
        assert plain.segments[0].nodes == len(decision.regional.again(decision.regions[0]))
        peaks.append(plain.decision.timeline.saved)
    assert peaks[0] < peaks[1] < peaks[2]


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(), number=st.integers(0, 99), leaf=st.booleans())
def test_graphs_that_nobody_thought_of(program: list, number: int, leaf: bool) -> None:
    torch.set_num_threads(1)
    model, x = RandomModel(program, number), torch.randn(ROWS, WIDTH, requires_grad=leaf)
    plan = optimize(model, 1 << 40, (x,), strategy="sqrt", mechanism="torch")
    plan.verify()
    real = plan.measure()
    assert abs(plan.peak_bytes - real.peak_bytes) <= TOLERANCE * real.peak_bytes
