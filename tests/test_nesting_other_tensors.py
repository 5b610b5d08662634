"""Inner boundaries in steps whose calls take or write other tensors than planned: as eager does, or raise."""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, seed, settings
from hypothesis import strategies as st
from torch import nn

from ckpt_planner import CaptureError, optimize
from ckpt_planner.problem import make_problem
from tests.helpers import same
from tests.test_nesting import by_lot, carried_out

EXAMPLES, STEPS, LATE = 40, 4, 2
NAMES = ("exp", "sin", "scale", "shift", "shift", "halve_", "halve_", "relu_", "flat_halve_", "add", "tail")
Program = list[tuple[str, int]]


class Redirected(nn.Module):
    """Runs a program of which a call may be turned to another value than at first."""

    def __init__(self, program: Program, turned: dict[int, int]) -> None:
        super().__init__()
        self.program, self.turned, self.late = program, turned, False
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(16) + 0.5) for _ in program])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = [x * self.scales[0], x.sin() * self.scales[1]]
        for number, (name, back) in enumerate(self.program):
            if self.late and number in self.turned:
                back = self.turned[number]
            made = self.run(name, values[-1 - back % len(values)], values[-1], self.scales[number])
            if made is not None:
                values.append(made)
        return torch.stack([(value * self.scales[2]).exp().mean() for value in values[-4:]]).sum()

    @staticmethod
    def run(name: str, x: torch.Tensor, y: torch.Tensor, scale: nn.Parameter) -> torch.Tensor | None:
        match name:
            case "exp":
                return x.clamp(max=1).exp()
            case "sin":
                return x.sin()
            case "scale":
                return x * scale
            case "shift":
                return x + 0.5
            case "add":
                return x + y
            case "tail":
                return x[1:].sum(0) + y
            case "halve_":
                x.mul_(0.5)
            case "flat_halve_":
                x.view(-1).mul_(0.5)
            case "relu_":
                x.relu_()
        return None


def drawn() -> st.SearchStrategy[tuple[Program, dict[int, int]]]:
    program = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 4)), min_size=4, max_size=14)
    return st.tuples(program, st.dictionaries(st.integers(0, 13), st.integers(0, 5), min_size=1, max_size=2))


def gradients(model: nn.Module, call: nn.Module, x: torch.Tensor) -> list[torch.Tensor | None] | None:
    """None where a step refuses."""
    model.zero_grad()
    try:
        call(x).backward()
    except RuntimeError as error:
        assert "modified by an inplace operation" in str(error) or "not made by computing again" in str(error)
        return None
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("part", range(2))
def test_a_call_on_another_tensor_than_planned_has_the_values_of_eager(part: int) -> None:
    seen: Counter[str] = Counter()

    @seed(part)
    @settings(max_examples=EXAMPLES, deadline=None, database=None, suppress_health_check=list(HealthCheck))
    @given(case=drawn(), number=st.integers(0, 9999))
    def holds(case: tuple[Program, dict[int, int]], number: int) -> None:
        torch.manual_seed(number)
        model, x, lot = Redirected(*case), torch.rand(8, 16), random.Random(number)
        try:
            plan = optimize(model, budget=1 << 40, example_args=(x,))
        except CaptureError:  # the plain model fails
            return
        problem = make_problem(plan.profile, 1 << 40)
        for judged in filter(None, (by_lot(problem, lot) for _ in range(6))):
            carried_out(plan, judged)
            assert_as_eager(model, plan.model, x, seen)

    holds()
    assert seen["late"] >= EXAMPLES


def assert_as_eager(model: Redirected | Turned, call: Any, x: torch.Tensor, seen: Counter[str]) -> None:
    for step in range(STEPS):
        model.late = step >= LATE
        plain = copy.deepcopy(model)
        expected, found = gradients(plain, plain, x), gradients(model, call, x)
        if expected is None:  # what eager refuses because a saved tensor was overwritten is right with what was saved
            with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda saved: saved):
                expected = gradients(plain, plain, x)
            seen["overwritten"] += 1
        if found is not None:  # what raises is no wrong gradient
            assert expected is not None
            assert all(map(same, expected, found))
            seen["late"] += model.late
        else:
            assert model.late
            seen["refused"] += 1
    model.late = False


class Turned(nn.Module):
    """Where it is late, a write lands on another tensor than planned."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.late = False
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(16) + 0.5) for _ in range(4)])

    def weighted(self, *values: torch.Tensor) -> torch.Tensor:
        return torch.stack([(v * scale).sum() for v, scale in zip(values, self.scales, strict=False)]).sum()


class OnWhatTwoGroupsMake(Turned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = x.sin()
        c = a + 0.25
        (a if self.late else c).mul_(0.5)
        b = a.exp() + 1
        return self.weighted(a, c, b, b.cos())


class OnTheSourceOfABoundary(Turned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = (x * self.scales[3]).sin()
        b = a.cos() + 1
        c = b + 0.25
        d = c.exp()
        (b if self.late else c).view(-1).mul_(0.5)
        return self.weighted(b, c, b.cos() + d)


class OnWhatWasLent(Turned):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a = (x * self.scales[3]).sin()
        b = a + 1
        c = b + 0.25
        d = a + c
        (b if self.late else d).mul_(0.5)
        return self.weighted(b, c.cos(), d)


@pytest.mark.parametrize("make", [OnWhatTwoGroupsMake, OnTheSourceOfABoundary, OnWhatWasLent])
def test_a_planned_write_on_a_tensor_of_more_groups_than_repeat_it(make: type[Turned]) -> None:
    model, x, seen = make(), torch.rand(8, 16), Counter[str]()
    plan = optimize(model, budget=1 << 40, example_args=(x,))
    problem = make_problem(plan.profile, 1 << 40)
    for boundary in problem.candidates:
        try:
            judged = problem.judge(problem.candidates, [boundary])
        except ValueError:
            continue
        carried_out(plan, judged)
        assert_as_eager(model, plan.model, x, seen)
    assert seen["late"] >= 8
