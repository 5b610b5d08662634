"""Familiar calls leave nothing behind: a cycle would hold what a group has taken until garbage is collected."""

from __future__ import annotations

import gc

import pytest

from ckpt_planner.profiling.meter import CpuMeter
from tests.helpers import default_loss, dropping_all, seed
from tests.test_hazards_familiar import LATE, USUAL, Model, rows


@pytest.mark.parametrize("name", USUAL)
def test_steps_leave_nothing_to_the_collector_of_garbage(name: str) -> None:
    """While calls are noted, then are familiar, then replayed by a program."""
    seed(0)
    model = Model(USUAL[name])
    plan = dropping_all(model, rows(), loss_fn=default_loss)
    gc.collect()
    gc.disable()
    try:
        with CpuMeter() as meter:
            marks = [meter.mark()]
            for _ in range(LATE):
                default_loss(plan.model(*rows())).backward()
                model.zero_grad()
                marks.append(meter.mark())
    finally:
        gc.enable()
    assert len({meter.live(mark) for mark in marks}) == 1
