"""Autocast, custom functions, double backward, several backwards."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.helpers import assert_same_step, default_loss, dropping_all, planned, replayed

WIDTH = 16


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


def mlp(layers: int = 6) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[p for _ in range(layers) for p in (nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh())])


# -- autocast -------------------------------------------------------------------------------------------------------


class Cast(nn.Module):
    """Autocast inside, a shared weight used under it and outside of it."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.dtype, self.shared, self.body = dtype, nn.Linear(WIDTH, WIDTH), mlp(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=self.dtype):
            x = torch.tanh(self.shared(self.body(self.shared(x))))
            with torch.autocast("cpu", enabled=False):
                x = torch.tanh(self.shared(x.float()))
            x = self.shared(x.sin())
        return self.shared(x.float()).sum()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_inside_the_model(dtype: torch.dtype) -> None:
    plan = assert_same_step(lambda: Cast(dtype), rows(), tight=dtype is torch.bfloat16)
    assert "linear" in replayed(plan)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_around_the_model(dtype: torch.dtype) -> None:
    plan = assert_same_step(
        lambda: nn.Sequential(mlp(), nn.Linear(WIDTH, WIDTH)), rows(), around=lambda: torch.autocast("cpu", dtype=dtype)
    )
    assert "linear" in replayed(plan)


def test_another_autocast_state_is_planned_again() -> None:
    plain, model = mlp(), mlp()
    plan = planned(model, rows(), loss_fn=default_loss)
    for dtype in (None, torch.bfloat16, torch.float16, None, torch.bfloat16):
        found = []
        for call, m in ((plain, plain), (plan.model, model)):
            m.zero_grad()
            torch.manual_seed(1)
            with torch.autocast("cpu", dtype=dtype or torch.bfloat16, enabled=dtype is not None):
                loss = default_loss(call(*rows()))
            loss.backward()
            found.append([loss.detach(), *[p.grad.clone() for p in m.parameters()]])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    assert len(plan._runtime.cache) == 3


# -- custom functions -----------------------------------------------------------------------------------------------


class Saves(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, scale):
        y = torch.sin(x) * scale
        ctx.save_for_backward(x, y)
        ctx.scale = scale
        return y + x

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        return gradient * (x.cos() * ctx.scale + 1) + 0 * y, None


class OnContext(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.inner = torch.exp(-x * x)
        return ctx.inner * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.inner


class NewStyle(torch.autograd.Function):
    @staticmethod
    def forward(x):
        return x.tanh(), x.argmax(-1)

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output[0])
        ctx.mark_non_differentiable(output[1])

    @staticmethod
    def backward(ctx, gradient, _):
        (y,) = ctx.saved_tensors
        return gradient * (1 - y * y)


class Changes(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


FUNCTIONS = {
    "save_for_backward": lambda x: Saves.apply(x, 1.5),
    "on ctx": OnContext.apply,
    "setup_context": lambda x: NewStyle.apply(x)[0],
    "mark_dirty": lambda x: Changes.apply(x.sin()),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_custom_functions(name: str) -> None:
    class Custom(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = FUNCTIONS[name](torch.tanh(linear(x)).sigmoid()).cos()
            return x.sum()

    plan = assert_same_step(Custom, rows(), tight=name == "on ctx")
    real = plan.measure()
    assert real.peak_bytes <= 1.02 * plan.peak_bytes


# -- several backwards ----------------------------------------------------------------------------------------------


def gradients(model: nn.Module) -> list[torch.Tensor]:
    return [p.grad.clone() for p in model.parameters()]


def compare(run) -> None:
    """`run(call)` on the plain model, at a tight budget and with everything dropped leaves the same gradients."""
    found = []
    for make_plan in (None, planned, dropping_all):
        model = mlp()
        call = make_plan(model, rows(), loss_fn=default_loss).model if make_plan else model
        model.zero_grad()
        torch.manual_seed(5)
        extra = run(call)
        found.append([*gradients(model), *(extra or [])])
    for other in found[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found[0], other, strict=True))


def test_retain_graph() -> None:
    def run(call):
        loss = default_loss(call(*rows()))
        loss.backward(retain_graph=True)
        (loss * 0.5).backward(retain_graph=True)
        loss.backward()

    compare(run)


def test_gradient_penalty() -> None:
    def run(call):
        x = rows()[0].requires_grad_()
        out = call(x)
        (inner,) = torch.autograd.grad(out.sum(), x, create_graph=True)
        loss = (inner.norm(dim=-1) - 1).pow(2).mean() + out.mean()
        loss.backward()
        return [x.grad]

    compare(run)


def test_second_order_meta_learning() -> None:
    def run(call):
        loss = default_loss(call(*rows()))
        inner = torch.autograd.grad(loss, list(call.parameters()), create_graph=True)
        sum(g.pow(2).sum() for g in inner).backward()

    compare(run)


def test_gradients_of_chosen_tensors() -> None:
    def run(call):
        loss = default_loss(call(*rows()))
        chosen = list(call.parameters())[4:6]
        first = torch.autograd.grad(loss, chosen, retain_graph=True)
        loss.backward(inputs=list(call.parameters()))
        return list(first)

    compare(run)


def test_gradient_accumulation_over_four_batches() -> None:
    def run(call):
        for number in range(4):
            (default_loss(call(rows()[0] * (number + 1))) / 4).backward()

    compare(run)


def test_several_forwards_before_one_backward() -> None:
    def run(call):
        sum(default_loss(call(rows()[0] + number)) for number in range(3)).backward()

    compare(run)


def test_backwards_in_another_order_than_the_forwards() -> None:
    def run(call):
        losses = [default_loss(call(rows()[0] + number)) for number in range(3)]
        for number in (1, 2, 0):
            losses[number].backward()

    compare(run)


def test_an_output_fed_back_into_the_model() -> None:
    def run(call):
        x = call(*rows())
        default_loss(call(call(x))).backward()

    compare(run)


def test_backward_twice_without_retaining_raises_as_in_eager() -> None:
    model = mlp()
    for call in (model, dropping_all(model, rows(), loss_fn=default_loss).model):
        loss = default_loss(call(*rows()))
        loss.backward()
        with pytest.raises(RuntimeError, match="backward through the graph a second time"):
            loss.backward()
