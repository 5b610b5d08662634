"""Calls that are familiar from earlier steps, and then are made otherwise: under the same names, on other things."""

from __future__ import annotations

import gc
import weakref
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
        self.norm = nn.BatchNorm1d(WIDTH)
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


def turned(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = torch.cos(x[:WIDTH])
    y.data = y.data.t()  # another look into the same storage, from the first step on
    if model.late:
        y.data = y.data.t()
    return x + (torch.exp(y) * y).repeat(x.shape[0] // WIDTH, 1)


def frozen(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.set_grad_enabled(not model.late):
        y = F.dropout(F.layer_norm(torch.cos(x), (WIDTH,)), 0.3)
    return torch.exp(y) * x


STATE = {"late": False}


def one_or_two(x: torch.Tensor) -> object:
    if torch.overrides.has_torch_function_unary(x):
        return torch.overrides.handle_torch_function(one_or_two, (x,), x)
    y = F.dropout(x, 0.5, True)
    return (y, y * 1) if STATE["late"] else y


def normed(change: Callable[[nn.BatchNorm1d, bool], object]) -> Middle:
    def middle(model: Model, x: torch.Tensor) -> torch.Tensor:
        change(model.norm, model.late)
        return model.norm(x.cos()).exp()

    return middle


def joined(model: Model, x: torch.Tensor) -> torch.Tensor:
    parts = [x.cos(), x.exp()] if not model.late else [x.exp(), x.cos()]
    return torch.cat(parts, 1)[:, 8:-8].tanh()


def more_joined(model: Model, x: torch.Tensor) -> torch.Tensor:
    c = x.cos()
    parts = [c, c.sin(), c.exp()] if not model.late else [c, c.exp()]
    return torch.stack(parts).sum(0).tanh()


def tuple_joined(model: Model, x: torch.Tensor) -> torch.Tensor:
    return torch.stack((tuple if model.late else list)([x.cos(), model.scale.expand_as(x)])).sum(0).tanh()


def written(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = F.relu(x.cos(), inplace=True) if not model.late else F.relu(x.cos())
    return torch.exp(y) * y


def written_by_position(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = F.leaky_relu(x.cos(), 0.1, not model.late)
    return torch.exp(y) * y


def reshaped(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = x.cos()
    z = torch.exp(y)
    y.t_()
    if model.late:
        y.t_().t_()
    return z * y.t().sin()


def written_outside(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = x.cos() + 1
    z = (y * 2).neg_()
    if model.late:
        with torch.no_grad():
            z.mul_(0.5)
    return torch.exp(z) * z


def written_source(model: Model, x: torch.Tensor) -> torch.Tensor:
    """What a group takes from outside is written into by the call after it."""
    mask = (x.detach() > 0).float()
    y = torch.exp(x.cos() + mask)
    mask.mul_(0.5)
    return torch.tanh(y + mask)


def momentum(norm: nn.BatchNorm1d, late: bool) -> None:
    norm.momentum = 0.3 if late else 0.1


def other_statistics(norm: nn.BatchNorm1d, late: bool) -> None:
    if late:
        norm.running_mean, norm.running_var = norm.running_mean + 1, norm.running_var * 2


def lower(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.float16 if model.late else torch.bfloat16):
        y = F.linear(x.cos(), model.linears[0].weight)
        return torch.exp(F.linear(y.sin(), model.linears[1].weight)).float().clamp(max=4)


def autocast_ends(model: Model, x: torch.Tensor) -> torch.Tensor:
    with torch.autocast("cpu", torch.bfloat16, enabled=not model.late):
        return F.linear(x.cos(), model.linears[0].weight).float().exp().clamp(max=4)


def another_structure(model: Model, x: torch.Tensor) -> torch.Tensor:
    STATE["late"] = model.late
    c = torch.cos(x)
    found = one_or_two(c)
    y = found[0] if isinstance(found, tuple) else found
    scale = model.scale.exp().sin().cos().tanh()
    return torch.exp(y) * torch.exp(F.dropout(c, 0.5, True)) * scale


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
    "another look": turned,
    "no gradients for what is saved": frozen,
    "another structure": another_structure,
    "joined in another order": joined,
    "others joined": more_joined,
    "a tuple of them": tuple_joined,
    "no longer in place": written,
    "no longer in place by position": written_by_position,
    "written from outside": written_outside,
    "reshaped once more": reshaped,
    "another momentum": normed(momentum),
    "other statistics": normed(other_statistics),
    "statistics as they are": normed(lambda norm, late: norm.train(not late)),
    "another lower type": lower,
    "autocast ends": autocast_ends,
    "other zero": lambda model, x: torch.div(1.0, torch.clamp(x.cos(), -0.0 if model.late else 0.0)).clamp(-9, 9) * x,
}


def late(model: nn.Module, step: int) -> None:
    model.late = step >= LATE


@pytest.mark.parametrize("name", MIDDLES)
def test_a_familiar_call_that_is_made_otherwise(name: str) -> None:
    assert_same_step(lambda: Model(MIDDLES[name]), rows(), before=late, steps=LATE + 3, lr=0.01, tight=False)


def dropping(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return F.dropout(x.cos(), 0.5) * model.scale


def attention(model: Model, x: torch.Tensor) -> torch.Tensor:
    y = x.cos().view(1, 2, -1, WIDTH)
    return F.scaled_dot_product_attention(y, y, y, dropout_p=0.0).reshape(x.shape).exp()


USUAL: dict[str, Middle] = {
    "dropout": dropping,
    "no dropout": lambda model, x: F.dropout(x.cos(), 0.0, True).exp(),
    "ellipsis": lambda model, x: torch.exp(torch.cos(x)[..., :8]).repeat(1, 2),
    "property": lambda model, x: torch.exp(torch.cos(x).T).T,
    "attention": attention,
    "joined": joined,
    "several joined": more_joined,
    "in place": written,
    "in place by position": written_by_position,
    "reshaped in place": reshaped,
    "batch norm": normed(lambda norm, late: None),
    "autocast": lower,
}


@pytest.mark.parametrize("name", USUAL)
def test_calls_are_familiar_and_groups_have_programs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the tests above would show nothing."""
    seed(0)
    model = Model(USUAL[name])
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


def test_weights_set_free_between_forward_and_backward() -> None:
    def run(plan: bool) -> list[torch.Tensor]:
        seed(0)
        model = Model(lambda model, x: F.layer_norm(x.cos(), (WIDTH,), model.scale, model.other).exp())
        weights = [model.scale, model.other]
        for weight in weights:
            weight.requires_grad_(False)
        call = dropping_all(model, rows(), loss_fn=default_loss).model if plan else model
        found = []
        for step in range(LATE + 3):
            model.zero_grad()
            loss = call(*rows())
            for weight in weights:
                weight.requires_grad_(step >= LATE)
            loss.backward()
            for weight in weights:
                weight.requires_grad_(False)
            found += [p.grad.clone() for p in model.linears.parameters() if p.grad is not None]
        return found

    assert all(map(torch.equal, run(False), run(True)))


def test_functions_made_anew_are_not_kept() -> None:
    seen: list[weakref.ref[torch.Tensor]] = []

    def middle(model: Model, x: torch.Tensor) -> torch.Tensor:
        large = torch.ones(WIDTH)
        seen.append(weakref.ref(large))

        def made(y: torch.Tensor) -> torch.Tensor:
            if torch.overrides.has_torch_function_unary(y):
                return torch.overrides.handle_torch_function(made, (y,), y)
            return y.cos() * large

        return torch.exp(made(x))

    seed(0)
    model = Model(middle)
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    for _ in range(LATE):
        one_step(plan.model, model, rows(), {})
    gc.collect()
    assert sum(ref() is not None for ref in seen) <= len(model.linears)
