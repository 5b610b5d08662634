"""Tensors that are not plain, made by what is not seen, or used in ways that are refused by name."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_planner import UnsupportedModelError, optimize
from tests.helpers import assert_same_step, default_loss

WIDTH, ROWS = 16, 256


def rows() -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(ROWS, WIDTH)


class Layers(nn.Module):
    """Four linear layers, and what `use` makes of them."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)])
        self.table = nn.EmbeddingBag(30, WIDTH, mode="mean", sparse=True)

    def forward(self, *args: Any) -> torch.Tensor:
        return self.use(*args)


def model(use):
    return type("Layers", (Layers,), {"use": use})


def sparse_matrix(self, x, a):
    for linear in self.linears:
        x = torch.relu(torch.sparse.mm(a, linear(x))) + x.sin()
    return x.sum()


def compressed_matrix(self, x, a):
    for linear in self.linears:
        x = torch.relu(a.to_sparse_csr() @ linear(x)) + x.sin()
    return x.sum()


def sparse_gradients(self, x):
    x = self.table(torch.arange(512) % 30, torch.arange(0, 512, 2)) + x
    for linear in self.linears:
        x = nn.functional.mish(linear(x))
    return x.sum()


class Tagged(torch.Tensor):
    """A class of its own over a plain storage."""


def own_class(self, x):
    x = x.as_subclass(Tagged)
    for linear in self.linears:
        x = linear(x).tanh()
    return x.as_subclass(torch.Tensor).sum()


def nested(self, *parts):
    ragged = torch.nested.as_nested_tensor(list(parts), layout=torch.jagged)
    for linear in self.linears:
        ragged = torch.tanh(linear(ragged))
    return torch.nested.to_padded_tensor(ragged, 0.0).square().sum()


def mapped(self, x):
    weights = torch.stack([linear.weight for linear in self.linears])
    for _ in range(3):
        x = torch.vmap(lambda w, y: torch.tanh(y @ w), (0, None))(weights, x).mean(0) + x.cos()
    return x.sum()


def called_functionally(self, x):
    base = copy.deepcopy(self.linears[0]).requires_grad_(False)
    for linear in self.linears:
        given = {"weight": linear.weight * 2, "bias": linear.bias}
        x = torch.func.functional_call(base, given, (x,)).tanh()
    return x.sum()


@torch.jit.script
def scripted_part(x: torch.Tensor, shift: torch.Tensor) -> torch.Tensor:
    return torch.tanh(x + shift) * torch.sigmoid(x)


def scripted(self, x):
    for linear in self.linears:
        x = scripted_part(linear(x), linear.bias)
    return x.sum()


def on_meta(self, x):
    for linear in self.linears:
        shape = torch.empty(x.shape, device="meta").flatten(1).shape
        x = torch.tanh(linear(x)).view(shape)
    return x.sum()


def adjacency() -> torch.Tensor:
    torch.manual_seed(1)
    where = torch.randint(0, ROWS, (2, 900))
    return torch.sparse_coo_tensor(where, torch.rand(900), (ROWS, ROWS)).coalesce()


RAGGED = tuple(torch.randn(n, WIDTH) for n in (60, 90, 120, 40))
USES = [
    (sparse_matrix, (rows(), adjacency())), (compressed_matrix, (rows(), adjacency())), (sparse_gradients, (rows(),)),
    (own_class, (rows(),)), (nested, RAGGED), (mapped, (rows(),)), (called_functionally, (rows(),)),
    (scripted, (rows(),)), (on_meta, (rows(),)),
]  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("use", "args"), USES, ids=[use.__name__ for use, _ in USES])
def test_tensors_that_are_not_plain(use, args) -> None:
    seldom = use in (own_class, nested, mapped, scripted)  # what they make is kept: nothing is left to drop
    plan = assert_same_step(model(use), args, steps=2, tight=False, drops=not seldom, lr=1e-3)
    real = plan.measure()
    assert real.peak_bytes <= 1.02 * plan.peak_bytes
    assert real.baseline_peak_bytes >= 0.9 * plan.baseline_peak_bytes, "counted twice"


def test_a_cache_that_outlives_the_first_run() -> None:
    @functools.lru_cache
    def positions(count: int) -> torch.Tensor:
        return torch.arange(count).float().div(count).cos()

    def use(self, x):
        for linear in self.linears:
            x = torch.tanh(linear(x) * positions(WIDTH))
        return x.sum()

    assert_same_step(model(use), (rows(),), steps=2, tight=False)


def inner_gradient(self, x):
    weight = self.linears[0].weight
    (gradient,) = torch.autograd.grad((x @ weight).square().mean(), weight, create_graph=True)
    return (x @ (weight - 0.1 * gradient)).sum()


def inner_transformation(self, x):
    return torch.func.grad(lambda y: self.linears[0](y).square().sum())(x).sum()


REFUSED = {inner_gradient: "differentiates inside its own forward", inner_transformation: "torch.func"}


@pytest.mark.parametrize("use", REFUSED)
def test_what_cannot_be_planned_is_refused_with_its_place(use) -> None:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = model(use)()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x.sin())

    line = use.__code__.co_firstlineno + 2 - (use is inner_transformation)
    with pytest.raises(UnsupportedModelError, match=REFUSED[use]) as found:
        optimize(Outer(), "100%", (rows(),), loss_fn=default_loss)
    assert f"module 'inner', test_hazards_odd_tensors.py:{line}" in str(found.value)


def test_compiled_functions_are_refused_with_their_place() -> None:
    compiled = torch.compile(lambda x: x.sin() * 2, backend="eager")

    def use(self, x):
        return compiled(self.linears[0](x)).sum()

    with pytest.raises(UnsupportedModelError, match=r"something compiled .* in the model itself, test_hazards_odd"):
        optimize(model(use)(), "100%", (rows(),), loss_fn=default_loss)


class Ensemble(nn.Module):
    """Stacked weights, run through a module on the meta device that only says how to compute."""

    def __init__(self) -> None:
        super().__init__()
        made = [nn.Linear(WIDTH, WIDTH) for _ in range(3)]
        stacked, _ = torch.func.stack_module_state(made)
        self.weights = nn.ParameterDict({name: nn.Parameter(p.detach()) for name, p in stacked.items()})
        self.how = copy.deepcopy(made[0]).to("meta")
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        def one(weights, x):
            return torch.func.functional_call(self.how, weights, (x,))

        every = torch.func.vmap(one, in_dims=(0, None))(dict(self.weights), x)
        return self.head(every.mean(0).tanh()).sin().exp().tanh()


def test_an_ensemble_through_a_module_on_meta() -> None:
    assert_same_step(Ensemble, (torch.randn(64, WIDTH),))
