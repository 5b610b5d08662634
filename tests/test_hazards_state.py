"""State that the forward changes: statistics, buffers, power iterations, Python attributes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.helpers import assert_same_step

WIDTH = 16


def images() -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(16, 4, 12, 12),)


def rows(count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(0)
    return (torch.randn(count, WIDTH),)


NORMS = {
    "BatchNorm2d": lambda: nn.BatchNorm2d(4),
    "BatchNorm2d without momentum": lambda: nn.BatchNorm2d(4, momentum=None),
    "InstanceNorm2d": lambda: nn.InstanceNorm2d(4, affine=True, track_running_stats=True),
    "GroupNorm": lambda: nn.GroupNorm(2, 4),
    "SyncBatchNorm": None,
}


@pytest.mark.parametrize("name", [n for n, make in NORMS.items() if make])
def test_statistics_move_once(name: str) -> None:
    def make() -> nn.Module:
        return nn.Sequential(
            *[part for _ in range(3) for part in (nn.Conv2d(4, 4, 3, padding=1), NORMS[name](), nn.ReLU())]
        )

    again = {"GroupNorm": "group_norm", "InstanceNorm2d": "instance_norm"}.get(name, "batch_norm")
    assert_same_step(make, images(), again=again, tight=name == "BatchNorm2d")


def test_one_norm_used_twice_moves_twice() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(3):
                x = torch.tanh(self.norm(self.linear(x)))
            return x.sum()

    assert_same_step(Twice, rows())


class Stateful(nn.Module):
    """Three layers, each followed by `use`, which changes a buffer and uses it."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.register_buffer("n", torch.zeros(()))
        self.register_buffer("average", torch.zeros(WIDTH))
        self.register_buffer("large", torch.zeros(512, 1024))
        self.register_buffer("codes", torch.randn(8, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = torch.tanh(self.use(linear(x)))
        return x.sum()


def counter(self, x):
    self.n += 1
    return x * self.n.clone()


def counter_without_tracking(self, x):
    with torch.no_grad():
        self.n.add_(1)
    return torch.sin(x * float(self.n) + self.n)


def counter_replaced(self, x):
    self.n = self.n + 1
    return x * self.n


def counter_by_data(self, x):
    self.n.data += 1
    return x * self.n


def moving_average(self, x):
    self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
    return (x - self.average).sin()


def moving_average_lerp(self, x):
    with torch.no_grad():
        self.average.lerp_(x.mean(0), 0.1)
    return x * self.average.exp()


def moving_average_copied(self, x):
    self.average.copy_(0.9 * self.average + 0.1 * x.detach().mean(0))
    return x * self.average.exp()


def slot_written(self, x):
    self.average[3] = x.detach().mean()
    return x * self.average.exp()


def large_buffer(self, x):
    self.large[:, :WIDTH] += x.detach()
    return x.sin() * self.large[:, :WIDTH].cos()


def codebook(self, x):
    nearest = torch.cdist(x.detach(), self.codes).argmin(-1)
    chosen = self.codes[nearest]
    with torch.no_grad():
        hot = F.one_hot(nearest, 8).to(x.dtype)
        self.codes.mul_(0.99).add_(0.01 * (hot.t() @ x) / (hot.sum(0)[:, None] + 1))
    return x + (chosen - x).detach() + (x - chosen) ** 2


def used_before_and_after(self, x):
    x = (x + self.average).cos()
    self.average += 1
    x = x.sin() + self.average.cos()
    self.average += 1
    return x * self.average.sigmoid()


def fed_back(self, x):
    x = torch.sin(x + self.average)
    self.average = x.detach().mean(0)
    return x


STATES = [
    counter, counter_without_tracking, counter_replaced, counter_by_data, moving_average, moving_average_lerp,
    moving_average_copied, slot_written, large_buffer, codebook, used_before_and_after, fed_back,
]  # fmt: skip


@pytest.mark.parametrize("use", STATES)
def test_buffers_that_the_forward_changes_and_uses(use) -> None:
    assert_same_step(type("Stateful", (Stateful,), {"use": use}), rows(), tight=use is STATES[0])


PARAMETRIZATIONS = {
    "spectral_norm": parametrizations.spectral_norm,
    "old spectral_norm": nn.utils.spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "old weight_norm": nn.utils.weight_norm,
    "orthogonal": parametrizations.orthogonal,
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PARAMETRIZATIONS)
def test_parametrizations_advance_once(name: str) -> None:
    def make() -> nn.Module:
        wrap = PARAMETRIZATIONS[name]
        return nn.Sequential(*[p for _ in range(3) for p in (wrap(nn.Linear(WIDTH, WIDTH)), nn.Tanh())])

    assert_same_step(make, rows(), tight=name == "spectral_norm")


def test_parametrization_cached_within_a_step() -> None:
    class Cached(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = parametrizations.spectral_norm(nn.Linear(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with nn.utils.parametrize.cached():
                for _ in range(4):
                    x = torch.tanh(self.layer(x))
            return x.sum()

    assert_same_step(Cached, rows())


# -- Python state and side effects ----------------------------------------------------------------------------------

FLAG = {"scale": 1.0}


class Steered(nn.Module):
    """Its forward is steered by attributes, a global and a counter, and leaves traces in Python."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
        self.temperature, self.step, self.calls, self.losses, self.seen = 1.0, 0, 0, [], {}
        self.drop = nn.Dropout(0.0)
        self.schedule = lambda: 1 / (1 + self.step)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.step += 1
        for linear in self.linears:
            x = torch.tanh(self.drop(linear(x)) / self.temperature)
            self.calls += 1
        if self.step > 2:
            x = x.sin()
        x = x * FLAG["scale"] * self.schedule()
        self.losses.append(float(x.detach().mean()))
        self.seen[self.step] = tuple(x.shape)
        return x.sum()


def steer(model: nn.Module, step: int) -> None:
    model.temperature = 1.0 + step
    model.drop.p = (0.0, 0.0, 0.4, 0.2)[step]
    FLAG["scale"] = 1.0 + 0.5 * step


def test_python_state_is_seen_at_the_step_at_which_it_changes() -> None:
    assert_same_step(Steered, rows(), before=steer, steps=4)


def test_python_side_effects_happen_once_a_step() -> None:
    def traces(model: nn.Module) -> object:
        return model.step, model.calls, list(model.losses), dict(model.seen)

    assert_same_step(Steered, rows(), observe=traces, steps=4)
    FLAG["scale"] = 1.0


def test_an_inplace_flag_that_is_switched_on() -> None:
    """The call of the same name begins to write into its argument."""

    class Switched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.act = nn.ELU()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = self.act(torch.sigmoid(linear(x)) + 1) * 0.5
            return x.sum()

    def before(model: nn.Module, step: int) -> None:
        model.act.inplace = step == 1

    assert_same_step(Switched, rows(), before=before)


def test_a_wiring_that_changes_under_the_same_names() -> None:
    """Another step calls the same functions in the same order on other tensors."""

    class Rewired(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.other = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                a = linear(x)
                b = linear(x * 0.5)
                (b if self.other else a).mul_(2)
                (a if self.other else b).add_(1.5)
                x = (a.tanh() if self.other else b.tanh()) * (a * 0.25).cos() + b.sigmoid()
            return x.sum()

    def before(model: nn.Module, step: int) -> None:
        model.other = step % 2 == 1

    assert_same_step(Rewired, rows(), before=before, steps=4)


def test_planning_writes_nothing_on_stderr() -> None:
    """torch has something to say about a buffer from before the step that the forward lets go."""
    program = """
import torch
from torch import nn
from ckpt_planner import optimize
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(16, 16)
        self.register_buffer("state", torch.zeros(64, 16))
    def forward(self, x):
        y = self.linear(x + self.state).tanh()
        self.state = y.detach()
        return self.linear(y).tanh().sum()
optimize(Model(), "100%", (torch.randn(64, 16),))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert (done.stdout, done.stderr) == ("", "")
