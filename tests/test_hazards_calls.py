"""What goes in and comes out: frozen parts, signatures, shared weights, caches, modes and shapes, paths."""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

from ckpt_planner import optimize
from tests.helpers import assert_same_step, default_loss, differences, dropping_all, one_step, planned, replayed

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
    assert_same_step(lambda: Signature("tensor"), *ARGUMENTS[name], steps=2)


ANSWERS = {"tuple": tuple, "pair": Pair, "dict": dict, "batch": Batch, "output": Result}


@pytest.mark.parametrize("answer", ANSWERS)
def test_results_keep_their_types(answer: str) -> None:
    plan = assert_same_step(lambda: Signature(answer), rows(), steps=2)
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


# -- modes, shapes, paths -------------------------------------------------------------------------------------------


def test_eval_and_no_grad_run_the_original() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(mlp(), nn.BatchNorm1d(WIDTH), nn.Dropout(0.5), mlp(2))
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    before = one_step(plan.model, model, rows(), {})
    with torch.no_grad():
        assert not plan.model(*rows()).requires_grad
    plan.model.eval()
    assert not model.training
    assert torch.equal(plan.model(*rows()), model(*rows()))
    with torch.inference_mode():
        assert torch.equal(plan.model(*rows()), model(*rows()))
    plan.model.train()
    assert model.training
    assert len(plan._runtime.cache) == 1
    assert torch.equal(one_step(plan.model, model, rows(), {})["loss"], before["loss"])


def test_other_shapes_are_planned_again_and_said(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ckpt_planner")
    torch.manual_seed(0)
    plain, model = mlp(), mlp()
    model.load_state_dict(plain.state_dict())
    plan = planned(model, rows(), loss_fn=default_loss)
    for number, count in enumerate((512, 400, 512, 400, 64)):
        assert not differences(
            *(one_step(c, m, rows(count), {}, None, number) for c, m in ((plain, plain), (plan.model, model)))
        )
    assert len(plan._runtime.cache) == 3
    assert sum("planned Sequential for (float32[400,16]" in r.message for r in caplog.records) == 1


def test_partly_frozen_or_in_eval_mode_is_planned_again() -> None:
    torch.manual_seed(0)
    plain, model = (nn.Sequential(mlp(3), nn.BatchNorm1d(WIDTH), mlp(3)) for _ in range(2))
    model.load_state_dict(plain.state_dict())
    plan = planned(model, rows(), loss_fn=default_loss, share=0.9)
    for number in range(4):
        for m in (plain, model):
            m[0].requires_grad_(number % 2 == 0)
            m[1].train(number < 2)
        assert not differences(
            *(one_step(c, m, rows(), {}, None, number) for c, m in ((plain, plain), (plan.model, model)))
        )
    assert len(plan._runtime.cache) == 4


class Branching(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])

    def forward(self, x: torch.Tensor, shift: float = 0.0) -> torch.Tensor:
        for layer in self.layers:
            y = layer(x)
            if y.sum() > 0:
                y = y.sin() * 2
            elif float(y.abs().mean()) < 0.1:
                y = y * y
            rows = y[y[:, 0] > 0]
            if len(rows) > 3:
                y = y + rows.mean(0)
            x = torch.tanh(y)
        return x.sum()


def test_control_flow_on_data() -> None:
    class Alternating(Branching):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.count = getattr(self, "count", -1) + 1
            return super().forward(x * (1 if self.count % 2 else -1) + 0.1 * self.count)

    assert_same_step(Alternating, rows(), steps=6, lr=0.5)


def test_the_eager_path_is_what_is_recorded_and_run() -> None:
    """Models ask whether they are being traced and take another path if so."""

    class Asks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.project = mlp(), nn.Linear(WIDTH, 3 * WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            traced = torch.compiler.is_exporting() or torch.compiler.is_compiling() or torch.jit.is_tracing()
            q, k, v = self.project(self.body(x)).view(8, 64, 3 * WIDTH)[:, None].chunk(3, -1)
            mask = torch.ones(64, 64).tril().bool() if traced else None
            return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None).sum()

    plan = assert_same_step(Asks, rows())
    assert not any("tril" in op.name for op in plan.profile.ops)
    assert "scaled_dot_product_attention" in replayed(plan)


# -- caches that grow -----------------------------------------------------------------------------------------------


def test_a_list_that_forward_appends_to_grows_as_in_eager() -> None:
    class Appends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body, self.cache = mlp(), []

        def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
            for part in self.body:
                x = part(x)
                cache.append(x.detach())
                self.cache.append(x.detach())
            return x.sum() + sum(c.sin().sum() for c in cache[-3:])

    torch.manual_seed(0)
    plain, model = Appends(), Appends()
    model.load_state_dict(plain.state_dict())
    given: list[torch.Tensor] = []
    plan = dropping_all(model, (rows()[0], given), loss_fn=default_loss)
    assert given == []
    assert model.cache == []
    for number in range(2):
        lists: list[list[torch.Tensor]] = [[], []]
        states = []
        for cache, call, m in zip(lists, (plain, plan.model), (plain, model), strict=True):
            m.zero_grad()
            loss = call(rows()[0], cache)
            loss.backward()
            states.append([p.grad.clone() for p in m.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*states, strict=True))
        assert len(lists[0]) == len(lists[1]) == 12
        assert len(model.cache) == len(plain.cache) == 12 * (number + 1)


def test_transformers_cache_grows_once() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    def make() -> nn.Module:
        config = LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=3,
            num_attention_heads=2,
            use_cache=True,
        )
        return LlamaForCausalLM(config)

    ids = torch.arange(8 * 48).view(8, 48) % 64
    plan = assert_same_step(make, (), {"input_ids": ids, "labels": ids}, loss_fn=lambda o: o.loss, steps=2)
    out = plan.model(input_ids=ids, labels=ids)
    assert out.past_key_values.get_seq_length() == 48


def test_planned_before_the_first_call() -> None:
    torch.manual_seed(0)
    plain, model = mlp(), mlp()
    model.load_state_dict(plain.state_dict())
    plan = optimize(model, budget="85%", loss_fn=default_loss)
    for number in range(2):
        assert not differences(
            *(one_step(c, m, rows(), {}, None, number) for c, m in ((plain, plain), (plan.model, model)))
        )
    assert plan.planned
