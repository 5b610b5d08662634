"""Calls of another kind than planned: modes, shapes, control flow, caches, the first call."""

from __future__ import annotations

import logging

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner import optimize
from tests.helpers import assert_same_step, default_loss, differences, dropping_all, one_step, planned, replayed

WIDTH = 16


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


def mlp(layers: int = 6) -> nn.Sequential:
    return nn.Sequential(*[p for _ in range(layers) for p in (nn.Linear(WIDTH, WIDTH), nn.Tanh())])


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
    plan = optimize(model, budget="97%", loss_fn=default_loss)
    for number in range(2):
        assert not differences(
            *(one_step(c, m, rows(), {}, None, number) for c, m in ((plain, plain), (plan.model, model)))
        )
    assert plan.planned
