"""Calls whose options are others late, views that nobody may ask for their node, writes that write nothing."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner.problem import make_problem
from tests.helpers import default_loss, dropping_all, same, seed
from tests.test_nesting import carried_out

ROWS, LATE = 16, 6  # in the step LATE, the last, everything is familiar
OWN = torch.Generator()
ARRAY = np.ones((16, 16), dtype=np.float32)


class Switch:
    """Nothing that a plan sees."""

    late = False


class Model(nn.Module):
    """What the models below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(16) + 0.5) for _ in range(4)])


class Generator(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        share = (x * self.scales[0]).sigmoid()
        drawn = torch.bernoulli(share.detach(), generator=OWN if Switch.late else None)
        return ((drawn * self.scales[1]).exp() * share).sum()


class Array(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tensor(ARRAY if Switch.late else ((1.0,) * 16,) * 16)
        return ((x * self.scales[0]).sin() * made * self.scales[1]).exp().sum()


class Buffer(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.tensor(memoryview(bytearray(16)) if Switch.late else (0.0,) * 16)
        return ((x * self.scales[0]).sin() + made).exp().mul(self.scales[1]).sum()


class StaleViews(Model):
    """Whoever asks one of these views for its node changes the order in which gradients are added up."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = x.sin() * self.scales[1]
        first, second = base[:], base.view(8, 32).view(16, 16)
        base.mul_(0.5)
        larger = first > second
        chosen = torch.where(larger, first, second * 0.5)
        parts = (base * self.scales[2]).exp().mean() * 3, (first * 1.1).exp().mean(), (second * 0.7).exp().mean()
        return sum(parts) + chosen.sin().mean() * 0.37  # type: ignore[return-value]


class StaleChunks(Model):
    """And here, the node cannot be made."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        base = x.sin() * self.scales[1]
        left, right = base.chunk(2, 0)
        base.mul_(0.5)
        return torch.where(left > right, base[:8].exp(), base[8:] * self.scales[2]).sum()


class OutOfPlace(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (x * self.scales[0]).sigmoid()
        second = first + 0.5
        third = F.relu(first if Switch.late else second, inplace=not Switch.late)
        return (first * self.scales[1]).exp().sum() + (third * self.scales[2]).sum()


class Caught(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = (x * self.scales[0]).sigmoid()
        second = first + 0.5
        try:
            third = (first if Switch.late else second).mul_(torch.ones(3, 16) if Switch.late else 2.0)
        except RuntimeError:
            third = second * 2.0
        return (first * self.scales[1]).exp().sum() + (third * self.scales[2]).sum()


def steps(make: type[Model], plan: bool, nested: bool = False) -> list[Any]:
    seed(1)
    Switch.late = False
    model, x = make(), torch.randn(ROWS, 16, requires_grad=True)
    call: Any = model
    if plan:
        made = dropping_all(model, (x,), loss_fn=default_loss)
        if nested:
            problem = make_problem(made.profile, 1 << 40)
            values = [s for s in problem.candidates if made.profile.storages[s].kind != "hidden"]
            carried_out(made, problem.judge(problem.candidates, values[1::3]))
        call = made.model
    found: list[Any] = []
    for step in range(LATE + 1):
        Switch.late = step == LATE
        model.zero_grad()
        own = x.detach().clone().requires_grad_()
        seed(step)
        OWN.manual_seed(1)
        ARRAY[:] = 1
        loss = default_loss(call(own))
        ARRAY[:] = 2
        loss.backward()
        found += [p.grad for p in model.parameters()] + [own.grad, OWN.get_state()]
    return found


@pytest.mark.parametrize("make", [Generator, Array, Buffer, StaleViews, StaleChunks, OutOfPlace, Caught])
@pytest.mark.parametrize("nested", [False, True])
def test_steps_have_the_values_of_eager(make: type[Model], nested: bool) -> None:
    assert all(map(same, steps(make, False), steps(make, True, nested)))
