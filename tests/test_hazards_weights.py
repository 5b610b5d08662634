"""Forwards that write into their own parameters, and into what they are given: planning leaves no trace of it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner import UnsupportedModelError, optimize
from tests.helpers import assert_same_step

WIDTH = 16


class Writes(nn.Module):
    """Four linear layers with a teacher, a mask and an embedding, used as `use` does."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.flat = nn.Parameter(torch.randn(4 * WIDTH * WIDTH))
        self.table = nn.Embedding(30, WIDTH, max_norm=0.7)
        self.register_buffer("mask", torch.rand(4 * WIDTH * WIDTH) * 0.9)

    def forward(self, x: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.use(x, *more)


def renormalised_embedding(self, x):
    x = x + self.table(torch.arange(len(x)) % 30)
    for linear in self.linears:
        x = torch.tanh(linear(x))
    return x.sum()


def moving_teacher(self, x):
    with torch.no_grad():
        self.teacher.weight.lerp_(self.linears[0].weight, 0.1)
    target = self.teacher(x)
    for linear in self.linears:
        x = torch.tanh(linear(x))
    return F.mse_loss(x, target)


def moving_teacher_by_data(self, x):
    self.teacher.weight.data.mul_(0.9).add_(self.linears[0].weight.data, alpha=0.1)
    for linear in self.linears:
        x = torch.tanh(linear(x)) + self.teacher(x).sin()
    return x.sum()


def masked_views_of_one_parameter(self, x):
    with torch.no_grad():
        self.flat.mul_(self.mask)
    for weight in self.flat.view(4, WIDTH, WIDTH):
        x = F.linear(x, weight).tanh() + x
    return x.sum()


def clipped(self, x):
    with torch.no_grad():
        for linear in self.linears:
            linear.weight.sub_(0.5 * linear.weight.clamp(-0.05, 0.05))
    for linear in self.linears:
        x = torch.tanh(linear(x))
    return x.sum()


USES = [renormalised_embedding, moving_teacher, moving_teacher_by_data, masked_views_of_one_parameter, clipped]


@pytest.mark.parametrize("use", USES)
def test_parameters_that_the_forward_writes_into(use) -> None:
    torch.manual_seed(0)
    assert_same_step(type("Writes", (Writes,), {"use": use}), (torch.randn(256, WIDTH),), tight=use is USES[0])


def test_what_forward_puts_into_its_arguments_is_no_input() -> None:
    def use(self, x, made):
        for linear in self.linears:
            x = torch.tanh(linear(x))
        made["hidden"] = x
        return x.sin().sum()

    torch.manual_seed(0)
    x = torch.randn(256, WIDTH)
    plan = assert_same_step(type("Writes", (Writes,), {"use": use}), (x, {}), steps=1, tight=False)
    assert plan.profile.input_bytes == x.nbytes


class MakesItsOwn(nn.Module):
    """Its first forward makes a part of it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not hasattr(self, "second"):
            self.second = nn.Linear(4, 4)
        return self.second(self.first(x).tanh()).sum()


@pytest.mark.parametrize("mechanism", ["slice", "torch"])
@pytest.mark.parametrize(
    ("make", "said"),
    [
        (MakesItsOwn, "makes parameters that were not there before: second.bias, second.weight"),
        (lambda: nn.Sequential(nn.LazyLinear(4), nn.Tanh()), "0.weight of Sequential has no shape yet"),
    ],
)
def test_parameters_that_are_not_there_yet(make, said: str, mechanism: str) -> None:
    model, args = make(), (torch.randn(8, 4),)
    how = {"loss_fn": torch.Tensor.sum, "mechanism": mechanism}
    with pytest.raises(UnsupportedModelError, match=said):
        optimize(model, "1GB", args, **how)
    model(*args)
    optimize(model, "1GB", args, **how).verify()
