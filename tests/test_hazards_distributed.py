"""Two gloo ranks: DistributedDataParallel around a planned model and within one, collectives in forward, one plan."""

from __future__ import annotations

from typing import Any

import pytest
import torch.distributed as dist
import torch.multiprocessing as mp

import tests.distributed_memory  # noqa: F401  (its scenes)
from tests.distributed_scenes import SCENES, rank_main

Played = dict[str, list[dict[str, Any]]]
SAME = [name for name in SCENES if name not in ("another_model", "only_one_rank_plans", "the_first_rank_cannot_plan")]


@pytest.fixture(scope="module")
def played() -> Played:
    """What each scene gave on the two ranks."""
    server = dist.TCPStore("127.0.0.1", 0, 3, is_master=True, wait_for_workers=False)  # it finds a free port
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=rank_main, args=(rank, server.port, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(240)
    stuck = [p for p in processes if p.is_alive()]
    for process in stuck:
        process.kill()
    found: Played = {}
    while not queue.empty():
        _, name, result = queue.get()
        found.setdefault(name, []).append(result)
    assert not stuck, f"the ranks wait for each other after {list(found)}"
    assert [p.exitcode for p in processes] == [0, 0]
    return found


def by_rank(results: list[dict[str, Any]]) -> list[str]:
    return [r.get("error", "") for r in sorted(results, key=lambda r: r["rank"])]


@pytest.mark.parametrize("name", SCENES)
def test_gradients_over_two_ranks_equal_plain_ones(played: Played, name: str) -> None:
    assert [result.get("failed") for result in played[name]] == [None, None]


@pytest.mark.parametrize("name", SAME)
def test_every_rank_runs_the_same_plan(played: Played, name: str) -> None:
    first, second = played[name]
    assert first == second


def test_another_shape_is_planned_by_all_that_have_it(played: Played) -> None:
    for name in ("another_shape_on_both", "another_shape_on_both_with_collectives"):
        assert [result["kinds"] for result in played[name]] == [2, 2]


def test_a_rank_with_another_model_is_told(played: Played) -> None:
    assert by_rank(played["another_model"])[0] == ""
    assert (
        "PlanMismatchError: rank 1 has a Sequential that differs from rank 0's" in by_rank(played["another_model"])[1]
    )


def test_a_rank_that_plans_alone_is_told(played: Played) -> None:
    assert "rank 0 has not begun to plan" in by_rank(played["only_one_rank_plans"])[1]


def test_errors_of_the_first_rank_reach_all(played: Played) -> None:
    assert all("InfeasibleBudgetError" in r["error"] for r in played["a_budget_that_cannot_be_kept"])
    first, second = by_rank(played["the_first_rank_cannot_plan"])
    assert "odd" in first
    assert "CaptureError: rank 0, whose profile decides, could not plan: ValueError: odd" in second


def test_sync_batch_norm_takes_no_tensors_of_a_cpu(played: Played) -> None:
    """Which is why a stand-in takes its place here."""
    assert all("GPU" in r["error"] for r in played["sync_batch_norm_refused_by_torch_on_a_cpu"])
