"""A planned model within torch.func, vmap and torch.compile, and a model whose backward fails."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable

import pytest
import torch
from torch import nn

from ckpt_planner import CaptureError, optimize
from ckpt_planner.replay.group import Group
from tests.helpers import default_loss, dropping_all, planned

WIDTH = 16


def rows(count: int = 256) -> torch.Tensor:
    torch.manual_seed(0)
    return torch.randn(count, WIDTH)


def mlp() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(5) for part in (nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Tanh())])


def test_a_gradient_by_torch_func_is_eagers_and_said_once(caplog: pytest.LogCaptureFixture) -> None:
    model, x = mlp(), rows()
    made = dropping_all(model, (x,), loss_fn=default_loss).model
    with caplog.at_level(logging.WARNING, "ckpt_planner"):
        found = [torch.func.grad(lambda y: made(y).sum())(x) for _ in range(2)]
    assert all(torch.equal(f, torch.func.grad(lambda y: model(y).sum())(x)) for f in found)
    assert len(re.findall("within vmap or a transformation of torch.func", caplog.text)) == 1


def test_vmap_over_a_planned_model_is_eagers() -> None:
    model, x = mlp(), rows()
    made = dropping_all(model, (x,), loss_fn=default_loss).model
    assert torch.equal(torch.vmap(made)(x.view(4, -1, WIDTH)), torch.vmap(model)(x.view(4, -1, WIDTH)))


@pytest.mark.parametrize("mechanism", ["slice", "torch"])
def test_what_is_compiled_around_a_planned_model_carries_the_plan_out(
    mechanism: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, x = mlp(), rows()
    plan = planned(model, (x,), loss_fn=default_loss, mechanism=mechanism)
    replays = []
    replay = Group._replay  # of inner boundaries, too
    monkeypatch.setattr(Group, "_replay", lambda self: (replays.append(1), replay(self)))
    default_loss(model(x)).backward()
    expected = [p.grad for p in model.parameters()]
    traced: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: list[torch.Tensor]) -> Callable[..., object]:
        traced.extend(str(node.target) for node in graph.graph.nodes)
        return graph.forward

    compiled = torch.compile(lambda y: plan.model(y) * 1.0, backend=backend)
    for _ in range(2):
        model.zero_grad()
        default_loss(compiled(x)).backward()
        assert all(torch.equal(e, p.grad) for e, p in zip(expected, model.parameters(), strict=True))
    assert not [name for name in traced if "linear" in name or "gelu" in name]
    assert plan._runtime.calls == 2
    assert len(replays) == (2 * len(plan.segments) if mechanism == "slice" else 0)
    assert [way.misses for way in plan._runtime.cache.values()] == [0]


class OverwritesWhatItSaved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x).tanh()
        return y.mul_(2)


def test_a_backward_that_fails_in_eager_is_refused_by_name() -> None:
    x = rows()
    with pytest.raises(RuntimeError, match="inplace operation"):
        OverwritesWhatItSaved()(x).sum().backward()
    with pytest.raises(CaptureError, match=r"backward of OverwritesWhatItSaved failed .* inplace operation"):
        optimize(OverwritesWhatItSaved(), "100%", (x,), loss_fn=default_loss)
