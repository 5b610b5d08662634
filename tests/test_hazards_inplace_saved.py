"""Calls that work in place and save what they do not return: masks, noise, copies of what they overwrite."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_same_step, dropping_all, seed
from tests.test_hazards_inplace import Stack, rows, stack


def dropout(self, x, n):
    return nn.Dropout(0.3, inplace=True)(x)


def activation_and_dropout(self, x, n):
    return F.dropout(F.silu(x, inplace=True), 0.3, True, True)


def noise(self, x, n):
    return F.rrelu(x.sin(), training=True, inplace=True).cos()


def power(self, x, n):
    return x.sin().pow_(3)


def dropout_of_a_part(self, x, n):
    F.dropout(x[:, :4], 0.3, True, True)
    return x.sin()


def scaled_by_a_weight(self, x, n):
    with torch.no_grad():
        y = x.sin()
    return x.cos() + y.mul_(self.linears[n].bias).tanh()


@pytest.mark.parametrize(
    "middle", [dropout, activation_and_dropout, noise, power, dropout_of_a_part, scaled_by_a_weight]
)
def test_calls_that_save_and_write(middle) -> None:
    assert_same_step(stack(middle), rows(), tight=middle is dropout)


@pytest.mark.parametrize("middle", [dropout, activation_and_dropout, noise, power])
def test_what_only_such_a_call_saves_is_dropped(middle) -> None:
    plan = dropping_all(stack(middle)(), rows())
    saved = {s.storage for s in plan.profile.slots if plan.profile.storages[s.storage].kind == "hidden"}
    assert saved and saved <= set(plan.decision.solution.dropped)


@pytest.mark.parametrize("middle", [dropout, activation_and_dropout, power, scaled_by_a_weight])
def test_double_backward_through_such_a_call(middle) -> None:
    def second_order(call, model):
        seed(0)
        x = rows()[0].requires_grad_()
        (first,) = torch.autograd.grad(call(x), x, create_graph=True)
        model.zero_grad()
        first.square().sum().backward()
        return [p.grad for p in model.parameters()]

    model = stack(middle)()
    plan = dropping_all(model, rows())
    expected, found = second_order(model, model), second_order(plan.model, model)
    assert all(a is b if a is None else torch.equal(a, b) for a, b in zip(expected, found, strict=True))


class _Same(torch.autograd.Function):
    """What it gives back is kept."""

    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class TurnsInPlace(Stack):
    """From the third step on, what a replay reads is written over, which eager does not mind."""

    in_place = False

    def middle(self, x, n):
        x = _Same.apply(x)
        y = (x * 2).sin()
        return y + F.relu(x, inplace=self.in_place).sin()


def test_a_call_that_turns_to_work_in_place() -> None:
    def before(model, step):
        model.in_place = step > 1

    assert_same_step(TurnsInPlace, rows(), steps=4, before=before)
