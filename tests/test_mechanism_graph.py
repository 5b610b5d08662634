"""Mechanism "graph": its code drops what is planned, looks at what can change, and leaves nothing behind."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.families import build
from ckpt_planner import InfeasibleBudgetError, Plan, UnsupportedModelError, optimize
from ckpt_planner.graphed.fixed import FixedGroups
from ckpt_planner.graphed.graphed import Graphed, _Bound
from tests.helpers import differences, one_step, same
from tests.on_a_graph import Wide, assert_kept_as_predicted, assert_same_steps, planned, rows
from tests.random_models import LATER, ROWS, WIDTH, RandomModel, programs


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def bound(plan: Plan) -> _Bound:
    """The graph of a plan on its model."""
    first = plan._runtime.first
    assert first is not None and isinstance(first.rewritten, Graphed)
    ((_, found),) = first.rewritten._bound.values()
    return found


def fixed(plan: Plan) -> FixedGroups:
    """What is known of the groups of a plan whose graph has been run."""
    found = bound(plan)._fixed
    assert found is not None
    return found


@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "resnet", "unet", "densenet", "swin", "mixtral"])
def test_after_a_step_code_runs_and_all_its_groups_are_fixed(name: str) -> None:
    made = build(name, small=True)
    try:
        plan = planned("graph", made.model, made.args, made.kwargs, 0.6, loss_fn=made.loss_fn)
    except UnsupportedModelError as error:
        assert name == "mixtral" and "which cannot repeat what its forward does" in str(error)
        return
    assert_same_steps(plan, made.model, made.args, made.kwargs, made.loss_fn)
    groups = {d.group for d in bound(plan)._directions.ops} - {-1}
    assert groups and groups == set(fixed(plan).calls)
    assert_kept_as_predicted(plan)


def everything(model: nn.Module, x: torch.Tensor, loss_fn: Any = None) -> Plan:
    """A plan that computes each block again, after the steps in which its graph is followed."""
    plan = optimize(model, 1 << 40, (x,), strategy="all", mechanism="graph", loss_fn=loss_fn)
    assert plan.segments
    return plan


class Stack(nn.Module):
    """Blocks that are equal, with `middle` in each."""

    def __init__(self, middle: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(middle) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


class Block(nn.Module):
    def __init__(self, middle: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.linear, self.norm, self.middle = nn.Linear(32, 32), nn.BatchNorm1d(32), middle

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.middle(self, torch.sin(self.linear(x)))


def turned(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    y = torch.cos(x[:32])
    y.data = y.data.t()  # another look into the same storage, which counts as no change
    return x + (torch.exp(y) * y).repeat(x.shape[0] // 32, 1)


def written_after(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """What a group has taken is written into by a call that does not run again."""
    mask = (x.detach() > 0).float()
    y = torch.exp(x.cos() + mask)
    mask.mul_(0.5)
    return torch.tanh(y * 0.1 + mask)


def attention(block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    q = x.view(1, 4, -1, 32)
    return F.scaled_dot_product_attention(q, q.cos(), q.sin()).reshape(x.shape)


MIDDLES: dict[str, Callable[[nn.Module, torch.Tensor], torch.Tensor]] = {
    "statistics": lambda block, x: block.norm(x).tanh(),
    "dropout": lambda block, x: F.dropout(x.exp(), 0.3),
    "in place": lambda block, x: F.relu(x.cos().mul_(2), inplace=True).exp(),
    "several results": lambda block, x: torch.cat([p.exp() for p in x.chunk(4, 1)[::-1]], 1),
    "attention": attention,
    "turned": turned,
    "written after": written_after,
    "noise": lambda block, x: x * torch.rand_like(x),
}


@pytest.mark.parametrize("middle", MIDDLES.values(), ids=MIDDLES)
def test_steps_are_those_of_eager(middle: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
    model, x = Stack(middle), rows(64)
    plan = everything(model, x)
    assert_same_steps(plan, model, (x,), {}, steps=5)
    twin = copy.deepcopy(model)  # two forwards before one backward
    found = []
    for call, own in ((twin, twin), (plan.model, model)):
        own.zero_grad()
        torch.manual_seed(0)
        (call(x) * call(x * 0.5)).backward()
        found.append([p.grad for p in own.parameters()] + list(own.buffers()))
    assert all(map(same, *found))


def test_what_a_replay_reads_must_not_change_before_it() -> None:
    model, x = Stack(lambda block, x: x.exp()), rows(64).requires_grad_()
    plan = everything(model, x)
    one_step(plan.model, model, (x,), {})
    for changed in (model.blocks[2].linear.weight, model.blocks[1].linear.bias):
        loss = plan.model(x)
        with torch.no_grad():
            changed.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_settings_that_are_others_than_when_planned_run_the_models_own_forward() -> None:
    model, x = Stack(attention), rows(64)
    plan = everything(model, x)
    twin = copy.deepcopy(model)
    for number in range(4):
        with sdpa_kernel(SDPBackend.MATH if number > 1 else SDPBackend.FLASH_ATTENTION):
            expected = one_step(twin, twin, (x,), {}, None, number)
            assert differences(expected, one_step(plan.model, model, (x,), {}, None, number)) == []


class Within(nn.Module):
    """Sets what calls depend on within its forward."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.linear, self.kind = nn.Linear(32, 32), kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x).sin()
        if self.kind == "seed":
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(3)
                x = x * torch.rand_like(x)
        elif self.kind == "kernels":
            with sdpa_kernel(SDPBackend.MATH):
                q = x.view(1, 4, -1, 32)
                x = F.scaled_dot_product_attention(q, q, q).reshape(x.shape)
        else:
            torch.set_default_dtype(torch.float64)
            try:
                x = x * torch.cos(torch.arange(32) * 1e6 / 3)
            finally:
                torch.set_default_dtype(torch.float32)
        return x.float().exp().mean()


@pytest.mark.parametrize("mechanism", ["torch", "graph"])
@pytest.mark.parametrize(("kind", "said"), [("seed", "seeded"), ("kernels", "kernels"), ("type", "default type")])
def test_what_is_set_within_forward_is_refused_by_name(mechanism: str, kind: str, said: str) -> None:
    with pytest.raises(UnsupportedModelError, match=said):
        optimize(Within(kind), 1 << 40, (rows(64),), strategy="all", mechanism=mechanism)


def test_what_python_holds_longer_than_a_graph_counts_only_where_it_is_held() -> None:
    class Holds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            seen = [x]
            with torch.no_grad():
                for linear in self.linears:
                    seen.append(linear(seen[-1]))  # all are held until forward ends
            return self.linears[0](seen[-1]).sin().mean()

    model, x = Holds(), torch.randn(512, 64)
    slices = [optimize(model, 1 << 40, (x,), mechanism=m) for m in ("slice", "graph")]
    plain = slices[0].baseline_peak_bytes
    with pytest.raises(InfeasibleBudgetError):
        optimize(model, plain - 2 * x.nbytes, (x,))
    plan = optimize(model, plain - 2 * x.nbytes, (x,), mechanism="graph")
    assert_kept_as_predicted(plan)
    assert not plan.segments and "a captured graph runs" in plan.mechanism_reason
    assert_same_steps(plan, model, (x,), {})


def test_the_frontier_of_a_plan_is_its_own_mechanisms() -> None:
    model, x = Wide(), rows()
    plan = optimize(model, "100%", (x,), mechanism="graph")
    curve = plan.frontier(4)
    assert {p.mechanism for p in curve.points} == {"graph"}
    tight = plan.at(curve.points[0])
    assert tight.mechanism == "graph" and tight.segments
    assert_kept_as_predicted(tight)
    assert_same_steps(tight, model, (x,), {})


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(more=LATER), number=st.integers(0, 99), leaf=st.booleans())
def test_graphs_that_nobody_thought_of(program: list, number: int, leaf: bool) -> None:
    model, x = RandomModel(program, number), torch.randn(ROWS, WIDTH, requires_grad=leaf)
    plan = optimize(model, 1 << 40, (x,), strategy="sqrt", mechanism="graph")
    plan.verify()
    twin = copy.deepcopy(model)
    for step in range(3):
        expected = one_step(twin, twin, (x,), {}, None, step)
        assert differences(expected, one_step(plan.model, model, (x,), {}, None, step)) == []
