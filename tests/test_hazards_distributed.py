"""Two gloo ranks: DistributedDataParallel around a planned model and within one, collectives in forward."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_planner.errors import CkptPlannerError
from tests.helpers import default_loss, dropping_all

WIDTH = 16
SCENES = ["around", "no_sync", "wrapped", "collective", "functional collective"]


class Collective(nn.Module):
    """Averages over ranks within its forward, with a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        mean = x.mean(0)
        return x - all_reduce(mean) / dist.get_world_size()


class Functional(nn.Module):
    """The same by a call that passes by as a torch operation; running it again in backward could hang."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_reduce

        return x - all_reduce(x.detach().mean(0), "sum", dist.group.WORLD) / dist.get_world_size()


def make(scene: str) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()]
        if scene == "collective":
            parts.append(Collective())
        if scene == "functional collective":
            parts.append(Functional())
    return nn.Sequential(*parts)


def gradients(model: nn.Module, x: torch.Tensor, rank: int, scene: str) -> list[torch.Tensor]:
    torch.manual_seed(rank)
    if scene == "no_sync":
        with model.no_sync():
            default_loss(model(x)).backward()
    default_loss(model(x)).backward()
    return [p.grad.clone() for p in model.parameters()]


def planned_within(scene: str, x: torch.Tensor) -> nn.Module:
    model = make(scene)
    if scene == "wrapped":
        wrapped = DistributedDataParallel(model)
        return dropping_all(wrapped, (x,), loss_fn=default_loss).model
    return DistributedDataParallel(dropping_all(model, (x,), loss_fn=default_loss).model)


def rank_main(rank: int, port: int, queue: Any) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=2)
    results = {}
    for scene in SCENES:
        try:
            torch.manual_seed(10 + rank)
            x = torch.randn(128, WIDTH)
            plain = DistributedDataParallel(make(scene))
            expected = gradients(plain, x, rank, scene)
            found = gradients(planned_within(scene, x), x, rank, scene)
            equal = all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))
            results[scene] = "equal" if equal else "differs"
        except CkptPlannerError as error:
            results[scene] = f"{type(error).__name__}: {error}"
    queue.put((rank, results))
    dist.barrier()
    os._exit(0)  # taking gloo down crashes now and then, without a planned model as well


@pytest.fixture(scope="module")
def outcomes() -> dict[int, dict[str, str]]:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        port = s.getsockname()[1]
    context = mp.get_context("spawn")
    queue = context.SimpleQueue()
    processes = [context.Process(target=rank_main, args=(rank, port, queue)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(90)
    stuck = [p for p in processes if p.is_alive()]
    for process in stuck:
        process.kill()
    assert not stuck, "the ranks wait for each other"
    assert [p.exitcode for p in processes] == [0, 0]
    return dict(queue.get() for _ in range(2))


@pytest.mark.parametrize("scene", SCENES)
def test_gradients_over_two_ranks_equal_plain_ones(outcomes: dict[int, dict[str, str]], scene: str) -> None:
    assert [outcomes[rank][scene] for rank in range(2)] == ["equal", "equal"]
