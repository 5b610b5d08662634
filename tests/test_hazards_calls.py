"""What goes in and comes out: frozen parts, signatures, shared weights."""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

from tests.helpers import assert_same_step, default_loss, dropping_all

WIDTH = 16


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


def mlp(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*[p for _ in range(layers) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


# -- frozen parts, adapters -----------------------------------------------------------------------------------------


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.down, self.up = base.requires_grad_(False), nn.Linear(WIDTH, 2), nn.Linear(2, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + self.up(F.dropout(self.down(x), 0.2))


def adapted(frozen_prefix: int = 0) -> nn.Module:
    model = nn.Sequential(*[p for _ in range(6) for p in (Adapter(nn.Linear(WIDTH, WIDTH)), nn.Tanh())])
    model[: 2 * frozen_prefix].requires_grad_(False)
    return model


@pytest.mark.parametrize("requires_grad", [False, True])
def test_adapters_on_a_frozen_base_train(requires_grad: bool) -> None:
    x = rows()[0].requires_grad_(requires_grad)
    plan = assert_same_step(adapted, (x,))
    assert all(p.grad is not None for n, p in plan.model.named_parameters() if "down" in n or "up" in n)


def test_a_frozen_prefix_costs_nothing() -> None:
    plan = assert_same_step(lambda: adapted(3), rows())
    profile = plan.profile
    prefix = {i for i, op in enumerate(profile.ops) if op.module.split(".")[0] in ("0", "1", "2", "3", "4")}
    assert prefix
    assert not any(slot.op in prefix for slot in profile.slots)


# -- signatures -----------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: torch.Tensor
    second: Any


@dataclasses.dataclass
class Batch:
    x: torch.Tensor
    scale: float
    mask: torch.Tensor | None = None


@dataclasses.dataclass
class Result(ModelOutput):
    loss: torch.Tensor | None = None
    hidden: torch.Tensor | None = None


class Signature(nn.Module):
    """Takes and returns what `answer` makes of it."""

    def __init__(self, answer: str) -> None:
        super().__init__()
        self.body, self.answer, self.unused = mlp(), answer, nn.Linear(3, 3)

    def forward(self, x: Any, *rest: Any, mask: Any = None, extra: dict[str, Any] | None = None, **more: Any) -> Any:
        scale = 1.0
        if isinstance(x, Batch):
            x, scale, mask = x.x, x.scale, x.mask
        x = x["x"] if isinstance(x, dict) else x.first if isinstance(x, Pair) else x
        y = self.body(x if mask is None else x * mask) * scale
        if extra is not None:
            y = y + extra["shift"][0]
        other = y.sin()
        match self.answer:
            case "tuple":
                return y, None, other, 3
            case "pair":
                return Pair(y, {"other": other})
            case "dict":
                return {"y": y, "nothing": None, "deep": [other, (y,)]}
            case "batch":
                return Batch(y, 2.0)
            case "output":
                return Result(loss=y.sum(), hidden=other)
        return y.sum()


MASK = (torch.arange(512 * WIDTH).view(512, WIDTH) % 3 > 0).float()
ARGUMENTS = {
    "keyword": ((), {"x": rows()[0], "mask": MASK}),
    "none": ((rows()[0], None), {"mask": None}),
    "dict": (({"x": rows()[0], "unused": torch.ones(2, dtype=torch.long)},), {"extra": {"shift": [rows()[0]]}}),
    "named tuple": ((Pair(rows()[0], None),), {}),
    "dataclass": ((Batch(rows()[0], 0.5, MASK),), {}),
    "more": ((rows()[0], "text", 3.5, [1, 2]), {"option": True, "other": (1, None)}),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_of_every_sort(name: str) -> None:
    assert_same_step(lambda: Signature("tensor"), *ARGUMENTS[name], steps=2, tight=name == "keyword")


ANSWERS = {"tuple": tuple, "pair": Pair, "dict": dict, "batch": Batch, "output": Result}


@pytest.mark.parametrize("answer", ANSWERS)
def test_results_keep_their_types(answer: str) -> None:
    plan = assert_same_step(lambda: Signature(answer), rows(), steps=2, tight=answer == "tuple")
    result = plan.model(*rows())
    assert type(result) is ANSWERS[answer]


def test_an_output_that_is_not_used() -> None:
    assert_same_step(lambda: Signature("tuple"), rows(), loss_fn=lambda out: out[0].mean(), steps=2)


# -- shared weights -------------------------------------------------------------------------------------------------


def test_one_layer_six_times_fires_its_gradient_hook_once() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.fired = nn.Linear(WIDTH, WIDTH), []
            self.layer.weight.register_hook(lambda g: self.fired.append(float(g.sum())))
            self.layer.weight.register_post_accumulate_grad_hook(lambda p: self.fired.append(p.grad is not None))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(6):
                x = torch.tanh(self.layer(x))
            return x.sum()

    assert_same_step(Shared, rows(), observe=lambda m: [f for f in m.fired if m.layer.weight.grad is not None])


def test_tied_embedding_and_head() -> None:
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embedding, self.body, self.head = nn.Embedding(32, WIDTH), mlp(), nn.Linear(WIDTH, 32, bias=False)
            self.head.weight = self.embedding.weight

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            return F.cross_entropy(self.head(self.body(self.embedding(ids))), ids)

    plan = assert_same_step(Tied, (torch.arange(512) % 32,))
    assert plan.profile.parameter_bytes == sum(p.nbytes for p in Tied().parameters())


def test_two_models_share_a_module() -> None:
    torch.manual_seed(0)
    shared = mlp(3)
    first, second = nn.Sequential(shared, mlp(2)), nn.Sequential(mlp(2), shared)
    plans = [dropping_all(m, rows(), loss_fn=default_loss) for m in (first, second)]
    found = []
    for pair in ((first, second), [p.model for p in plans]):
        for p in shared.parameters():
            p.grad = None
        (default_loss(pair[0](*rows())) + default_loss(pair[1](*rows()))).backward()
        found.append([p.grad.clone() for p in shared.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
