"""Mechanisms that run a captured graph: the budget kept, every value as in eager; guards fail harmlessly."""

from __future__ import annotations

import copy
import logging
import pickle
from pathlib import Path

import pytest
import torch
from torch import nn

from benchmarks.families import build
from ckpt_planner import CkptPlannerError, Plan, UnsupportedModelError, optimize
from ckpt_planner.decision import Decision
from tests.helpers import differences, one_step, seed
from tests.on_a_graph import Branching, Wide, assert_kept_as_predicted, assert_same_steps, planned, rows


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(params=["torch", "graph"])
def mechanism(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("share", [0.7, 0.45])
@pytest.mark.parametrize("name", ["gpt2", "bert", "vit", "unet", "t5", "lstm_stack", "resnet"])
def test_budget_is_kept_and_values_are_the_same(mechanism: str, name: str, share: float) -> None:
    made = build(name, small=True)
    plan = planned(mechanism, made.model, made.args, made.kwargs, share, loss_fn=made.loss_fn)
    assert plan.mechanism == mechanism and plan.segments
    assert_kept_as_predicted(plan)
    assert_same_steps(plan, made.model, made.args, made.kwargs, made.loss_fn)


def test_autocast_around_the_model_and_within(mechanism: str) -> None:
    class Within(Wide):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.lins[0](x)
            with torch.autocast("cpu", torch.bfloat16):
                for lin in (*self.lins, *self.lins):
                    x = torch.tanh(lin(x))
            return x.float().pow(2).mean()

    x = rows()
    model = Within()
    plan = planned(mechanism, model, (x,), share=0.6)
    assert_kept_as_predicted(plan)
    assert_same_steps(plan, model, (x,), {})
    model = nn.Sequential(*[m for _ in range(6) for m in (nn.Linear(32, 32), nn.GELU())])
    with torch.autocast("cpu", torch.bfloat16):
        plan = planned(mechanism, model, (x,), loss_fn=lambda y: y.float().mean())
        assert plan.segments
        assert_kept_as_predicted(plan)
        assert_same_steps(plan, model, (x,), {}, lambda y: y.float().mean())


def test_eval_mode_and_no_grad_run_the_model_itself(mechanism: str) -> None:
    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,))
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


def test_a_value_that_takes_another_path_runs_the_model_itself(
    mechanism: str, caplog: pytest.LogCaptureFixture
) -> None:
    model, x = Branching(), rows().abs()
    plan = planned(mechanism, model, (x,))
    twin = copy.deepcopy(model)
    with caplog.at_level(logging.WARNING, "ckpt_planner"):
        for number, sign in enumerate((1, -1, 1, -1, -1, -1, 1)):
            expected = one_step(twin, twin, (sign * x,), {}, None, number)
            assert differences(expected, one_step(plan.model, model, (sign * x,), {}, None, number)) == []
    lines = [r.getMessage() for r in caplog.records if "ran its own forward" in r.getMessage()]
    assert lines and "on_a_graph.py" in lines[0] and "__bool__" in lines[0]


def test_an_attribute_that_changes_is_seen_at_once_and_planned_anew(mechanism: str) -> None:
    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,))
    twin = copy.deepcopy(model)
    for number, scale in enumerate((1.0, 1.0, 0.5, 0.5, 0.5)):
        model.scale = twin.scale = scale
        expected = one_step(twin, twin, (x,), {}, None, number)
        assert differences(expected, one_step(plan.model, model, (x,), {}, None, number)) == []
    (again,) = plan._runtime.cache.values()
    assert again is not plan._runtime.first and again.rewritten is not None and again.misses == 0


def test_a_hook_added_later_is_called_once_a_step(mechanism: str) -> None:
    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,))
    calls: list[int] = []
    hooked = id(model.lins[0])  # planning anew runs copies, which call it too
    model.lins[0].register_forward_hook(lambda m, *_: calls.append(1) if id(m) == hooked else None)
    for number in range(4):
        one_step(plan.model, model, (x,), {}, None, number)
    assert len(calls) == 4
    (later,) = plan._runtime.cache.values()
    assert type(later.decision) is Decision, "what no graph repeats is followed"


def test_other_shapes_are_planned_on_their_own(mechanism: str) -> None:
    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,))
    assert_same_steps(plan, model, (rows(64),), {}, steps=2)
    assert_same_steps(plan, model, (x,), {}, steps=2)
    assert len(plan._runtime.cache) == 2


@pytest.mark.parametrize("kind", ["random", "state", "hook"])
def test_what_no_graph_repeats_is_refused_by_name(mechanism: str, kind: str) -> None:
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
        optimize(model, "60%", (rows(),), mechanism=mechanism)
    with pytest.raises(CkptPlannerError, match="unknown"):
        optimize(model, "60%", (rows(),), mechanism="other")


def test_parameters_changed_before_backward_raise_as_in_eager(mechanism: str) -> None:
    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,))
    loss = plan.model(x)
    with torch.no_grad():
        for lin in model.lins:
            lin.weight.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_files_copies_and_pickles_carry_the_plan(mechanism: str, tmp_path: Path) -> None:
    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,))
    plan.save(tmp_path / "plan.json")
    other = copy.deepcopy(model)
    loaded = Plan.load(tmp_path / "plan.json")
    assert loaded.mechanism == mechanism and loaded.segments == plan.segments
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


def test_strategies_and_the_graph(mechanism: str) -> None:
    made = build("gpt2", small=True)
    for strategy in ("all", "sqrt", "none"):
        plan = optimize(made.model, 1 << 40, made.args, made.kwargs, strategy=strategy, mechanism=mechanism)
        assert bool(plan.segments) is (strategy != "none")
        assert_kept_as_predicted(plan)
        metas = [n.meta for n in plan.graph.graph.nodes if "op" in n.meta]
        assert sum(m["recomputed"] for m in metas) == sum(s.nodes for s in plan.segments)


def test_steps_leave_nothing_behind(mechanism: str) -> None:
    import gc

    model, x = Wide(), rows()
    plan = planned(mechanism, model, (x,), share=0.5)

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


def test_nothing_is_wrapped_where_the_plain_step_fits(mechanism: str) -> None:
    model, x = Wide(), rows()
    plan = optimize(model, "100%", (x,), mechanism=mechanism)
    assert plan.segments == () and plan.mechanism == mechanism and plan.peak_bytes == plan.baseline_peak_bytes
    plan.model(x).backward()
    assert f"Mechanism {mechanism}" in str(plan)
