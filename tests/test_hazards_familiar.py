"""Calls that are familiar from earlier steps, and then are made otherwise: under the same names, on other things."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner.replay.familiar import Familiar
from ckpt_planner.replay.program import Programs
from tests.helpers import assert_same_step, default_loss, dropping_all, one_step, seed

WIDTH = 16
LATE = 4  # steps after which everything is familiar
Middle = Callable[["Model", torch.Tensor], torch.Tensor]


def rows() -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(256, WIDTH),)


class Model(nn.Module):
    """Layers with something between them that is made otherwise once `late`."""

    def __init__(self, middle: Middle) -> None:
        super().__init__()
        self.linears, self.middle = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]), middle
        self.scale, self.other = nn.Parameter(torch.rand(WIDTH)), nn.Parameter(torch.rand(WIDTH))
        self.late = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = torch.tanh(self.middle(self, torch.sin(linear(x))))
        return x.sum()


def under_autocast(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=model.late):
        return F.linear(x.cos(), model.linears[0].weight).float()


def without_gradients(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(not model.late):
        y = torch.exp(torch.cos(x))
    return y * x


def of_inference(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.no_grad(), torch.inference_mode(model.late):
        y = torch.exp(torch.cos(x.detach()))
    return x * torch.ones_like(x).cos() + float(y.mean())


def moved(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = torch.cos(x)
    if model.late:
        y.data = y.detach() * 2  # another storage under the same variable
    return torch.exp(y) * y


MIDDLES: dict[str, Middle] = {
    "another slope": lambda model, x: F.leaky_relu(x.cos(), 0.5 if model.late else 0.1),
    "minus zero": lambda model, x: torch.cos(x) / torch.full_like(x, 2.0).mul(-1.0 if model.late else 1.0),
    "another type": lambda model, x: torch.cos(x)[True if model.late else 0] + x,
    "another size": lambda model, x: x.cos().reshape((-1, 8) if model.late else (-1, 4)).softmax(-1).reshape(x.shape),
    "another slice": lambda model, x: F.pad(x.cos()[:, 4:] if model.late else x.cos()[:, :-4], (0, 4)),
    "swapped": lambda model, x: torch.sub(*((x.cos(), x.exp()) if not model.late else (x.exp(), x.cos()))),
    "one tensor twice": lambda model, x: torch.mul(y := x.cos(), y if model.late else x) + y.exp(),
    "another parameter": lambda model, x: torch.mul(x.cos(), model.other if model.late else model.scale).exp(),
    "from outside": lambda model, x: torch.mul(y := x.cos(), model.scale if model.late else y.exp()),
    "named": lambda model, x: torch.add(x.cos(), x, alpha=3 if model.late else 2).exp(),
    "autocast": under_autocast,
    "no gradients": without_gradients,
    "inference": of_inference,
    "data": moved,
}


def late(model: nn.Module, step: int) -> None:
    model.late = step >= LATE


@pytest.mark.parametrize("name", MIDDLES)
def test_a_familiar_call_that_is_made_otherwise(name: str) -> None:
    assert_same_step(lambda: Model(MIDDLES[name]), rows(), before=late, steps=LATE + 3, lr=0.01, tight=False)


def dropping(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.cos(), 0.5) * model.scale


def test_calls_are_familiar_and_groups_have_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show nothing."""
    seed(0)
    model = Model(dropping)
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    found: list[object] = []
    find = Programs.find
    monkeypatch.setattr(Programs, "find", lambda self, group: found.append(made := find(self, group)) or made)
    for _ in range(LATE):
        one_step(plan.model, model, rows(), {})
    directions = plan._runtime.first.directions
    again = [d for d in directions.ops if d.group >= 0]
    assert again
    assert all(isinstance(f, Familiar) for d in again for f in d.familiar)
    assert all(d.familiar for d in again)
    assert found[-1] is not None


def test_a_weight_changed_before_a_familiar_replay_raises() -> None:
    seed(0)
    model = Model(dropping)
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    for _ in range(LATE):
        one_step(plan.model, model, rows(), {})
    loss = plan.model(*rows())
    with torch.no_grad():
        model.scale.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_an_error_in_a_familiar_call_leaves_its_group_as_it_was() -> None:
    class Falls(Model):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide = torch.ones(WIDTH + 1)
            for linear in self.linears:
                x = torch.sin(linear(x))
                try:
                    x = torch.mul(x.cos(), wide if self.late else self.scale)
                except RuntimeError:
                    x = torch.mul(x.cos(), self.scale)
            return x.sum()

    assert_same_step(lambda: Falls(dropping), rows(), before=late, steps=LATE + 3, lr=0.01, tight=False)
