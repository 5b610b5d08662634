"""Mechanism "torch": the budget kept, the peak as predicted, every value as in eager; guards fail harmlessly."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import nn

from benchmarks.families import build
from ckpt_planner import CkptPlannerError, InfeasibleBudgetError, Plan, UnsupportedModelError, optimize
from ckpt_planner.deciding import Planned
from ckpt_planner.decision import Decision
from ckpt_planner.regional import RegionDecision
from ckpt_planner.regions import Region
from ckpt_planner.rewrite.partition import Checkpointed
from ckpt_planner.solve import Solution, SolveStatus
from tests.helpers import differences, one_step, seed
from tests.random_models import ROWS, WIDTH, RandomModel, programs

TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


def planned(model: nn.Module, args: Any = (), kwargs: Any = None, share: float = 0.6, **options: Any) -> Plan:
    """A plan at a share of the plain step's memory, or at the least that this mechanism can keep."""
    call = {"example_args": args, "example_kwargs": kwargs, "mechanism": "torch", **options}
    plain = optimize(model, 1 << 40, **call)
    resident = plain.profile.resident_bytes
    budget = resident + int(share * (plain.baseline_peak_bytes - resident))
    try:
        return optimize(model, budget, **call)
    except InfeasibleBudgetError as error:
        assert budget < error.minimum_bytes and "slice" in str(error)
        return optimize(model, error.minimum_bytes, **call)


def assert_kept_as_predicted(plan: Plan) -> None:
    real = plan.measure()
    assert real.peak_bytes <= plan.budget_bytes
    assert abs(plan.peak_bytes - real.peak_bytes) <= TOLERANCE * real.peak_bytes
    plan.verify()


def assert_same_steps(
    plan: Plan, model: nn.Module, args: Any, kwargs: Any, loss_fn: Any = None, steps: int = 3
) -> None:
    """Train a twin of the model in eager beside the planned one."""
    twin = copy.deepcopy(model)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.05) for m in (twin, model)]
    for number in range(steps):
        expected = one_step(twin, twin, args, kwargs, loss_fn, number)
        assert differences(expected, one_step(plan.model, model, args, kwargs, loss_fn, number)) == []
        for optimizer in optimizers:
            optimizer.step()


@pytest.mark.parametrize("share", [0.7, 0.45])
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "unet", "t5", "lstm_stack", "resnet"])
def test_budget_is_kept_and_values_are_the_same(name: str, share: float) -> None:
    made = build(name, small=True)
    plan = planned(made.model, made.args, made.kwargs, share, loss_fn=made.loss_fn)
    assert plan.mechanism == "torch" and plan.segments
    assert_kept_as_predicted(plan)
    assert_same_steps(plan, made.model, made.args, made.kwargs, made.loss_fn)


def checkpoints(plan: Plan) -> list[Checkpointed]:
    """The checkpoints that run in a step."""
    first = plan._runtime.first
    assert first is not None and first.rewritten is not None
    _, values = first.rewritten._split
    return list(values.values())


class Wide(nn.Module):
    """Dropout, statistics, a counter that is used, noise and a slice that is written, at each level."""

    def __init__(self) -> None:
        super().__init__()
        self.lins = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))
        self.norms = nn.ModuleList(nn.BatchNorm1d(32) for _ in range(8))
        self.drop, self.scale = nn.Dropout(0.3), 1.0
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for lin, norm in zip(self.lins, self.norms, strict=True):
            self.count += 1
            y = torch.zeros_like(x)
            y[1:] = norm(lin(x))[:-1]
            x = x + torch.relu_(self.drop(torch.tanh(y)) * self.count.cos() * self.scale)
            x = x + 0.01 * torch.rand_like(x)
        return x.pow(2).mean()


def rows(number: int = 256) -> torch.Tensor:
    return torch.randn(number, 32)


def test_random_draws_statistics_and_counters_are_those_of_eager() -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,), share=0.5)
    regions = checkpoints(plan)
    assert any(r.state for r in regions) and any(r._options["preserve_rng_state"] for r in regions)
    assert_kept_as_predicted(plan)
    assert_same_steps(plan, model, (x,), {})


def test_generators_are_saved_only_where_something_is_drawn() -> None:
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.Tanh()) for _ in range(8)]), rows()
    plan = planned(model, (x,), loss_fn=lambda y: y.mean())
    assert checkpoints(plan) and not any(r._options["preserve_rng_state"] for r in checkpoints(plan))
    assert_kept_as_predicted(plan)


def test_values_kept_within_a_region_are_not_computed_again() -> None:
    model, x = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.Tanh(), nn.GELU())]), rows()
    plain = optimize(model, 1 << 40, (x,), loss_fn=lambda y: y.mean(), mechanism="torch")
    ops = plain.profile.ops
    kept = tuple(i for i, op in enumerate(ops[:-1]) if op.name.endswith("linear"))
    solution = Solution((), SolveStatus.FEASIBLE, 0.0, 0)
    peaks = []
    for keep in ((), kept[1:3], kept):
        decision = RegionDecision(plain.profile, solution, 1 << 40, "budget", regions=(Region(0, len(ops) - 1, keep),))
        plain._runtime.first = Planned(decision)
        for key in plain._runtime.cache:
            plain._runtime.cache[key] = plain._runtime.first
        assert_kept_as_predicted(plain)
        assert_same_steps(plain, model, (x,), {}, lambda y: y.mean())
        assert plain.segments[0].nodes == len(decision.regional.again(decision.regions[0]))
        peaks.append(plain.decision.timeline.saved)
    assert peaks[0] < peaks[1] < peaks[2]


def test_nothing_is_wrapped_where_the_plain_step_fits() -> None:
    model, x = Wide(), rows()
    plan = optimize(model, "100%", (x,), mechanism="torch")
    assert plan.segments == () and plan.mechanism == "torch" and plan.peak_bytes == plan.baseline_peak_bytes
    plan.model(x).backward()
    assert "Mechanism torch" in str(plan)


def test_autocast_around_the_model_and_within() -> None:
    class Within(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lins[0](x)
            with torch.autocast("cpu", torch.bfloat16):
                for lin in (*self.lins, *self.lins):
                    x = torch.tanh(lin(x))
            return x.float().pow(2).mean()

    x = rows()
    model = Within()
    plan = planned(model, (x,), share=0.6)
    assert_kept_as_predicted(plan)
    assert_same_steps(plan, model, (x,), {})
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])
    with torch.autocast("cpu", torch.bfloat16):
        plan = planned(model, (x,), loss_fn=lambda y: y.float().mean())
        assert plan.segments
        assert_kept_as_predicted(plan)
        assert_same_steps(plan, model, (x,), {}, lambda y: y.float().mean())


def test_eval_mode_and_no_grad_run_the_model_itself() -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,))
    with torch.no_grad():
        seed(1)
        a = plan.model(x)
        model.count.zero_()
        seed(1)
        assert torch.isfinite(a) and not a.requires_grad
    plan.model.eval()
    assert torch.equal(model.count, torch.zeros(()))
    a = plan.model(x)
    assert torch.equal(model.count, torch.tensor(8.0)) and a.requires_grad
    plan.model.train()
    model.count.zero_()
    assert_same_steps(plan, model, (x,), {}, steps=2)


class Branching(Wide):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        early = super().forward(x)
        if bool(x.detach().sum() > 0):
            return early
        return early * 2 + self.lins[0](x).sum()


def test_a_value_that_takes_another_path_runs_the_model_itself(caplog: pytest.LogCaptureFixture) -> None:
    model, x = Branching(), rows().abs()
    plan = planned(model, (x,))
    twin = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "ckpt_planner"):
        for number, sign in enumerate((1, -1, 1, -1, -1, -1, 1)):
            expected = one_step(twin, twin, (sign * x,), {}, None, number)
            assert differences(expected, one_step(plan.model, model, (sign * x,), {}, None, number)) == []
    lines = [r.getMessage() for r in caplog.records if "ran its own forward" in r.getMessage()]
    assert lines and "test_mechanism_torch.py" in lines[0] and "__bool__" in lines[0]


def test_an_attribute_that_changes_is_seen_at_once_and_planned_anew() -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,))
    twin = copy.deepcopy(model)
    for number, scale in enumerate((1.0, 1.0, 0.5, 0.5, 0.5)):
        model.scale = twin.scale = scale
        expected = one_step(twin, twin, (x,), {}, None, number)
        assert differences(expected, one_step(plan.model, model, (x,), {}, None, number)) == []
    (again,) = plan._runtime.cache.values()
    assert again is not plan._runtime.first and again.rewritten is not None and again.misses == 0


def test_a_hook_added_later_is_called_once_a_step() -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,))
    calls: list[int] = []
    hooked = id(model.lins[0])  # planning anew runs copies, which call it too
    model.lins[0].register_forward_hook(lambda m, *_: calls.append(1) if id(m) == hooked else None)
    for number in range(4):
        one_step(plan.model, model, (x,), {}, None, number)
    assert len(calls) == 4
    (later,) = plan._runtime.cache.values()
    assert type(later.decision) is Decision, "what no graph repeats is followed"


def test_other_shapes_are_planned_on_their_own() -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,))
    assert_same_steps(plan, model, (rows(64),), {}, steps=2)
    assert_same_steps(plan, model, (x,), {}, steps=2)
    assert len(plan._runtime.cache) == 2


@pytest.mark.parametrize("kind", ["random", "state", "hook"])
def test_what_no_graph_repeats_is_refused_by_name(kind: str) -> None:
    import random

    class Refused(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if kind == "random":
                x = x * random.random()
            if kind == "state":
                self.seen = [*getattr(self, "seen", []), 1]
            return super().forward(x)

    model = Refused()
    if kind == "hook":
        model.drop.register_forward_hook(lambda *_: None)
    with pytest.raises(UnsupportedModelError, match='mechanism="slice"'):
        optimize(model, "60%", (rows(),), mechanism="torch")
    with pytest.raises(CkptPlannerError, match="unknown"):
        optimize(model, "60%", (rows(),), mechanism="other")


def test_parameters_changed_before_backward_raise_as_in_eager() -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,))
    loss = plan.model(x)
    with torch.no_grad():
        for lin in model.lins:
            lin.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_files_copies_and_pickles_carry_the_plan(tmp_path: Path) -> None:
    model, x = Wide(), rows()
    plan = planned(model, (x,))
    plan.save(tmp_path / "plan.json")
    other = copy.deepcopy(model)
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.mechanism == "torch" and loaded.segments == plan.segments
    loaded.apply(other, x)
    assert_kept_as_predicted(loaded)
    assert_same_steps(loaded, other, (x,), {}, steps=2)
    for made in (copy.deepcopy(plan.model), pickle.loads(pickle.dumps(plan.model))):
        twin = copy.deepcopy(model)
        expected = one_step(twin, twin, (x,), {})
        assert differences(expected, one_step(made, made, (x,), {})) == []
        (of_copy,) = made._ckpt_runtime.cache.values()
        assert of_copy.rewritten is not None and of_copy.misses == 0
    assert_same_steps(plan, model, (x,), {}, steps=1)


def test_strategies_and_the_graph() -> None:
    made = build("gpt2", small=True)
    for strategy in ("all", "sqrt", "none"):
        plan = optimize(made.model, 1 << 40, made.args, made.kwargs, strategy=strategy, mechanism="torch")
        assert bool(plan.segments) is (strategy != "none")
        assert_kept_as_predicted(plan)
        metas = [n.meta for n in plan.graph.graph.nodes if "op" in n.meta]
        assert sum(m["recomputed"] for m in metas) == sum(s.nodes for s in plan.segments)


@settings(max_examples=15, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(program=programs(), number=st.integers(0, 99), leaf=st.booleans())
def test_graphs_that_nobody_thought_of(program: list, number: int, leaf: bool) -> None:
    torch.set_num_threads(1)
    model, x = RandomModel(program, number), torch.randn(ROWS, WIDTH, requires_grad=leaf)
    plan = optimize(model, 1 << 40, (x,), strategy="sqrt", mechanism="torch")
    plan.verify()
    real = plan.measure()
    assert abs(plan.peak_bytes - real.peak_bytes) <= TOLERANCE * real.peak_bytes


def test_steps_leave_nothing_behind() -> None:
    import gc

    model, x = Wide(), rows()
    plan = planned(model, (x,), share=0.5)

    def tensors() -> int:
        return sum(isinstance(o, torch.Tensor) for o in gc.get_objects())

    one_step(plan.model, model, (x,), {})
    gc.collect()
    gc.disable()
    try:
        before = tensors()
        for number in range(4):
            one_step(plan.model, model, (x,), {}, None, number)
        assert tensors() == before
    finally:
        gc.enable()
