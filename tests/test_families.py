"""Across model families: the measured peak keeps the budget, is what was predicted, and every value is bit-identical.

A budget below what can be kept is refused with the smallest one that can, and that one is kept.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.families import FAMILIES, build
from ckpt_planner import InfeasibleBudgetError, optimize
from ckpt_planner.profiling.rehearse import rehearse

SHARES = (0.7, 0.45)  # of the plain step's memory above what is resident
TOLERANCE = 0.02


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("name", FAMILIES)
def test_budget_is_kept_and_values_are_the_same(name: str, share: float) -> None:
    made = build(name, small=True)
    call = {"example_args": made.args, "example_kwargs": made.kwargs, "loss_fn": made.loss_fn}
    plain = rehearse(made.model, made.args, made.kwargs, made.loss_fn, None).peak_bytes
    resident = sum(t.untyped_storage().nbytes() for t in {*made.model.parameters(), *made.model.buffers()})
    budget = int(resident + share * (plain - resident))
    try:
        plan = optimize(made.model, budget, **call)
    except InfeasibleBudgetError as refused:
        assert budget < refused.minimum_bytes <= plain
        budget = refused.minimum_bytes
        plan = optimize(made.model, budget, **call)
    measured = plan.measure()
    assert measured.peak_bytes <= budget
    assert measured.baseline_peak_bytes == plain
    assert abs(plan.peak_bytes - measured.peak_bytes) <= TOLERANCE * measured.peak_bytes
    assert abs(plan.baseline_peak_bytes - plain) <= TOLERANCE * plain
    plan.verify()
