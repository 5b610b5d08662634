"""In-place work: activations, writes into views, weights that change, detached and integer parts."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_same_step, default_loss, dropping_all, planned

WIDTH = 16


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


class Stack(nn.Module):
    """Linear and `self.middle`, six times."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.table = nn.Embedding(9, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, linear in enumerate(self.linears):
            x = self.middle(linear(x), number)
        return x.sum()


def stack(middle):
    return lambda: type("Stack", (Stack,), {"middle": middle})()


def relu_first(self, x, n):
    x = F.relu(x, inplace=True)
    return x.sin()


def sigmoid_in_place(self, x, n):
    return (x * 0.5).sigmoid_().tanh()


def chained(self, x, n):
    y = x.exp().clamp(max=4)
    y.mul_(0.5).add_(1)
    y += x
    return y.sin()


def kept_written(self, x, n):
    y = x.sin()
    x = x * 1.5
    x += y
    return x.tanh()


def residual_in_place(self, x, n):
    y = F.gelu(x)
    y += x
    return F.leaky_relu(y, 0.1, inplace=True).cos()


def out_argument(self, x, n):
    with torch.no_grad():
        made = torch.empty_like(x)
        torch.sin(x, out=made)
    return x.tanh() * made


def detached_write(self, x, n):
    y = x.sin()
    y.detach().mul_(0.5)
    return y + x.tanh()


def data_write(self, x, n):
    y = torch.zeros_like(x)
    y.data.copy_(x.data.cos())
    return x.sin() * y


def normalised_in_place(self, x, n):
    y = x.clone()
    y.sub_(y.mean(0)).div_(3.0)
    return y.tanh()


IN_PLACE = [
    relu_first, sigmoid_in_place, chained, kept_written, residual_in_place, out_argument, detached_write, data_write,
    normalised_in_place,
]  # fmt: skip


@pytest.mark.parametrize("middle", IN_PLACE)
def test_in_place_operations(middle) -> None:
    assert_same_step(stack(middle), rows(), tight=middle is IN_PLACE[0])


def test_an_input_that_is_written_into() -> None:
    def middle(self, x, n):
        return x.tanh()

    class Writes(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x.mul_(0.5)
            first = self.linears[0](x.clone()).tanh()
            x.add_(1)
            return first.sum() + super().forward(x)

    assert_same_step(lambda: type("Writes", (Writes,), {"middle": middle})(), rows())


def indexed(self, x, n):
    y = torch.zeros_like(x)
    y[torch.arange(0, len(x), 2)] = x[::2].sin()
    return y + x.cos()


def sliced(self, x, n):
    y = torch.zeros_like(x)
    y[:, : WIDTH // 2] = x[:, WIDTH // 2 :].sin()
    y[:, WIDTH // 2 :] = x[:, : WIDTH // 2].tanh()
    return y.sigmoid()


def masked(self, x, n):
    y = x.clone()
    y[x > 0.5] = 0.25
    return y.sin()


def view_written(self, x, n):
    y = x.sin()
    y.view(-1)[::3].mul_(0.5)
    y.t()[1].add_(1)
    return y.tanh()


def halves_written(self, x, n):
    y = x.clone()
    left, right = y[:, : WIDTH // 2], y[:, WIDTH // 2 :]
    left.mul_(2)
    right.copy_(x[:, WIDTH // 2 :].sin())
    return y.sigmoid()


def scattered(self, x, n):
    index = (x.detach().abs() * 7).long() % WIDTH
    y = torch.zeros_like(x).scatter_add_(1, index, x.sin())
    y.index_fill_(1, torch.tensor([2]), 0.5)
    return y.tanh()


def read_then_written(self, x, n):
    y = x.sin()
    a = y[:, 0].clone()
    y[:, 0] = 0
    return y.tanh() + a[:, None].cos()


def filled_buffer(self, x, n):
    made = x.new_empty(3, *x.shape)
    for k in range(3):
        made[k] = (x * (k + 1)).sin()
    return made.tanh().sum(0)


def strided(self, x, n):
    y = torch.as_strided(x.sin(), (len(x), WIDTH // 2), (WIDTH, 2))
    return torch.cat([y.tanh(), y.cos()], -1)


VIEWS = [indexed, sliced, masked, view_written, halves_written, scattered, read_then_written, filled_buffer, strided]


@pytest.mark.parametrize("middle", VIEWS)
def test_writes_into_views(middle) -> None:
    assert_same_step(stack(middle), rows(), tight=middle is VIEWS[0])


def detached(self, x, n):
    return x * x.detach().sigmoid()


def no_grad_part(self, x, n):
    with torch.no_grad():
        scale = x.norm(dim=-1, keepdim=True)
        other = x.sin()
    return (x / scale).tanh() + other.cos()


def integers(self, x, n):
    index = (x.detach().sum(-1).abs() * 3).long() % 9
    return (x + self.table(index)).tanh() * (index > 3).float()[:, None]


def frozen_head(self, x, n):
    return x.tanh() + self.frozen(x).sin()


def no_grad_decorated(self, x, n):
    @torch.no_grad()
    def teacher(value):
        return self.frozen(value).tanh()

    return (x - teacher(x)).pow(2).sigmoid()


def inference_part(self, x, n):
    with torch.inference_mode():
        made = float(x.sin().mean())
    return x.tanh() * made


def gradient_within(self, x, n):
    with torch.no_grad():
        y = x.cos()
        with torch.enable_grad():
            z = x.sin()
    return z * y


def straight_through(self, x, n):
    return x.tanh() + (x.round() - x).detach()


def complex_part(self, x, n):
    return torch.fft.irfft(torch.fft.rfft(x.tanh()) * 0.9, n=WIDTH).sin()


NO_GRAD = [
    detached, no_grad_part, integers, frozen_head, no_grad_decorated, inference_part, gradient_within, straight_through,
    complex_part,
]  # fmt: skip


@pytest.mark.parametrize("middle", NO_GRAD)
def test_detached_and_integer_parts(middle) -> None:
    assert_same_step(stack(middle), rows(), tight=middle is NO_GRAD[0])


@pytest.mark.parametrize("make_plan", [planned, dropping_all])
def test_weights_changed_before_backward_raise_as_in_eager(make_plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[p for _ in range(6) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    plan = make_plan(model, rows(), loss_fn=default_loss)
    for call in (model, plan.model):
        loss = default_loss(call(*rows()))
        with torch.no_grad():
            model[2].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
        model.zero_grad()
    plan.verify()


@pytest.mark.parametrize("make_plan", [planned, dropping_all])
def test_an_input_changed_before_backward_raises(make_plan) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*[p for _ in range(6) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    plan = make_plan(model, rows(), loss_fn=default_loss)
    (x,) = rows()
    loss = default_loss(plan.model(x))
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_output_changed_before_backward() -> None:
    """Eager forbids it where backward reads the output, and allows it elsewhere."""
    torch.manual_seed(0)
    model = nn.Sequential(*[p for _ in range(6) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    for call in (model, plan.model):
        output = call(*rows())
        loss = output.sum()
        with torch.no_grad():
            output.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_optimizer_steps_between_two_forwards_and_their_backwards() -> None:
    """The first loss's graph read weights that have changed since: eager raises, and so does the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*[p for _ in range(6) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    first, second = (default_loss(plan.model(*rows())) for _ in range(2))
    second.backward()
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        first.backward()
