"""What torch warns of in the user's model names the user's line, whoever runs the model."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from ckpt_planner import Plan, optimize
from tests.helpers import default_loss


class Warns(nn.Module):
    """Warns through torch, as reading a number off a tensor that requires a gradient does once in a process."""

    def __init__(self) -> None:
        super().__init__()
        self.linears = nn.ModuleList([nn.Linear(16, 16) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for linear in self.linears:
            x = linear(x).tanh()
        x.reshape(-1).sum().to(torch.complex64).to(torch.float32)  # "Casting complex values to real discards ..."
        return x


def lines(caught: list[Any]) -> set[tuple[str, bool]]:
    return {(Path(w.filename).name, "Casting complex" in str(w.message)) for w in caught}


@pytest.mark.parametrize("mechanism", ["slice", "torch"])
def test_warnings_while_planning_name_the_users_file(mechanism: str) -> None:
    x = torch.randn(64, 16)
    with warnings.catch_warnings(record=True) as caught:
        torch.set_warn_always(True)
        try:
            optimize(Warns(), 1 << 40, (x,), loss_fn=default_loss, mechanism=mechanism)
        finally:
            torch.set_warn_always(False)
    assert lines(caught) == {(Path(__file__).name, True)}


def test_warnings_in_a_planned_step_name_the_users_file(tmp_path: Path) -> None:
    x = torch.randn(64, 16)
    plan = optimize(Warns(), 1 << 40, (x,), loss_fn=default_loss)
    least = optimize(Warns(), plan.baseline_peak_bytes * 9 // 10, (x,), loss_fn=default_loss)
    assert least.segments
    least.save(tmp_path / "plan")
    loaded = Plan.load(tmp_path / "plan", loss_fn=default_loss).apply(Warns())
    with warnings.catch_warnings(record=True) as caught:
        torch.set_warn_always(True)
        try:
            default_loss(loaded(x)).backward()
        finally:
            torch.set_warn_always(False)
    assert lines(caught) == {(Path(__file__).name, True)}


def test_showing_warnings_is_as_before_when_planning_has_ended() -> None:
    before = warnings.showwarning
    optimize(Warns(), 1 << 40, (torch.randn(64, 16),), loss_fn=default_loss)
    assert warnings.showwarning is before
