"""Steps that leave the plan and meet it again further on."""

from __future__ import annotations

import random

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner.replay.follow import Follower
from tests.helpers import assert_same_step, default_loss, dropping_all, one_step, seed

WIDTH = 16


def rows() -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(256, WIDTH),)


class Wanders(nn.Module):
    """At some steps it skips operations, takes others, or writes in place; `step` decides."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(6)])
        self.norms = nn.ModuleList([nn.BatchNorm1d(WIDTH) for _ in range(6)])
        self.register_buffer("shift", torch.zeros(WIDTH))
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.step, self.table = 0, None

    def odd_part(self, x: torch.Tensor, chosen: int) -> torch.Tensor:
        match chosen:
            case 1:
                return F.dropout(x, 0.3).cos()
            case 2:
                return (x * 2).mul_(0.25).add_(x)
            case 3:
                self.shift += x.detach().mean(0)
                return x
            case 4:
                return x[torch.randperm(len(x))]
            case 5:
                with torch.no_grad():
                    self.shift.copy_(self.scale)
                return F.rrelu(x, training=True)
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        choose = random.Random(self.step)
        if self.table is None or self.step == 7:
            self.table = torch.linspace(0.5, 1.5, WIDTH).cos().exp().sin()
        for number, (linear, norm) in enumerate(zip(self.linears, self.norms, strict=True)):
            chosen = choose.choice([0] * 8 + [1, 2, 3, 4, 5, 6]) if self.step else 0
            if chosen == 6:  # a layer left out
                continue
            x = linear(x) + self.shift
            x = self.odd_part(x, chosen)
            x = F.dropout(torch.tanh(norm(x) * self.table), 0.1) if number % 2 else F.silu(x) * self.scale
        return x.sum()


@pytest.mark.parametrize("start", [0, 100])
def test_steps_that_wander_are_right(start: int, monkeypatch: pytest.MonkeyPatch) -> None:
    followed: list[Follower] = []
    finish = Follower.finish

    def noted(self: Follower) -> None:
        followed.append(self)
        finish(self)

    monkeypatch.setattr(Follower, "finish", noted)

    def before(model: nn.Module, step: int) -> None:
        model.step = start + step + 1

    assert_same_step(Wanders, rows(), before=before, steps=10, lr=0.01)
    left = [f for f in followed if f.diverged is not None]
    assert left
    assert any(not f.lost for f in left), "no step met its plan again"


def kept_bytes(model: nn.Module, call: nn.Module) -> int:
    """Bytes that autograd holds for backward after a forward, as a profiler outside sees them."""
    with torch.profiler.profile(profile_memory=True, activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        loss = default_loss(call(*rows()))
    events = profiler.profiler.kineto_results.events()
    held = sum(event.nbytes() for event in events if event.name() == "[memory]")
    del loss
    return held


def test_a_table_made_in_the_first_step_costs_no_memory_in_the_second() -> None:
    """The second step has fewer operations than was planned, near the start."""

    class Tabled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears, self.table = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(8)]), {}

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if "turn" not in self.table:
                self.table["turn"] = torch.arange(WIDTH).float().cos().exp()
            for linear in self.linears:
                x = torch.tanh(linear(x) * self.table["turn"])
            return x.sum()

    torch.manual_seed(0)
    plain, model = Tabled(), Tabled()
    model.load_state_dict(plain.state_dict())
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    (x,) = rows()
    first, second = (kept_bytes(model, plan.model) for _ in range(2))
    assert first < second <= first + 3 * x.nbytes  # a few calls pass before it knows where it is
    assert kept_bytes(plain, plain) >= 8 * x.nbytes


def test_a_write_that_no_plan_knows_of_leaves_what_was_read_before() -> None:
    """Eager does not mind, since adding saves nothing; the replay of the addition needs the old value."""

    class Late(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears, self.late = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]), False
            self.register_buffer("shift", torch.zeros(WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = torch.tanh(linear(x) + self.shift)
            if self.late:
                self.shift.add_(1)
            return x.sin().sum()

    def before(model: nn.Module, step: int) -> None:
        model.late = step == 1

    assert_same_step(Late, rows(), before=before, steps=3)


def test_what_a_call_does_first_is_not_taken_for_what_was_profiled() -> None:
    """Planned without dropout, first trained with it, on a plan that was not rehearsed in this process."""

    class Drops(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears, self.p = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]), 0.0

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = torch.tanh(F.dropout(linear(x), self.p))
            return x.sum()

    seed(0)
    plain, model = Drops(), Drops()
    model.load_state_dict(plain.state_dict())
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    for direction in plan._runtime.first.directions.ops:
        direction.known.clear()
    plain.p = model.p = 0.5
    found = [one_step(call, m, rows(), {}) for call, m in ((plain, plain), (plan.model, model))]
    assert all(torch.equal(found[0][k], v) for k, v in found[1].items() if isinstance(v, torch.Tensor))


class Rotates(nn.Module):
    """Writes into one of its tables each step, another each time, after all of them were read."""

    def __init__(self, silently: bool) -> None:
        super().__init__()
        self.linear, self.silently, self.turn = nn.Linear(WIDTH, WIDTH), silently, 0
        for i in range(3):
            self.register_buffer(f"table{i}", torch.full((WIDTH,), 0.1 * i))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        for i in range(3):
            x = torch.tanh(x + self.get_buffer(f"table{i}"))
        written = self.get_buffer(f"table{self.turn}")
        (written.data if self.silently else written).add_(1)
        return torch.sigmoid(x)


@pytest.mark.parametrize("silently", [False, True])
def test_a_planned_write_that_hits_another_tensor(silently: bool) -> None:
    def turned(model: nn.Module, step: int) -> None:
        model.turn = step

    assert_same_step(lambda: Rotates(silently), rows(), before=turned, tight=False)


class Overwrites(nn.Module):
    """At some steps it scales, in place, what was dropped, and goes on as planned after a few calls."""

    def __init__(self, silently: bool) -> None:
        super().__init__()
        self.weight, self.silently, self.late = nn.Parameter(torch.rand(WIDTH)), silently, False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.add(x * self.weight, 1)
        x.mul_(2)
        x = torch.add(torch.add(x, self.weight), 1)
        if self.late:
            (x.data if self.silently else x).mul_(3)
        noise = torch.floor(torch.ceil(torch.abs(torch.cos(self.weight.detach()))))
        return torch.tanh(torch.add(x, 1) / 50) + noise


@pytest.mark.parametrize("silently", [False, True])
def test_what_was_overwritten_is_not_made_again(silently: bool) -> None:
    def now_and_then(model: nn.Module, step: int) -> None:
        model.late = step % 2 == 1

    assert_same_step(lambda: Overwrites(silently), rows(), before=now_and_then, tight=False)
