"""What a captured graph takes for granted: each thing is looked at again in every step, or refused by name."""

from __future__ import annotations

import argparse
import copy
import threading
import types
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.modules import module as hooks

from ckpt_planner import UnsupportedModelError, optimize

MECHANISMS = ["slice", "graph", "torch"]
Forward = Callable[[nn.Module, torch.Tensor], torch.Tensor]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.exp(torch.sin(self.linear(x))).cos()


class Model(nn.Module):
    def __init__(self, block: type[nn.Module] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x).float()
        return x


def loss(output: torch.Tensor) -> torch.Tensor:
    return output.square().sum()


def assert_steps_are_eagers(
    model: nn.Module,
    mechanism: str,
    arguments: Callable[[int], tuple[torch.Tensor, ...]],
    before: Callable[[nn.Module, int], object] = lambda model, step: None,
) -> None:
    torch.set_num_threads(1)
    twin = copy.deepcopy(model)
    before(model, 0)
    plan = optimize(model, 1 << 40, example_args=arguments(0), loss_fn=loss, strategy="all", mechanism=mechanism)
    assert plan.segments
    for step in range(6):
        given, found = arguments(step), []
        for call, own in ((twin, twin), (plan.model, model)):
            own.zero_grad()
            before(own, step)
            value = loss(call(*given))
            value.backward()
            found.append([value, *(p.grad for p in own.parameters())])
        assert all(map(torch.equal, *found)), step


def rows(step: int) -> tuple[torch.Tensor, ...]:
    torch.manual_seed(step)
    return (torch.randn(32, 16),)


class TwoCasts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            x = torch.tanh(self.linear(x))
        with torch.autocast("cpu", torch.bfloat16):  # casts the weight anew
            x = self.linear(x)
        return torch.exp(torch.sin(x.float())).cos()


class NoCache(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            y = self.linear(self.linear(x.exp()))
        return y.float().sin()


@pytest.mark.parametrize("mechanism", MECHANISMS)
@pytest.mark.parametrize("block", [TwoCasts, NoCache])
def test_casts_are_remembered_as_long_as_in_eager(block: type[nn.Module], mechanism: str) -> None:
    assert_steps_are_eagers(Model(block), mechanism, rows)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_tensor_given_twice_in_the_first_call_only(mechanism: str) -> None:
    class Difference(Model):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return super().forward(x - 0.3 * y)

    def pair(step: int) -> tuple[torch.Tensor, ...]:
        (x,) = rows(step)
        return (x, x if step == 0 else rows(step + 10)[0])

    assert_steps_are_eagers(Difference(), mechanism, pair)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_a_generator_of_the_models_own(mechanism: str) -> None:
    class Draws(Model):
        def __init__(self) -> None:
            super().__init__()
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * torch.rand(x.shape, generator=self.generator))

    def check() -> None:
        assert_steps_are_eagers(Draws(), mechanism, rows, lambda model, step: model.generator.manual_seed(step))

    if mechanism == "slice":
        check()
    else:
        with pytest.raises(UnsupportedModelError, match="a random generator of its own"):
            check()


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Settings:
    scale = 1.0


class OfItsClass(Model):
    scale = 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale)


class Object:
    def __init__(self) -> None:
        self.scale = 1.0

    def scaled(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


FUNCTION: Callable[[torch.Tensor], torch.Tensor] = torch.sin
SPACE = types.SimpleNamespace(scale=1.0)


def of_an_attribute(make: Callable[[], Any], get: Callable[[Any], Any], put: Callable[[Any, float], object]) -> Any:
    class Holds(Model):
        def __init__(self) -> None:
            super().__init__()
            self.held = make()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(x * get(self.held))

    return Holds(), lambda model, value: put(model.held, value)


def by_attribute(held: Any) -> float:
    return float(held.scale)


def set_attribute(held: Any, value: float) -> None:
    held.scale = value


def change_function(model: nn.Module, value: float) -> None:
    global FUNCTION
    FUNCTION = torch.sin if value == 1 else torch.cos


class ByFunction(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(FUNCTION(x))


class BySpace(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * SPACE.scale)


class BySettings(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * Settings.scale)


class ByMethod(Model):
    def __init__(self) -> None:
        super().__init__()
        self.scaled = Object().scaled

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.scaled(x))


class ByShape(Model):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("sizes", torch.ones(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x / self.sizes.numel())


def set_item(held: Any, value: float) -> None:
    held[0] = value


STATE: dict[str, Callable[[], tuple[nn.Module, Callable[[nn.Module, float], object]]]] = {
    "namespace": lambda: of_an_attribute(lambda: argparse.Namespace(scale=1.0), by_attribute, set_attribute),
    "simple namespace": lambda: of_an_attribute(lambda: types.SimpleNamespace(scale=1.0), by_attribute, set_attribute),
    "slots": lambda: of_an_attribute(Slots, by_attribute, set_attribute),
    "deque": lambda: of_an_attribute(lambda: deque([1.0]), lambda held: held[0], set_item),
    "array": lambda: of_an_attribute(lambda: np.ones(1), lambda held: float(held[0]), set_item),
    "bound method": lambda: (ByMethod(), lambda model, value: set_attribute(model.scaled.__self__, value)),
    "its class": lambda: (OfItsClass(), lambda model, value: setattr(OfItsClass, "scale", value)),
    "another class": lambda: (BySettings(), lambda model, value: setattr(Settings, "scale", value)),
    "global namespace": lambda: (BySpace(), lambda model, value: set_attribute(SPACE, value)),
    "global function": lambda: (ByFunction(), change_function),
    "shape of a buffer": lambda: (
        ByShape(),
        lambda model, value: setattr(model.sizes, "data", torch.ones(4 if value == 1 else 8)),
    ),
}


@pytest.mark.parametrize("make", STATE.values(), ids=STATE)
@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_python_state_that_steers_forward(make: Callable[[], Any], mechanism: str) -> None:
    model, change = make()
    try:
        assert_steps_are_eagers(model, mechanism, rows, lambda own, step: change(own, 1.0 if step < 3 else 2.0))
    finally:
        change(model, 1.0)


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_hooks_on_all_modules_that_come_later(mechanism: str) -> None:
    handles: list[Any] = []

    def later(model: nn.Module, step: int) -> None:
        if step == 3 and not handles:
            handles.append(hooks.register_module_forward_hook(lambda m, _, y: y * 2 if isinstance(m, Block) else None))

    try:
        assert_steps_are_eagers(Model(), mechanism, rows, later)
    finally:
        for handle in handles:
            handle.remove()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_where_hooks_on_saved_tensors_are_forbidden_the_model_runs_itself(mechanism: str) -> None:
    model = Model()
    plan = optimize(model, 1 << 40, example_args=rows(0), loss_fn=loss, strategy="all", mechanism=mechanism)
    for _ in range(3):
        with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
            loss(plan.model(*rows(0))).backward()


@pytest.mark.parametrize("mechanism", MECHANISMS)
def test_threads_that_plan_at_once(mechanism: str) -> None:
    model = Model()
    plan = optimize(model, 1 << 40, example_args=rows(0), loss_fn=loss, strategy="all", mechanism=mechanism)
    given = rows(0)[0]  # drawn before there are threads, which share the generator
    expected = torch.autograd.grad(loss(model(x := given.clone().requires_grad_())), x)
    found: list[Any] = []

    def steps() -> None:
        for _ in range(3):
            own = given.clone().requires_grad_()  # another kind of call, which is planned
            found.append(torch.autograd.grad(loss(plan.model(own)), own))

    threads = [threading.Thread(target=steps) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 9 and all(torch.equal(each[0], expected[0]) for each in found)
