"""On graphs that nobody thought of: the same values as eager, the budget kept, the peak predicted."""

from __future__ import annotations

import copy
import os
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st

from ckpt_planner import InfeasibleBudgetError, optimize
from tests.helpers import same
from tests.random_models import LATER, ROWS, WIDTH, RandomModel, programs

EXAMPLES = int(os.environ.get("CKPT_PLANNER_EXAMPLES", "500"))


PARTS = 10  # so that several processes share the work


@pytest.mark.parametrize("part", range(PARTS))
def test_a_planned_step_equals_eager_within_its_budget(part: int) -> None:
    @seed(part)
    @settings(max_examples=EXAMPLES // PARTS, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(
        program=programs(more=LATER),
        number=st.integers(0, 99),
        share=st.sampled_from([0.95, 0.8, 0.6, 0.3]),
        leaf=st.booleans(),
    )
    def holds(program: list, number: int, share: float, leaf: bool) -> None:
        _check(program, number, share, leaf)

    holds()


def _check(program: list, number: int, share: float, leaf: bool) -> None:
    model = RandomModel(program, number)
    x = torch.randn(ROWS, WIDTH, requires_grad=leaf)
    plain = optimize(model, budget=1 << 40, example_args=(x,))
    resident = plain.profile.resident_bytes
    budget = resident + int(share * (plain.baseline_peak_bytes - resident))
    try:
        plan = optimize(model, budget=budget, example_args=(x,))
    except InfeasibleBudgetError as error:
        assert error.minimum_bytes > budget
        plan = optimize(model, budget=error.minimum_bytes, example_args=(x,))
    plan.verify()
    real = plan.measure()
    plan.verify()  # by now every call is familiar and replayed by a program
    plain = copy.deepcopy(model)
    assert all(map(same, _twice(plain, plain, x), _twice(plan.model, model, x)))
    assert real.peak_bytes <= plan.budget_bytes
    assert abs(plan.peak_bytes - real.peak_bytes) <= 0.02 * real.peak_bytes
    assert abs(plan.baseline_peak_bytes - real.baseline_peak_bytes) <= 0.02 * real.baseline_peak_bytes


def _twice(call: torch.nn.Module, model: torch.nn.Module, x: torch.Tensor) -> list[Any]:
    """The gradients of two forwards before one backward, and the buffers after it."""
    model.zero_grad()
    torch.manual_seed(0)
    first, second = (call((x * factor).detach().requires_grad_(x.requires_grad)) for factor in (1.0, 0.5))
    (first * second).backward()
    return [*(p.grad for p in model.parameters()), *model.buffers()]
