"""Randomness of every sort, choices, recurrent layers."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import assert_same_step

ROWS, WIDTH = 512, 16
LAYERS = 6


class Stack(nn.Module):
    """Linear, `self.middle`, Tanh, six times."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

    def middle(self, x: torch.Tensor, layer: int) -> torch.Tensor:
        raise NotImplementedError

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, linear in enumerate(self.linears):
            x = torch.tanh(self.middle(linear(x), number))
        return x.sum()


def stack(middle):
    """A class of models like `Stack` with another middle."""
    return lambda: type("Stack", (Stack,), {"middle": middle})()


def inputs() -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(ROWS, WIDTH),)


RANDOM_OPERATIONS = {
    "dropout": lambda self, x, n: F.dropout(x, 0.3),
    "rrelu": lambda self, x, n: F.rrelu(x, training=True),
    "alpha_dropout": lambda self, x, n: F.alpha_dropout(x, 0.2, training=True),
    "feature_alpha_dropout": lambda self, x, n: F.feature_alpha_dropout(x[:, :, None], 0.2, training=True)[:, :, 0],
    "dropout1d": lambda self, x, n: F.dropout1d(x[:, :, None], 0.4)[:, :, 0],
    "bernoulli": lambda self, x, n: x * torch.bernoulli(torch.sigmoid(x.detach())),
    "rand_like": lambda self, x, n: x + torch.rand_like(x),
    "randn": lambda self, x, n: x * torch.randn(x.shape),
    "normal_": lambda self, x, n: x + torch.empty_like(x).normal_(),
    "uniform_": lambda self, x, n: x * x.new_empty(x.shape).uniform_(0.5, 1.5),
    "exponential_": lambda self, x, n: x * torch.ones_like(x).exponential_(),
    "randint_like": lambda self, x, n: x * torch.randint_like(x, 0, 3),
    "multinomial": lambda self, x, n: x * torch.multinomial(x.detach().softmax(-1), 1).float(),
    "gumbel_softmax": lambda self, x, n: x * F.gumbel_softmax(x, hard=bool(n % 2)),
    "poisson": lambda self, x, n: x * torch.poisson(x.detach().exp()),
    "randperm": lambda self, x, n: x[torch.randperm(len(x))],
    "dropout_": lambda self, x, n: F.dropout(x + 0.0, 0.3, inplace=True),
}


@pytest.mark.parametrize("name", RANDOM_OPERATIONS)
def test_torch_random_operations_draw_once(name: str) -> None:
    plan = assert_same_step(stack(RANDOM_OPERATIONS[name]), inputs(), steps=2, tight=name == "dropout")
    assert any(op.random for op in plan.profile.ops)


@pytest.mark.parametrize("name", ["dropout", "rand_like", "rrelu", "bernoulli", "normal_"])
def test_random_operations_run_again_with_the_same_draws(name: str) -> None:
    plan = assert_same_step(stack(RANDOM_OPERATIONS[name]), inputs(), steps=2, tight=False)
    again = {plan.profile.ops[i] for i in plan.decision.schedule.again}
    assert any(op.random for op in again)


def test_dropout_within_attention() -> None:
    class Attention(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one = nn.MultiheadAttention(WIDTH, 2, dropout=0.2, batch_first=True)
            self.two = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.2, batch_first=True)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.one(x, x, x, need_weights=False)[0]
            x = x + F.scaled_dot_product_attention(x[:, None], x[:, None], x[:, None], dropout_p=0.3)[:, 0]
            return self.two(x).sum()

    assert_same_step(Attention, (torch.randn(16, 12, WIDTH),), steps=2)


def test_a_probability_that_was_zero_when_planned() -> None:
    """Dropout of 0 draws nothing; that the same call draws later has to be noticed."""

    def before(model: nn.Module, step: int) -> None:
        model.p = (0.0, 0.5, 0.3)[step]

    def middle(self, x, n):
        return F.dropout(x, getattr(self, "p", 0.0))

    assert_same_step(stack(middle), inputs(), before=before)


def python_choice(self, x, n):
    return x * 2 if random.random() < 0.5 else x.sin()


def python_scale(self, x, n):
    return x * random.uniform(0.5, 1.5)


def numpy_scale(self, x, n):
    return x * float(np.random.rand()) + np.random.randn()


def numpy_mask(self, x, n):
    return x * torch.from_numpy(np.random.rand(*x.shape).astype("f4"))


def numpy_as_tensor(self, x, n):
    return x * torch.tensor(np.random.rand(*x.shape).astype("f4"))


def numpy_buffer_reused(self, x, n):
    if not hasattr(self, "scratch"):
        self.scratch = np.zeros(x.shape, "f4")
    self.scratch[:] = np.random.rand(*x.shape)
    return x * torch.tensor(self.scratch)


def layer_drop(self, x, n):
    return x if np.random.rand() < 0.3 else x + self.linears[n](x)


def own_generator(self, x, n):
    if not hasattr(self, "generator"):
        self.generator = torch.Generator().manual_seed(7)
    return x * torch.rand(x.shape, generator=self.generator)


def own_generator_in_place(self, x, n):
    if not hasattr(self, "generator"):
        self.generator = torch.Generator().manual_seed(7)
    return x + torch.empty_like(x).normal_(generator=self.generator)


def seeded_within(self, x, n):
    torch.manual_seed(int(x.detach().abs().sum()) % 1000)
    return F.dropout(x, 0.3)


def forked(self, x, n):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3 + n)
        x = x * torch.rand_like(x)
    return F.dropout(x, 0.1)


FOREIGN = [
    python_choice, python_scale, numpy_scale, numpy_mask, numpy_as_tensor, numpy_buffer_reused, layer_drop,
    own_generator, own_generator_in_place, seeded_within, forked,
]  # fmt: skip


@pytest.mark.parametrize("middle", FOREIGN)
def test_randomness_outside_the_default_generators(middle) -> None:
    assert_same_step(stack(middle), inputs(), tight=middle is FOREIGN[0])


class Router(nn.Module):
    """Each row goes to the experts that score best, by `choose`."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 4)
        self.experts = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU()) for _ in range(4)])

    def choose(self, scores: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return scores.topk(2, dim=-1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.gate(x).softmax(-1)
        weights, chosen = self.choose(scores)
        out = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows, column = torch.where(chosen == number)
            if len(rows):
                out.index_add_(0, rows, expert(x[rows]) * weights[rows, column, None])
        return out.sum()


def multinomial(self, scores):
    chosen = torch.multinomial(scores.detach(), 2)
    return scores.gather(-1, chosen), chosen


def sorting(self, scores):
    values, order = scores.sort(-1, descending=True)
    return values[:, :2], order[:, :2]


def first_best(self, scores):
    chosen = scores.argmax(-1, keepdim=True)
    return scores.gather(-1, chosen), chosen


def noisy(self, scores):
    chosen = (scores.detach() + 0.1 * torch.randn_like(scores)).topk(2, -1).indices
    return scores.gather(-1, chosen), chosen


def threshold(self, scores):
    weights, chosen = scores.topk(2, -1)
    return weights * (weights > 0.25), chosen


@pytest.mark.parametrize("choose", [Router.choose, multinomial, sorting, first_best, noisy, threshold])
def test_a_routers_choices_are_kept(choose) -> None:
    plan = assert_same_step(type("Router", (Router,), {"choose": choose}), inputs(), tight=choose is Router.choose)
    dropped = set(plan.decision.solution.dropped)
    assert not dropped & {s for op in plan.profile.ops for s in op.choices}


def test_near_ties_go_to_the_same_expert() -> None:
    def flat() -> nn.Module:
        model = Router()
        nn.init.zeros_(model.gate.weight)
        nn.init.zeros_(model.gate.bias)
        return model

    assert_same_step(flat, inputs(), lr=1e-6)


@pytest.mark.parametrize("kind", ["LSTM", "GRU", "RNN"])
def test_recurrent_layers_with_dropout(kind: str) -> None:
    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, WIDTH)
            self.layers = getattr(nn, kind)(WIDTH, WIDTH, num_layers=3, dropout=0.2, batch_first=True)
            self.last = nn.Linear(WIDTH, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            out, _ = self.layers(torch.tanh(self.first(x)))
            return self.last(torch.tanh(out)).sum()

    assert_same_step(Recurrent, (torch.randn(32, 12, 8),), steps=2, tight=kind == "LSTM")


def test_recurrent_layers_on_packed_sequences() -> None:
    class Packed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell, self.layers = nn.LSTMCell(WIDTH, WIDTH), nn.LSTM(WIDTH, WIDTH, bidirectional=True)
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
            packed = nn.utils.rnn.pack_padded_sequence(self.first(x).tanh(), lengths, enforce_sorted=False)
            out, _ = nn.utils.rnn.pad_packed_sequence(self.layers(packed)[0])
            h = self.cell(x[0])
            return out.sum() + self.cell(x[1], h)[0].sum()

    assert_same_step(Packed, (torch.randn(12, 32, WIDTH), torch.randint(3, 13, (32,))), steps=2, tight=False)
