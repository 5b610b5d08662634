"""Proof that the tests can fail, where the handling is that no module and no Python of the model runs again.

There is nothing to switch off; so the mutation does what recomputation by calling a region again would do.
"""

from __future__ import annotations

import pytest
import torch

from ckpt_planner.runtime import Runtime
from tests import test_hazards_calls, test_hazards_hooks, test_hazards_paths, test_hazards_state
from tests.test_hazards_mutations_of_calls import fails

Patch = pytest.MonkeyPatch


@pytest.fixture
def forward_runs_twice(monkeypatch: Patch) -> None:
    """As it would if backward ran a region's Python again."""
    call = Runtime.call

    def twice(self, model, plainly, args, kwargs):
        if model.training and torch.is_grad_enabled():
            with torch.random.fork_rng(devices=[]):
                plainly(*args, **kwargs)
        return call(self, model, plainly, args, kwargs)

    monkeypatch.setattr(Runtime, "call", twice)


@pytest.mark.usefixtures("forward_runs_twice")
def test_caches_appended_to_twice() -> None:
    fails(test_hazards_paths.test_a_list_that_forward_appends_to_grows_as_in_eager)


@pytest.mark.usefixtures("forward_runs_twice")
def test_hooks_called_twice() -> None:
    fails(test_hazards_hooks.test_hooks_are_called_as_often_as_in_eager, "forward")


@pytest.mark.usefixtures("forward_runs_twice")
def test_side_effects_twice() -> None:
    fails(test_hazards_state.test_python_side_effects_happen_once_a_step)


def test_results_rebuilt_without_their_types(monkeypatch: Patch) -> None:
    call = Runtime.call
    monkeypatch.setattr(Runtime, "call", lambda self, *rest: tuple(call(self, *rest)))
    fails(test_hazards_calls.test_results_keep_their_types, "pair")


def test_recording_that_says_so(monkeypatch: Patch) -> None:
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True)
    fails(test_hazards_paths.test_the_eager_path_is_what_is_recorded_and_run)
