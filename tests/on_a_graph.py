"""Plans for mechanisms that run a captured graph, and models with all that a graph has to repeat."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from ckpt_planner import InfeasibleBudgetError, Plan, optimize
from tests.helpers import differences, one_step

TOLERANCE = 0.02


def planned(
    mechanism: str, model: nn.Module, args: Any = (), kwargs: Any = None, share: float = 0.6, **options: Any
) -> Plan:
    """A plan at a share of the plain step's memory, or at the least that this mechanism can keep."""
    call = {"example_args": args, "example_kwargs": kwargs, "mechanism": mechanism, **options}
    plain = optimize(model, 1 << 40, **call)
    resident = plain.profile.resident_bytes
    budget = resident + int(share * (plain.baseline_peak_bytes - resident))
    try:
        return optimize(model, budget, **call)
    except InfeasibleBudgetError as error:
        assert budget < error.minimum_bytes
        return optimize(model, error.minimum_bytes, **call)


def assert_kept_as_predicted(plan: Plan) -> None:
    real = plan.measure()
    assert real.peak_bytes <= plan.budget_bytes
    assert abs(plan.peak_bytes - real.peak_bytes) <= TOLERANCE * real.peak_bytes
    plan.verify()


def assert_same_steps(
    plan: Plan, model: nn.Module, args: Any, kwargs: Any, loss_fn: Any = None, steps: int = 3
) -> None:
    """Train a twin of the model in eager beside the planned one."""
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (twin, model)]
    for number in range(steps):
        expected = one_step(twin, twin, args, kwargs, loss_fn, number)
        assert differences(expected, one_step(plan.model, model, args, kwargs, loss_fn, number)) == []
        for optimizer in optimizers:
            optimizer.step()


class Wide(nn.Module):
    """Dropout, statistics, a counter that is used, noise and a slice that is written, at each level."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(8))
        self.drop, self.scale = nn.Dropout(0.3), 1.0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for lin, norm in zip(self.lins, self.norms, strict=True):
            self.count += 1
            y = torch.zeros_like(x)
            y[1:] = norm(lin(x))[:-1]
            x = x + torch.relu_(self.drop(torch.tanh(y)) * self.count.cos() * self.scale)
            x = x + 0.01 * torch.rand_like(x)
        return x.pow(2).mean()


def rows(number: int = 256) -> torch.Tensor:
    return torch.randn(number, 32)


class Branching(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = super().forward(x)
        if bool(x.detach().sum() > 0):
            return early
        return early * 2 + self.lins[0](x).sum()
