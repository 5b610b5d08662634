"""Proof that the tests can fail: each handling is switched off, and verifying or comparing has to notice."""

from __future__ import annotations

import copy
import gc
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from ckpt_planner import CaptureError, VerificationError
from ckpt_planner.profiling import faithful, record, unseen
from ckpt_planner.replay import forward_program, group, handles, noted, noting
from ckpt_planner.replay.ambient import Autocast
from ckpt_planner.replay.calls import call_name, tensors_in
from ckpt_planner.replay.group import Group
from ckpt_planner.replay.noted import Source
from tests import test_hazards_autograd, test_hazards_inplace, test_hazards_random, test_hazards_state
from tests.helpers import default_loss, differences, dropping_all, one_step, seed

rows = test_hazards_state.rows
Patch = pytest.MonkeyPatch


def plan_of(make, args, again: str = ""):
    seed(1234)
    return dropping_all(make().train(), args, loss_fn=default_loss)


def assert_noticed(make, args) -> None:
    with pytest.raises(VerificationError):
        plan_of(make, args).verify()


def stateful(use):
    return type("Stateful", (test_hazards_state.Stateful,), {"use": use})


def test_random_states_not_restored(monkeypatch: Patch) -> None:
    monkeypatch.setattr(group, "set_generator_states", lambda states: None)
    assert_noticed(test_hazards_random.stack(test_hazards_random.RANDOM_OPERATIONS["dropout"]), rows())


def without_copies(monkeypatch: Patch, clones: bool) -> None:
    """Sources keep what would be copied as it is; without `clones`, replays write into it."""
    make, give = Source.__init__, Group._tensor

    def init(self, tensor, copied):
        make(self, tensor, copied)
        if copied:
            self.tensor = tensor

    def own(value, values, grad, call):
        return value.tensor if isinstance(value, Source) and value.copied else give(value, values, grad, call)

    monkeypatch.setattr(Source, "__init__", init)
    if not clones:
        monkeypatch.setattr(Group, "_tensor", staticmethod(own))


def test_statistics_written_twice(monkeypatch: Patch) -> None:
    without_copies(monkeypatch, clones=False)
    parts = [p for _ in range(3) for p in (nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())]
    assert_noticed(lambda: nn.Sequential(*parts), rows())


@pytest.mark.parametrize("use", [test_hazards_state.counter, test_hazards_state.moving_average])
def test_buffers_read_after_they_changed(monkeypatch: Patch, use) -> None:
    without_copies(monkeypatch, clones=True)
    assert_noticed(stateful(use), rows())


def test_power_iterations_seen_too_late(monkeypatch: Patch) -> None:
    without_copies(monkeypatch, clones=True)
    wrap = test_hazards_state.PARAMETRIZATIONS["spectral_norm"]
    layer = wrap(nn.Linear(16, 16))

    class Thrice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = copy.deepcopy(layer)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(4):
                x = torch.tanh(self.layer(x))
            return x.sum()

    assert_noticed(Thrice, rows())


def test_arrays_read_after_they_changed(monkeypatch: Patch) -> None:
    for module in (faithful, noting):
        monkeypatch.setattr(module, "mutable", lambda value: "")
    assert_noticed(test_hazards_random.stack(test_hazards_random.numpy_buffer_reused), rows())


@pytest.mark.parametrize("middle", [test_hazards_inplace.chained, test_hazards_inplace.sliced])
def test_writes_left_out_of_the_replay(monkeypatch: Patch, middle) -> None:
    run = Group._run

    def skipping(self, index, call, values):
        name = call_name(call.function)
        if name.endswith(("mul_", "add_", "__setitem__")):
            found = self._restore(call.args, values, False, call, {})
            values[index, 0] = next(tensors_in(found))
            return
        run(self, index, call, values)

    monkeypatch.setattr(Group, "_run", skipping)
    assert_noticed(test_hazards_inplace.stack(middle), rows())


def test_versions_not_checked(monkeypatch: Patch) -> None:
    plan = plan_of(lambda: test_hazards_inplace.stack(lambda self, x, n: x.tanh())(), rows())
    for module in (group, handles, noted):
        monkeypatch.setattr(module, "version_of", lambda tensor: 0)
    monkeypatch.setattr(group, "changed", lambda *found: None)
    loss = plan.model(*rows())
    with torch.no_grad():
        plan.model.linears[2].weight.add_(1)
    loss.backward()  # where eager raises; test_weights_changed_before_backward_raise_as_in_eager sees it


def test_choices_not_kept(monkeypatch: Patch) -> None:
    make = record.Op

    def without(**fields: Any) -> Any:
        return make(**{**fields, "choices": ()})

    plan = plan_of(test_hazards_random.Router, rows())
    kept = {s for op in plan.profile.ops for s in op.choices}
    assert kept
    monkeypatch.setattr(record, "Op", without)
    plan = plan_of(test_hazards_random.Router, rows())
    assert kept & set(plan.decision.solution.dropped)


def test_autocast_not_restored(monkeypatch: Patch) -> None:
    plan = plan_of(lambda: test_hazards_autograd.Cast(torch.bfloat16), rows())
    plan.verify()
    monkeypatch.setattr(Autocast, "__enter__", lambda self: None)
    with pytest.raises((VerificationError, CaptureError, RuntimeError)):
        plan.verify()


class Unseen(nn.Module):
    """Something outside torch's calls writes into a tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
        self.register_buffer("scale", torch.ones(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            y = linear(x).sin()
            array = y.detach().numpy()
            np.multiply(array, 0.5, out=array)
            self.scale.numpy()[:] += 0.25
            x = torch.tanh(y) * self.scale.cos() + F.gelu(y)
        return x.sum()


def test_writes_that_no_call_makes_are_right() -> None:
    plan_of(Unseen, rows()).verify()


def test_writes_that_no_call_makes_not_looked_for(monkeypatch: Patch) -> None:
    monkeypatch.setattr(unseen, "fingerprint", lambda tensor: 0)
    with pytest.raises(VerificationError):
        plan_of(Unseen, rows()).verify()


def steps_differ(make, before) -> bool:
    models = []
    for _ in range(2):
        seed(1234)
        models.append(make())
    plan = dropping_all(models[1], rows(), loss_fn=default_loss)
    found = []
    for call, model in zip((models[0], plan.model), models, strict=True):
        before(model)
        found.append(one_step(call, model, rows(), {}))
    return differences(*found) != []


def test_options_that_change_not_watched(monkeypatch: Patch) -> None:
    """A dropout that drew nothing when it was planned."""
    make = test_hazards_random.stack(lambda self, x, n: F.dropout(x, getattr(self, "p", 0.0)))

    def before(model: nn.Module) -> None:
        model.p = 0.5

    assert not steps_differ(make, before)
    monkeypatch.setattr(noting.Watch, "as_planned", lambda self: True)
    assert steps_differ(make, before)


def test_a_held_variable_never_goes(monkeypatch: Patch) -> None:
    """Holding a variable itself instead of a detached alias is a cycle that nothing collects."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])
            self.generator = torch.Generator()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                h = linear(x).sin()
                kept = torch.bernoulli(h.sigmoid(), generator=self.generator)
                x = (kept * h).cos()
            return x

    def init(self, tensor, copied):
        self.needs_grad, self.copied, self.tensor, self.version = tensor.requires_grad, copied, tensor, tensor._version

    def alive() -> int:
        for _ in range(3):
            plan.model(*rows())
        gc.collect()
        return sum(isinstance(o, Group) for o in gc.get_objects())

    plan = plan_of(Model, rows())
    first = alive()
    assert alive() == first
    monkeypatch.setattr(Source, "__init__", init)
    monkeypatch.setattr(forward_program, "held", lambda tensor: tensor)
    for direction in plan._runtime.first.directions.ops:
        direction.familiar = ()  # to be learnt again
    assert alive() > first
