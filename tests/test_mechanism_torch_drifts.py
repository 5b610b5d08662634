"""A forward that reads another value at each step: no graph holds for it, and the budget is kept all the same."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn

from tests.helpers import assert_same_step, default_loss, differences, one_step, planned

WIDTH = 32


class Counting(nn.Module):
    """A norm with a cumulative average reads its counter as a number."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(5)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH, momentum=None) for _ in range(5)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear, norm in zip(self.linears, self.norms, strict=True):
            x = norm(linear(x)).tanh()
        return x


def rows() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(256, WIDTH)


def test_a_forward_that_reads_another_value_each_step_ends_up_followed(caplog: pytest.LogCaptureFixture) -> None:
    torch.manual_seed(0)
    model, x = Counting(), rows()
    other = Counting()
    other.load_state_dict(model.state_dict())
    plan = planned(model, (x,), loss_fn=default_loss, mechanism="torch")
    with caplog.at_level(logging.WARNING, "ckpt_planner"):
        for step in range(8):
            expected = one_step(other, other, (x,), {}, number=step)
            assert differences(expected, one_step(plan.model, model, (x,), {}, number=step)) == []
    last = next(reversed(plan._runtime.cache.values()))
    assert last.decision.mechanism == "slice"
    assert last.directions is not None
    assert last.misses == 0
    assert last.decision.timeline.peak_bytes <= plan.budget_bytes
    assert caplog.text.count('planned for mechanism "slice"') == 1


def test_slice_follows_it_from_the_start() -> None:
    assert_same_step(Counting, (rows(),), steps=4)
