"""What training loops do around a model: clipping, scaling, optimizers, exceptions, many steps, several threads."""

from __future__ import annotations

import gc
from pathlib import Path

import pytest
import torch
from torch import nn

from ckpt_planner import Plan, optimize
from ckpt_planner.replay.group import Group
from ckpt_planner.replay.handles import Handle, Kept
from tests.helpers import default_loss, differences, dropping_all, one_step, planned, seed

WIDTH = 16


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


class Net(nn.Module):
    """Raises what `failure` says, at layer 4, in forward or in backward."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.norm, self.failure = nn.BatchNorm1d(WIDTH), {}

    def fail(self, gradient: torch.Tensor) -> None:
        raise self.failure["backward"]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, linear in enumerate(self.linears):
            x = torch.dropout(torch.tanh(linear(x)), 0.1, True)
            if number == 4 and "forward" in self.failure:
                raise self.failure["forward"]
            if number == 4 and "backward" in self.failure:
                x.register_hook(self.fail)
        return self.norm(x)


def pair(make_plan=dropping_all):
    plain, model = Net(), Net()
    plan = make_plan(model, rows(), loss_fn=default_loss)
    return plain, model, plan


@pytest.mark.parametrize("error", [KeyboardInterrupt(), torch.OutOfMemoryError("no memory"), ValueError("odd")])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_next_step_works_after_an_exception(where: str, error: BaseException) -> None:
    plain, model, plan = pair()
    for call, m in ((plain, plain), (plan.model, model)):
        m.failure = {where: error}
        with pytest.raises(type(error)):
            one_step(call, m, rows(), {})
        m.failure = {}
    assert differences(one_step(plain, plain, rows(), {}), one_step(plan.model, model, rows(), {})) == []
    assert torch._C._len_torch_function_stack() == 0
    assert torch._C._autograd._top_saved_tensors_default_hooks(True) is None


def test_the_next_step_works_after_an_exception_during_a_replay(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, model, plan = pair()
    run, count = Group._run, [0]

    def interrupted(self, *args):
        count[0] += 1
        if count[0] == 3:
            raise KeyboardInterrupt
        return run(self, *args)

    monkeypatch.setattr(Group, "_run", interrupted)
    (x,) = rows()
    seed(0)
    loss = default_loss(plan.model(x))
    before = torch.get_rng_state()
    with pytest.raises(KeyboardInterrupt):
        loss.backward()
    assert torch.equal(before, torch.get_rng_state())
    one_step(plain, plain, rows(), {})
    assert differences(one_step(plain, plain, rows(), {}), one_step(plan.model, model, rows(), {})) == []


def test_an_operation_that_fails_and_is_tried_again() -> None:
    """A forward that catches an error, as one that falls back from a kernel does."""

    class Falls(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            wide, fitting = torch.ones(WIDTH + 1), torch.ones(WIDTH)
            for linear in self.linears:
                x = torch.tanh(linear(x))
                try:
                    x = torch.mul(x, wide)
                except RuntimeError:
                    x = torch.mul(x, fitting)
            return x

    plain, model = Falls(), Falls()
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    assert differences(one_step(plain, plain, rows(), {}), one_step(plan.model, model, rows(), {})) == []


def live() -> tuple[int, int, int]:
    gc.collect()
    objects = gc.get_objects()
    tensors = sum(issubclass(type(o), torch.Tensor) for o in objects)
    return tensors, sum(isinstance(o, Group) for o in objects), sum(isinstance(o, (Handle, Kept)) for o in objects)


def test_two_hundred_steps_without_growth() -> None:
    model = Net()
    plan = planned(model, rows(256), loss_fn=default_loss)
    optimizer = torch.optim.AdamW(plan.model.parameters())
    counts, before = [], live()
    for number in range(200):
        optimizer.zero_grad()
        default_loss(plan.model(*rows(256))).backward()
        optimizer.step()
        if number in (10, 199):
            counts.append(live())
    assert counts[0] == counts[1]
    assert counts[1][1:] == before[1:]


def test_forwards_without_backward_leave_nothing() -> None:
    model = Net()
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    gc.collect()
    gc.disable()
    try:
        before = [o for o in gc.get_objects() if isinstance(o, (Group, Handle))]
        for _ in range(5):
            plan.model(*rows())
        after = [o for o in gc.get_objects() if isinstance(o, (Group, Handle))]
    finally:
        gc.enable()
    assert len(after) == len(before)


@pytest.mark.parametrize("optimizer_first", [True, False])
def test_an_optimizer_made_before_or_after_planning_with_clipping(optimizer_first: bool) -> None:
    plain, model = Net(), Net()
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, model)] if optimizer_first else []
    plan = planned(model, rows(), loss_fn=default_loss)
    optimizers = optimizers or [torch.optim.AdamW(m.parameters()) for m in (plain, plan.model)]
    for number in range(3):
        for call, m, optimizer in ((plain, plain, optimizers[0]), (plan.model, model, optimizers[1])):
            one_step(call, m, rows(), {}, None, number)
            nn.utils.clip_grad_norm_(call.parameters(), 0.1)
            optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_gradient_scaler() -> None:
    plain, model, plan = pair(planned)
    for call, m in ((plain, plain), (plan.model, model)):
        scaler, optimizer = torch.amp.GradScaler("cpu", init_scale=1024.0), torch.optim.SGD(m.parameters(), lr=0.1)
        for number in range(3):
            torch.manual_seed(number)
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.float16):
                loss = default_loss(call(*rows()))
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(m.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), model.parameters(), strict=True))


def test_requires_grad_toggled_between_steps() -> None:
    plain, model, plan = pair(planned)
    for number in range(4):
        for m in (plain, plan.model):
            m.requires_grad_(True)
            m.linears[: number % 3].requires_grad_(False)
        assert differences(one_step(plain, plain, rows(), {}), one_step(plan.model, model, rows(), {})) == []
    assert len(plan._runtime.cache) == 3


def test_converted_to_another_type() -> None:
    plain, model = Net(), Net()
    plan = optimize(model, budget="90%", example_args=rows(), loss_fn=default_loss)
    x = (rows()[0].double(),)
    assert differences(one_step(plain.double(), plain, x, {}), one_step(plan.model.double(), model, x, {})) == []
    assert len(plan._runtime.cache) == 2


def test_parameters_replaced_between_steps() -> None:
    plain, model, plan = pair()
    for m in (plain, model):
        torch.manual_seed(3)
        m.linears[2] = nn.Linear(WIDTH, WIDTH)
        m.linears[3].weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
    assert differences(one_step(plain, plain, rows(), {}), one_step(plan.model, model, rows(), {})) == []


def test_a_layer_added_between_steps() -> None:
    plain, model, plan = pair()
    for m in (plain, model):
        torch.manual_seed(3)
        m.linears.insert(1, nn.Linear(WIDTH, WIDTH))
        m.linears.append(nn.Linear(WIDTH, WIDTH, bias=False))
    for number in range(3):
        assert (
            differences(
                one_step(plain, plain, rows(), {}, None, number), one_step(plan.model, model, rows(), {}, None, number)
            )
            == []
        )


def test_a_loaded_plan_counts_its_optimizer_in_other_calls(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    x = torch.randn(64, 32)
    plan = optimize(model, "100%", (x,), loss_fn=default_loss, optimizer=torch.optim.AdamW)
    plan.save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", loss_fn=default_loss)
    assert loaded.apply(model, x) is loaded.model
    assert loaded.measure().peak_bytes == plan.measure().peak_bytes
    loaded.model(x[:32])
    other = list(loaded._runtime.cache.values())[-1].decision.profile
    assert other.optimizer_state_bytes == plan.profile.optimizer_state_bytes > 0


def test_parameters_of_another_type_are_planned_anew() -> None:
    model = nn.Sequential(nn.Embedding(10, 16), nn.Linear(16, 16), nn.Tanh())
    ids = torch.randint(10, (8, 4))
    plan = optimize(model, "100%", (ids,), loss_fn=default_loss)
    plan.model.double()
    plan.model(ids)
    first, second = (p.decision.profile.parameter_bytes for p in plan._runtime.cache.values())
    assert second == 2 * first
