"""A monitor's records are the step's own figures, and monitoring does not disturb the training."""

from __future__ import annotations

import copy
import gc
import logging
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

from ckpt_planner import CkptPlannerError, Monitor, Plan, StepRecord, optimize
from ckpt_planner.profiling.rehearse import rehearse
from tests.helpers import differences, one_step, state_of

WIDTH, ROWS = 48, 2048


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(WIDTH, WIDTH), nn.Tanh())))


def rows(count: int = ROWS) -> torch.Tensor:
    torch.manual_seed(1)
    return torch.randn(count, WIDTH)


def square(y: torch.Tensor) -> torch.Tensor:
    return y.square().mean()


def planned(model: nn.Module, budget: str | int = "85%", **options: Any) -> Plan:
    torch.set_num_threads(1)
    return optimize(model, budget, (rows(),), loss_fn=square, **options)


def train(plan: Plan, monitor: Monitor, optimizer: torch.optim.Optimizer | None, steps: int, count: int = ROWS) -> None:
    for _ in range(steps):
        with monitor.step():
            plan.model.zero_grad()
            output = plan.model(rows(count))  # held through backward, as in `measure`
            square(output).backward()
            del output
            if optimizer is not None:
                optimizer.step()


def logged(plan: Plan, steps: int, optimizer: Any = None, count: int = ROWS, **options: Any) -> list[StepRecord]:
    found: list[StepRecord] = []
    with Monitor(plan, found.append, **options) as monitor:
        train(plan, monitor, optimizer, steps, count)
    assert monitor.last == found[-1]
    return found


def test_the_measured_peak_is_the_steps() -> None:
    model = net()
    plan = planned(model)
    assert plan.segments
    real = plan.measure().peak_bytes
    assert [r.peak_bytes for r in logged(plan, 3, every=1)] == [real] * 3
    plain = rehearse(model, (rows(),), {}, square, None).peak_bytes
    assert [r.peak_bytes for r in logged(optimize(model, "100%", (rows(),), loss_fn=square), 1, every=1)] == [plain]


def test_the_optimizers_state_counts_once_it_is_there() -> None:
    model = net()
    plan = planned(model, optimizer=torch.optim.AdamW)
    real, state = plan.measure().peak_bytes, plan.profile.optimizer_state_bytes
    found = logged(plan, 3, torch.optim.AdamW(model.parameters()), every=1)
    assert found[0].peak_bytes == pytest.approx(real - state, abs=256)  # its first step makes it, after the peak
    assert [r.peak_bytes for r in found[1:]] == [real] * 2
    loaded = torch.optim.AdamW(model.parameters())
    square(model(rows())).backward()
    loaded.step()
    assert logged(plan, 1, loaded, every=1)[0].peak_bytes == real  # not seen before its own step in the first one


@pytest.mark.parametrize("inside", [True, False])
@pytest.mark.parametrize("late", [True, False])
def test_inputs_and_old_gradients_count_as_long_as_they_are_there(inside: bool, late: bool) -> None:
    model = net()
    plan = planned(model)
    real, found = plan.measure().peak_bytes, []
    x = rows()
    with Monitor(plan, found.append, every=1) as monitor:
        for _ in range(2):
            with monitor.step():
                if inside:
                    x = rows()
                if not late:
                    model.zero_grad()
                output = plan.model(x)  # held through backward, as in `measure`
                loss = square(output)
                if late:
                    model.zero_grad()
                loss.backward()
                del loss, output
    assert found[0].peak_bytes == real
    gradients = sum(p.nbytes for p in model.parameters())
    assert real <= found[1].peak_bytes <= real + (gradients if late else 0)


def test_what_was_predicted_stands_beside_what_was_measured() -> None:
    plan = planned(net())
    found = logged(plan, 4, every=2)
    assert [r.step for r in found] == [0, 1, 2, 3]
    assert [r.peak_bytes is not None for r in found] == [True, False, True, False]
    assert [r.step_seconds is None for r in found] == [
        True,
        False,
        True,
        False,
    ]  # the profiler's time is none
    for r in found:
        assert (r.calls, r.planning, r.signature) == (1, False, plan.profile.input_signature)
        assert (r.predicted_peak_bytes, r.budget_bytes) == (plan.peak_bytes, plan.budget_bytes)
        assert (r.predicted_overhead, r.predicted_recompute_seconds) == (plan.overhead, plan.recompute_seconds)
        assert r.reserved_bytes is None
    assert found[0].error == plan.peak_bytes / found[0].peak_bytes - 1
    timed = found[1]
    assert 0 < timed.recompute_seconds < timed.step_seconds
    assert timed.overhead == timed.recompute_seconds / (timed.step_seconds - timed.recompute_seconds)


def test_a_plan_that_recomputes_nothing_has_no_overhead() -> None:
    found = logged(optimize(net(), "100%", (rows(),), loss_fn=square), 1, every=5, start=7)
    found += logged(planned(net(), "100%"), 2, every=2)[1:]
    assert found[0].step == 7
    assert (found[1].recompute_seconds, found[1].overhead) == (0.0, 0.0)


def test_a_step_in_which_planning_happens_says_so_and_the_next_is_measured() -> None:
    torch.set_num_threads(1)
    plan = optimize(net(), "85%", loss_fn=square)
    found = logged(plan, 3, every=100)
    assert [r.planning for r in found] == [True, False, False]
    assert (found[0].peak_bytes, found[0].step_seconds) == (None, None)
    assert abs(found[1].error) < 0.01
    assert found[2].peak_bytes is None


def test_several_kinds_of_call_have_their_own_predictions() -> None:
    plan = planned(net())
    found: list[StepRecord] = []
    with Monitor(plan, found.append, every=1) as monitor:
        for count in (ROWS, ROWS // 2, ROWS // 2, ROWS):
            train(plan, monitor, None, 1, count)
    assert [r.planning for r in found] == [False, True, False, False]
    assert found[0].signature == found[3].signature != found[2].signature
    assert found[0].predicted_peak_bytes == plan.peak_bytes > found[2].predicted_peak_bytes
    assert all(abs(found[i].error) < 0.01 for i in (0, 2, 3))


def test_several_calls_in_a_step_are_counted() -> None:
    model = net()
    plan = planned(model)
    found: list[StepRecord] = []
    with Monitor(plan, found.append, every=1) as monitor, monitor.step():
        model.zero_grad()
        for _ in range(3):
            square(plan.model(rows())).backward()
        plan.model.eval()(rows())
    assert (found[0].calls, found[0].predicted_peak_bytes) == (3, plan.peak_bytes)
    assert found[0].predicted_recompute_seconds == pytest.approx(3 * plan.recompute_seconds)
    assert found[0].peak_bytes > plan.peak_bytes


def test_a_step_without_a_planned_call_is_logged() -> None:
    found: list[StepRecord] = []
    with Monitor(planned(net()), found.append, every=1) as monitor, monitor.step():
        pass
    assert (found[0].calls, found[0].predicted_peak_bytes, found[0].signature) == (0, None, None)


def test_a_broken_budget_is_warned_of_once(caplog: pytest.LogCaptureFixture) -> None:
    plan = planned(net())
    with caplog.at_level(logging.WARNING, "ckpt_planner"):
        logged(plan, 2, every=1)
        assert not caplog.records
        found: list[StepRecord] = []
        with Monitor(plan, found.append, every=1) as monitor:
            for _ in range(3):
                with monitor.step():
                    more = torch.zeros(1 << 20)
                    square(plan.model(rows())).backward()
                    del more
    assert found[0].peak_bytes > plan.budget_bytes
    warned = [r.getMessage() for r in caplog.records if "above the budget" in r.getMessage()]
    assert len(warned) == 1
    assert "step 0 of Sequential" in warned[0]
    assert str(found[0].peak_bytes) in warned[0]


def test_the_warning_says_what_the_plan_does_not_count(caplog: pytest.LogCaptureFixture) -> None:
    model = net()
    plan = planned(model)
    plan = planned(model, plan.peak_bytes)
    logged(plan, 2, torch.optim.AdamW(model.parameters()), every=1)
    assert "give it to optimize(..., optimizer=...)" in caplog.text
    caplog.clear()
    with Monitor(plan, every=1) as monitor, monitor.step():
        for _ in range(2):
            square(plan.model(rows())).backward()
    assert "gradients of its earlier calls" in caplog.text


def test_monitored_steps_compute_the_same() -> None:
    plain, model = net(), net()
    plan = planned(model)
    with Monitor(plan, every=2) as monitor:
        for number in range(3):
            expected = one_step(plain, plain, (rows(),), {}, square, number)
            with monitor.step():
                model.zero_grad()
                torch.manual_seed(number)
                x = rows()
                loss = square(plan.model(x))
                loss.backward()
            torch.manual_seed(number)
            found = state_of(model, ((x,), {}), loss)
            names = [n for n in differences(expected, found) if not n.startswith("generator")]
            assert names == []


@pytest.mark.parametrize("where", ["before", "forward", "backward", "after"])
@pytest.mark.parametrize("kind", [ValueError, KeyboardInterrupt])
def test_a_step_that_raises_leaves_nothing_behind(where: str, kind: type[BaseException]) -> None:
    model = net()
    plan = planned(model)
    found: list[StepRecord] = []

    def fail(*_: Any) -> None:
        raise kind("meant")

    with Monitor(plan, found.append, every=1) as monitor:
        with pytest.raises(kind, match="meant"), monitor.step():
            if where == "before":
                fail()
            hook = model[4].register_forward_hook(fail) if where == "forward" else None
            try:
                y = plan.model(rows())
            finally:
                if hook is not None:
                    hook.remove()
            if where == "backward":
                y.register_hook(fail)
            square(y).backward()
            fail()
        assert plan._runtime.watches == []
        assert not torch._C._autograd._profiler_enabled()
        train(plan, monitor, None, 1)
    assert [r.step for r in found] == [0]
    assert found[0].peak_bytes is not None


def test_steps_do_not_nest_and_a_closed_monitor_takes_none() -> None:
    plan = planned(net())
    with Monitor(plan, every=1) as monitor:
        with pytest.raises(CkptPlannerError, match="within"), monitor.step(), monitor.step():
            pass
        train(plan, monitor, None, 1)
        assert monitor.last is not None
        assert monitor.last.step == 0
    monitor.close()
    with pytest.raises(CkptPlannerError, match="closed"), monitor.step():
        pass


def test_a_monitor_within_anothers_step_leaves_the_profiler_to_it() -> None:
    plan, other = planned(net()), planned(net())
    found: list[StepRecord] = []
    inner: list[StepRecord] = []
    with Monitor(plan, found.append, every=1) as outer, Monitor(other, inner.append, every=1) as nested:
        with outer.step():
            train(other, nested, None, 1)
            square(plan.model(rows())).backward()
        train(other, nested, None, 1)
    assert found[0].peak_bytes is not None
    assert [r.peak_bytes is None for r in inner] == [True, False]


def test_a_profiler_of_the_users_own_goes_on() -> None:
    plan = planned(net())
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        found = logged(plan, 2, every=1)
    assert [r.peak_bytes for r in found] == [None, None]
    assert found[0].step_seconds is not None
    assert any("addmm" in e.key for e in profiler.key_averages())


def test_nothing_is_held_after_the_step() -> None:
    model = net()
    plan = planned(model)
    optimizer = torch.optim.AdamW(model.parameters())
    hooks = len(_global_optimizer_post_hooks)
    monitor = Monitor(plan, every=1)
    train(plan, monitor, optimizer, 2)
    assert len(_global_optimizer_post_hooks) == hooks
    assert plan._runtime.watches == []
    gone = weakref.ref(optimizer)
    gradients = weakref.ref(model[0].weight.grad)
    del optimizer
    model.zero_grad()
    gc.collect()
    assert gone() is None
    assert gradients() is None


def test_a_planned_model_can_be_copied_within_a_step() -> None:
    plan = planned(net())
    with Monitor(plan, every=1) as monitor, monitor.step():
        copied = copy.deepcopy(plan.model)
        square(copied(rows())).backward()
        square(plan.model(rows())).backward()
    assert monitor.last is None or monitor.last.calls == 1
    monitor.close()
    assert monitor.last is not None
    assert monitor.last.calls == 1


def test_a_loaded_plan_is_monitored_once_it_is_applied(tmp_path: Any) -> None:
    planned(net()).save(tmp_path / "plan.json")
    plan = Plan.load(tmp_path / "plan.json")
    with pytest.raises(CkptPlannerError, match="apply"):
        Monitor(plan)
    plan.apply(net())
    assert logged(plan, 1, every=1)[0].predicted_peak_bytes == plan.peak_bytes


def test_every_is_a_number_of_steps() -> None:
    with pytest.raises(CkptPlannerError, match="every=0"):
        Monitor(planned(net()), every=0)
