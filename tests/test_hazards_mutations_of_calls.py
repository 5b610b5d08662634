"""Proof that the tests can fail, for what happens around a step: frozen parts, several backwards, paths, names.

Where `plan.verify()`, which takes one step with one backward, cannot see a fault, the row's own test is run under the
mutation and has to fail.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from ckpt_planner import CaptureError, Plan, VerificationError, planned
from ckpt_planner.profiling import forward, record
from ckpt_planner.replay import follow, noting
from ckpt_planner.replay.group import Group
from ckpt_planner.runtime import Runtime
from tests import (
    test_hazards_autograd,
    test_hazards_calls,
    test_hazards_hooks,
    test_hazards_paths,
    test_training_around_the_model,
)
from tests.helpers import assert_same_step, default_loss, dropping_all, one_step, seed

rows = test_hazards_calls.rows
Patch = pytest.MonkeyPatch
WIDTH = test_hazards_calls.WIDTH


def plan_of(make, args) -> Plan:
    seed(1234)
    return dropping_all(make().train(), args, loss_fn=default_loss)


def fails(test, *args: Any) -> None:
    """The row's own test fails."""
    noticed = (AssertionError, VerificationError, CaptureError, RuntimeError, LookupError, pytest.fail.Exception)
    with pytest.raises(noticed):
        test(*args)


class Attends(nn.Module):
    """Attention with frozen projections, and a prefix that nothing trains."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.ModuleList([nn.MultiheadAttention(WIDTH, 2, dropout=0.1) for _ in range(3)])
        for layer in self.attention:
            layer.in_proj_weight.requires_grad_(False)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.attention:
            x = torch.tanh(self.linear(x))
            x = layer(x, x, x, need_weights=False)[0].sin()
        return x.sum()


def test_frozen_weights_take_gradients_in_a_replay(monkeypatch: Patch) -> None:
    """Then the operation saves more than it saved in forward, and what it saves is taken for something else."""
    x = (torch.randn(32, 8, WIDTH),)
    plan = plan_of(Attends, x)
    assert any(plan.profile.storages[s].kind == "hidden" for s in plan.decision.solution.dropped)
    give = Group._tensor

    def wanting(value, values, grad, call):
        found = give(value, values, grad, call)
        return found.detach().requires_grad_() if grad and found.is_floating_point() else found

    monkeypatch.setattr(Group, "_tensor", staticmethod(wanting))
    fails(plan.verify)


def test_no_grad_parts_replayed_with_gradients(monkeypatch: Patch) -> None:
    """The kernels of recurrent layers for inference give other bits than those for training."""

    class Teacher(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linears = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])
            self.teacher = nn.LSTM(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for linear in self.linears:
                x = torch.tanh(linear(x))
                with torch.no_grad():
                    made = self.teacher(x)[0]
                x = x * made.sin().exp()
            return x.sum()

    plan = plan_of(Teacher, (torch.randn(12, 32, WIDTH),))
    run = Group._run

    def wanting(self, index, call, values):
        call.grad = call.graded = True
        run(self, index, call, values)

    monkeypatch.setattr(Group, "_run", wanting)
    fails(plan.verify)


def test_one_tensor_given_twice_replayed_as_two(monkeypatch: Patch) -> None:
    """Attention asks whether query, key and value are one tensor, and computes otherwise if not."""
    x = (torch.randn(32, 8, WIDTH),)
    stand_in = noting.Noting._stand_in

    def apart(self, tensor):
        self._seen = {}
        return stand_in(self, tensor)

    monkeypatch.setattr(noting.Noting, "_stand_in", apart)
    fails(plan_of, Attends, x)


def test_shared_weights_counted_twice(monkeypatch: Patch) -> None:
    monkeypatch.setattr(forward, "storage_key", id)
    monkeypatch.setattr(nn.Module, "named_parameters", _each_name(nn.Module.named_parameters))
    fails(test_hazards_calls.test_tied_embedding_and_head)


def _each_name(original):
    def named_parameters(self, prefix="", recurse=True, remove_duplicate=True):
        return original(self, prefix, recurse, False)

    return named_parameters


def test_what_a_function_saves_taken_as_droppable(monkeypatch: Patch) -> None:
    """It stays in truth, so that the step takes more than predicted."""
    make = record.Slot

    def loose(op, position, storage, producer, step, fixed):
        return make(op, position, storage, producer, step, fixed and position >= 0)

    monkeypatch.setattr(record, "Slot", loose)
    fails(test_hazards_autograd.test_custom_functions, "save_for_backward")


def test_what_sits_on_a_context_taken_as_gone(monkeypatch: Patch) -> None:
    monkeypatch.setattr(record.StorageWeakRef, "expired", lambda self: True)
    fails(test_hazards_autograd.test_custom_functions, "on ctx")


def test_values_given_back_once_only(monkeypatch: Patch) -> None:
    fetch = Group.fetch

    def once(self, handle):
        if handle.key not in self.ready and self.expected.get(handle.key, 0) < 0:
            raise LookupError("read twice")
        found = fetch(self, handle)
        if handle.key not in self.ready:
            self.expected[handle.key] = -1
        return found

    monkeypatch.setattr(Group, "fetch", once)
    plan_of(test_hazards_autograd.mlp, rows()).verify()
    fails(test_hazards_autograd.test_retain_graph)
    fails(test_hazards_autograd.test_gradient_penalty)


def test_kinds_of_calls_not_told_apart(monkeypatch: Patch) -> None:
    """Gradients stay right, but another batch is not planned and nothing is said."""
    monkeypatch.setattr(Runtime, "key", staticmethod(lambda model, args, kwargs: ("one",)))
    with pytest.MonkeyPatch.context() as inner:
        log = _Records()
        inner.setattr("ckpt_planner.runtime.log", log)
        plan = plan_of(test_hazards_paths.mlp, rows())
        one_step(plan.model, plan.model, rows(64), {})
    assert log.count == 0
    assert len(plan._runtime.cache) == 1
    fails(test_hazards_paths.test_partly_frozen_or_in_eval_mode_is_planned_again)


class _Records:
    count = 0

    def info(self, *args: Any) -> None:
        self.count += 1

    warning = info


class _Expected(str):
    """A name that is never another than expected."""

    def __ne__(self, other: object) -> bool:
        return False

    __hash__ = str.__hash__


class Turns(nn.Module):
    """Takes another path once `turned`: the same number of calls, of which some draw."""

    def __init__(self) -> None:
        super().__init__()
        self.linears, self.turned = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(4)]), False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = torch.tanh(linear(x))
            x = nn.functional.dropout(x, 0.5) if self.turned else nn.functional.silu(x)
        return x.sum()


def another_path() -> None:
    def before(model: nn.Module, step: int) -> None:
        model.turned = step > 0

    assert_same_step(Turns, rows(), before=before, steps=2, tight=False)


def test_another_path_not_noticed(monkeypatch: Patch) -> None:
    """Neither by the names of calls nor by what they draw."""
    another_path()
    monkeypatch.setattr(follow, "call_name", lambda function: _Expected())
    monkeypatch.setattr(noting.Watch, "as_planned", lambda self: True)
    fails(another_path)


class Counted(nn.Module):
    """Begins to look at what is saved, by hooks of its own, after it was planned."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.count, self.looking = test_hazards_calls.mlp(), 0, False

    def pack(self, tensor: torch.Tensor) -> torch.Tensor:
        self.count += 1
        return tensor

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.looking:
            return self.body(x).sum()
        with torch.autograd.graph.saved_tensors_hooks(self.pack, lambda t: t):
            return self.body(x).sum()


def saved_through_hooks_of_the_model() -> None:
    def before(model: nn.Module, step: int) -> None:
        model.looking = step > 0

    assert_same_step(Counted, rows(), before=before, observe=lambda m: m.count)


def test_saved_tensor_hooks_of_the_model_taken_over(monkeypatch: Patch) -> None:
    saved_through_hooks_of_the_model()
    monkeypatch.setattr(follow, "_top_hooks", lambda _: None)
    fails(saved_through_hooks_of_the_model)


def test_a_planned_module_with_attributes_of_its_own(monkeypatch: Patch) -> None:
    make = planned.planned_module

    def apart(model, runtime):
        made = make(model, runtime)
        object.__setattr__(made, "__dict__", dict(model.__dict__))
        return made

    monkeypatch.setattr("ckpt_planner.plan.planned_module", apart)
    fails(test_hazards_paths.test_eval_and_no_grad_run_the_original)


def test_names_with_a_prefix(monkeypatch: Patch) -> None:
    monkeypatch.setattr("ckpt_planner.plan.planned_module", lambda model, runtime: nn.Sequential(model))
    fails(test_hazards_hooks.test_names_are_the_originals)


def test_failed_calls_left_in_their_groups(monkeypatch: Patch) -> None:
    monkeypatch.setattr(noting.Noting, "withdraw", lambda self: None)
    fails(test_training_around_the_model.test_an_operation_that_fails_and_is_tried_again)
