"""Writes into what a replay is to read: by a second forward, through another look at it, or by a call only late."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner import CaptureError, optimize
from tests.helpers import default_loss, dropping_all, same, seed

ROWS, LATE, STEPS = 16, 4, 7  # by step LATE everything is familiar


class Model(nn.Module):
    """What the models below are made of."""

    def __init__(self) -> None:
        super().__init__()
        self.late = False
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(16)) for _ in range(4)])
        self.norm, self.linear = nn.BatchNorm1d(16), nn.Linear(16, 16)
        self.register_buffer("table", torch.rand(24, 16))
        self.register_buffer("other", torch.rand(24, 16))
        self.register_buffer("count", torch.zeros(()))


class ReadsStatistics(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.sin(self.norm(self.linear(x))) + self.norm.running_mean).sum()


class DividesByStatistics(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.sin(self.norm(self.linear(x)))
        return (torch.exp(y) / (self.norm.running_var + 1).sqrt().detach()).cos().sum()


class Counts(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.count.add_(1)
        return torch.exp(torch.sin(self.linear(x)) + self.count * 0.1).sum()


class Spectral(Model):
    """Its vectors are copied in each forward so that several may come before a backward."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.utils.parametrizations.spectral_norm(nn.Linear(16, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)).sin().exp().sum()


class MadeWhileLost(Model):
    """A result that the plan knows is made by a call that it does not, then looked at and written through."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.late:
            x = x * 0.5
        t = torch.sin(x * self.scales[0])
        q = torch.cos(torch.tanh(torch.sigmoid(x))).sin()
        left, again = t.view(-1, 8), t.view(-1, 16)
        left.mul_(0.5)
        return torch.exp(again * self.scales[1]).sum() + q.sum()


class OfAnotherGroup(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second = torch.sin(x * self.scales[0]), torch.sin(x * self.scales[1])
        (first if self.late else second).view(-1).relu_()
        return (first * self.scales[2]).sum() + (second * self.scales[3]).sum()


class AliasOfACopy(Model):
    """`contiguous` makes a tensor or gives back the one that it was given."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = self.table.narrow(0, 1, 16).transpose(0, 0) if self.late else self.table.narrow(0, 0, 16).transpose(0, 1)
        few = rows.contiguous()[:4]
        total = torch.exp(few * self.scales[0]).sum() + (x * self.scales[1]).exp().sum()
        (self.other if self.late else self.table).add_(1)
        return total


def statistics_late(how: Any) -> type[Model]:
    class Late(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            norm = self.norm
            y = torch.exp(torch.sin(x * self.scales[0]) + norm.running_mean)
            z = how(y, norm.weight, norm.bias, norm.running_mean, norm.running_var, self.late)
            return z.sum() + (y * self.scales[1]).sum()

    return Late


class Renormalised(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.exp(torch.sin(x[:8] * self.scales[0]) + self.table[:8])
        e = F.embedding(torch.arange(8), self.table, max_norm=0.5 if self.late else None)
        return (y * self.scales[1]).sum() + (e * self.scales[2]).sum()


LATE_WRITES = {
    "made while lost": MadeWhileLost,
    "of another group": OfAnotherGroup,
    "an alias of a copy": AliasOfACopy,
    "torch.batch_norm": statistics_late(lambda *given: torch.batch_norm(*given, 0.1, 1e-5, False)),
    "native_batch_norm": statistics_late(lambda *given: torch.native_batch_norm(*given, 0.1, 1e-5)[0]),
    "an operator": statistics_late(lambda *given: torch.ops.aten.native_batch_norm.default(*given, 0.1, 1e-5)[0]),
    "instance_norm": statistics_late(
        lambda y, *given: torch.instance_norm(y[None].transpose(1, 2), *given, 0.1, 1e-5, False).transpose(1, 2)[0]
    ),
    "a renormalised table": Renormalised,
}


def steps(make: type[Model], forwards: int, plan: bool, mechanism: str = "slice") -> list[Any]:
    seed(1)
    model, x = make(), torch.randn(ROWS, 16)
    call: Any = model
    if plan and mechanism == "slice":
        call = dropping_all(model, (x,), loss_fn=default_loss).model
    elif plan:
        call = optimize(model, 1 << 40, (x,), strategy="all", loss_fn=default_loss, mechanism=mechanism).model
    found: list[Any] = []
    for step in range(STEPS):
        model.late = step >= LATE
        model.zero_grad()
        seed(step)
        default_loss([call(x + number) for number in range(forwards)]).backward()
        found += [p.grad for p in model.parameters()] + [b.clone() for b in model.buffers()]
    return found


def assert_equal_steps(make: type[Model], forwards: int, mechanism: str = "slice") -> None:
    expected = steps(make, forwards, plan=False)
    assert all(map(same, expected, steps(make, forwards, plan=True, mechanism=mechanism)))


@pytest.mark.parametrize("make", [ReadsStatistics, DividesByStatistics, Counts, Spectral])
@pytest.mark.parametrize("mechanism", ["slice", "torch"])
def test_a_second_forward_before_backward_that_changes_a_buffer(make: type[Model], mechanism: str) -> None:
    assert_equal_steps(make, 2, mechanism)


@pytest.mark.parametrize("name", LATE_WRITES)
def test_a_write_that_comes_late(name: str) -> None:
    assert_equal_steps(LATE_WRITES[name], 1)


class OnWhatWasSaved(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.sigmoid(x * self.scales[0])
        second = first + 0.5
        (first if self.late else second).mul_(0.5)
        return (second * self.scales[1]).exp().sum() + (first * self.scales[2]).sum()


class SavedForNothingAtFirst(Model):
    """Backward comes to read only late what was saved before a write."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first = torch.sin(x * self.scales[0])
        second = first + 0.5
        wave = torch.sin(second)
        second.mul_(0.5)
        total = (second * self.scales[1]).exp().sum()
        return total + wave.sum() if self.late else total


@pytest.mark.parametrize("make", [OnWhatWasSaved, SavedForNothingAtFirst])
def test_a_write_into_what_was_saved_raises_as_in_eager(make: type[Model]) -> None:
    model, x = make(), torch.randn(ROWS, 16)
    plan = dropping_all(model, (x,), loss_fn=default_loss)
    for step in range(STEPS):
        model.late = step >= LATE
        for call in (model, plan.model):
            if model.late:  # the planned one may measure the changed step, and fail there
                with pytest.raises((RuntimeError, CaptureError), match="modified by an inplace operation"):
                    default_loss(call(x)).backward()
            else:
                default_loss(call(x)).backward()
