"""Settings that are others in backward than they were in forward: a replay does what forward did."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from ckpt_planner import UnsupportedModelError, optimize
from tests.helpers import assert_same_step, dropping_all, seed

WIDTH = 16


def rows() -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(64, WIDTH),)


@contextmanager
def doubles() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


class Waves(nn.Module):
    """Numbers that no tensor gives, made under a setting in each layer, or around all of them."""

    def __init__(self, inside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.linears, self.inside = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            with self.inside():
                waves = torch.cos(torch.arange(WIDTH) * 1e6 / 3)
            x = torch.exp(torch.sin(linear(x)) * waves).float()
        return x.sum()


class Attention(nn.Module):
    def __init__(self, inside: Callable[[], AbstractContextManager[object]]) -> None:
        super().__init__()
        self.linears, self.inside = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)]), inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            y = torch.sin(linear(x)).view(1, 2, -1, WIDTH)
            with self.inside():
                x = torch.exp(F.scaled_dot_product_attention(y, y, y).reshape(x.shape))
        return x.sum()


def on_math() -> AbstractContextManager[object]:
    return sdpa_kernel(SDPBackend.MATH)


def plainly() -> AbstractContextManager[object]:
    return torch.enable_grad()


def itself(output: torch.Tensor) -> torch.Tensor:
    return output


@pytest.mark.parametrize("where", ["inside", "around"])
@pytest.mark.parametrize(
    ("model", "setting"), [(Waves, doubles), (Attention, on_math)], ids=["default type", "kernels of attention"]
)
def test_a_setting_of_forward_alone(
    model: type[nn.Module], setting: Callable[[], AbstractContextManager[object]], where: str
) -> None:
    inside, around = (setting, plainly) if where == "inside" else (plainly, setting)
    assert_same_step(lambda: model(inside), rows(), loss_fn=itself, steps=6, lr=0.001, tight=False, around=around)


def test_a_setting_that_comes_late() -> None:
    class Late(Waves):
        late = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.inside = doubles if self.late else plainly
            return super().forward(x)

    def late(model: nn.Module, step: int) -> None:
        model.late = step >= 4

    assert_same_step(lambda: Late(plainly), rows(), loss_fn=itself, steps=7, lr=0.001, tight=False, before=late)


class Doubling(TorchFunctionMode):
    """Makes `arange` what its caller did not ask for."""

    def __torch_function__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        kwargs = dict(kwargs or {})
        if func is torch.arange:
            kwargs["dtype"] = torch.float64
        return func(*args, **kwargs)


def on_the_cpu() -> AbstractContextManager[object]:
    return torch.device("cpu")


@pytest.mark.parametrize(
    ("mode", "planning"), [(Doubling, plainly), (on_the_cpu, on_the_cpu)], ids=["of the user", "default device"]
)
def test_a_function_mode_around_forward_alone(
    mode: Callable[[], AbstractContextManager[object]], planning: Callable[[], AbstractContextManager[object]]
) -> None:
    def run(planned: bool) -> list[torch.Tensor]:
        seed(0)
        model = Waves(plainly)
        call: Callable[..., torch.Tensor] = model
        if planned:
            with planning():
                call = dropping_all(model, rows(), loss_fn=itself).model
        found = []
        for _ in range(4):
            model.zero_grad()
            with mode():
                loss = call(*rows())
            loss.backward()
            found += [p.grad.clone() for p in model.parameters() if p.grad is not None]
        return found

    assert all(map(torch.equal, run(False), run(True)))


def test_planning_within_a_function_mode_is_refused_by_name() -> None:
    seed(0)
    with Doubling(), pytest.raises(UnsupportedModelError, match="Doubling"):
        optimize(Waves(plainly), budget=1 << 40, example_args=rows(), loss_fn=itself)


def test_a_tensor_that_is_given_twice_counts_once() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return F.mse_loss(self.linear(x).exp(), target)

    x = rows()[0]
    plan = optimize(Twice(), budget=1 << 40, example_args=(x, x))
    assert plan.profile.input_bytes == x.nbytes


@pytest.mark.parametrize("planned", ["before", "by the first call"])
@pytest.mark.parametrize("mechanism", ["slice", "graph", "torch"])
def test_autocast_that_stays_open_while_weights_change(
    mechanism: str, planned: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Eager then goes on with remembered casts of the old weights, which a replay would make of the new ones."""
    x = rows()[0]
    models = []
    for _ in range(2):
        seed(3)
        models.append(nn.Sequential(*[m for _ in range(5) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())]))
    call = {"loss_fn": lambda y: y.float().mean(), "strategy": "sqrt", "mechanism": mechanism}
    with torch.autocast("cpu", torch.bfloat16, enabled=planned == "before"):
        plan = optimize(models[1], 1 << 40, (x,), **call)
    assert plan.segments

    def gradients(model: nn.Module, trained: nn.Module) -> list[torch.Tensor]:
        optimizer, found = torch.optim.SGD(trained.parameters(), lr=0.5), []
        for _ in range(2):  # contexts; three steps in each
            with torch.autocast("cpu", torch.bfloat16):
                for _ in range(3):
                    optimizer.zero_grad()
                    model(x).float().mean().backward()
                    found += [p.grad.clone() for p in trained.parameters()]
                    optimizer.step()
        return found

    assert all(map(torch.equal, gradients(models[0], models[0]), gradients(plan.model, models[1])))
    assert caplog.text.count("remembers casts") == 1
