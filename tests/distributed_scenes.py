"""What two ranks do in test_hazards_distributed.py; each scene returns what has to be the same on both, or an error."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel

from ckpt_planner import optimize, ranks
from ckpt_planner.errors import CkptPlannerError
from tests.helpers import default_loss, dropping_all, planned

WIDTH = 16
Result = dict[str, Any]
SCENES: dict[str, Callable[[int], Result]] = {}


def scene(function: Callable[[int], Result]) -> Callable[[int], Result]:
    SCENES[function.__name__] = function
    return function


class Mean(nn.Module):
    """Averages over ranks within its forward, with a gradient."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed.nn.functional import all_reduce

        mean = x.mean(0)
        return x - all_reduce(mean) / dist.get_world_size()


class FunctionalMean(nn.Module):
    """The same by a call that passes by as a torch operation; running it again in backward could hang."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        from torch.distributed._functional_collectives import all_reduce

        return x - all_reduce(x.detach().mean(0), "sum", dist.group.WORLD) / dist.get_world_size()


class SyncNorm(nn.Module):
    """What SyncBatchNorm, which takes no CPU tensors, does: collectives both ways, statistics over all ranks."""

    class Function(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x, average):
            both = torch.stack([x.mean(0), x.square().mean(0)]) / dist.get_world_size()
            dist.all_reduce(both)
            average.lerp_(both[0], 0.1)
            scale = (both[1] - both[0].square() + 1e-5).rsqrt()
            ctx.save_for_backward(x, both, scale)
            return (x - both[0]) * scale

        @staticmethod
        def backward(ctx, gradient):
            x, both, scale = ctx.saved_tensors
            normal = (x - both[0]) * scale
            means = torch.stack([gradient.mean(0), (gradient * normal).mean(0)]) / dist.get_world_size()
            dist.all_reduce(means)
            return (gradient - means[0] - normal * means[1]) * scale, None

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("average", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return SyncNorm.Function.apply(x, self.average)


def make(part: type[nn.Module] | None = None) -> nn.Module:
    torch.manual_seed(0)
    parts: list[nn.Module] = []
    for _ in range(4):
        parts += [nn.Linear(WIDTH, WIDTH), nn.Dropout(0.1), nn.Tanh()]
        if part is not None:
            parts.append(part())
    return nn.Sequential(*parts)


def rows(rank: int, count: int = 512) -> tuple[torch.Tensor]:
    torch.manual_seed(10 + rank)
    return (torch.randn(count, WIDTH),)


def trained(model: nn.Module, batches: list[tuple[torch.Tensor]], rank: int, accumulate: bool = False) -> Result:
    """What steps on `batches` leave, and the buckets that gradients travelled in."""
    buckets: list[int] = []

    def noting(state, bucket):  # type: ignore[no-untyped-def]  # torch reads the annotations
        buckets.append(bucket.buffer().numel())
        return allreduce_hook(None, bucket)

    model.register_comm_hook(None, noting)
    torch.manual_seed(rank)
    for (x,) in batches:
        if accumulate:
            with model.no_sync():
                default_loss(model(x)).backward()
        default_loss(model(x)).backward()
    return {"left": [*(p.grad for p in model.parameters()), *model.buffers()], "buckets": buckets}


def compare(
    rank: int,
    plan_it: Callable[[nn.Module], nn.Module],
    part: type[nn.Module] | None = None,
    batches: list[tuple[torch.Tensor]] | None = None,
    accumulate: bool = False,
) -> Result:
    batches = batches or [rows(rank)]
    expected = trained(DistributedDataParallel(make(part)), batches, rank, accumulate)
    found = trained(plan_it(make(part)), batches, rank, accumulate)
    assert expected["buckets"] == found["buckets"], (expected["buckets"], found["buckets"])
    assert expected["buckets"]
    assert all(torch.equal(a, b) for a, b in zip(expected["left"], found["left"], strict=True))
    return {}


def around(rank: int, args: Any, plans: list[Any], tight: bool = False) -> Callable[[nn.Module], nn.Module]:
    def plan_it(model: nn.Module) -> nn.Module:
        plans.append((planned if tight else dropping_all)(model, args, loss_fn=default_loss))
        return DistributedDataParallel(plans[-1].model)

    return plan_it


def what(plan: Any, first: bool = True) -> Result:
    """What is planned, to compare between ranks: times included, which no two ranks measure alike."""
    decision = plan.decision if first else next(reversed(plan._runtime.cache.values())).decision
    return {"dropped": decision.solution.dropped, "times": [op.seconds for op in decision.profile.ops]}


@scene
def ddp_around_a_planned_model(rank: int) -> Result:
    compare(rank, around(rank, rows(rank), plans := []))
    return what(plans[0])


@scene
def no_sync(rank: int) -> Result:
    return compare(rank, around(rank, rows(rank), []), accumulate=True)


@scene
def a_tight_budget(rank: int) -> Result:
    compare(rank, around(rank, rows(rank), plans := [], tight=True))
    return {**what(plans[0]), "budget": plans[0].budget_bytes}


@scene
def a_wrapped_model_planned(rank: int) -> Result:
    plans: list[Any] = []

    def plan_it(model: nn.Module) -> nn.Module:
        plans.append(dropping_all(DistributedDataParallel(model), rows(rank), loss_fn=default_loss))
        return plans[-1].model

    compare(rank, plan_it)
    return what(plans[0])


@scene
def collective(rank: int) -> Result:
    compare(rank, around(rank, rows(rank), plans := [], tight=True), Mean)
    return what(plans[0])


@scene
def functional_collective(rank: int) -> Result:
    return compare(rank, around(rank, rows(rank), []), FunctionalMean)


@scene
def statistics_over_ranks(rank: int) -> Result:
    compare(rank, around(rank, rows(rank), plans := []), SyncNorm)
    return what(plans[0])


@scene
def sync_batch_norm_refused_by_torch_on_a_cpu(rank: int) -> Result:
    try:
        nn.SyncBatchNorm(WIDTH)(*rows(rank))
    except ValueError as error:
        return {"error": str(error)}
    return {}


@scene
def uneven_batches(rank: int) -> Result:
    args = rows(rank, 512 - 128 * rank)
    compare(rank, around(rank, args, plans := []), batches=[args])
    return {"dropped": plans[0].decision.solution.dropped}


@scene
def another_shape_on_both(rank: int) -> Result:
    batches = [rows(rank), rows(rank, 256), rows(rank)]
    compare(rank, around(rank, rows(rank), plans := [], tight=True), batches=batches)
    return {"kinds": len(plans[0]._runtime.cache), **what(plans[0], first=False)}


@scene
def another_shape_on_one_rank(rank: int) -> Result:
    batches = [rows(rank), rows(rank, 512 - 128 * rank), rows(rank)]
    compare(rank, around(rank, rows(rank), plans := [], tight=True), batches=batches)
    assert len(plans[0]._runtime.cache) == 1 + rank
    return {}


@scene
def another_shape_on_both_with_collectives(rank: int) -> Result:
    batches = [rows(rank), rows(rank, 256), rows(rank)]
    compare(rank, around(rank, rows(rank), plans := [], tight=True), Mean, batches)
    return {"kinds": len(plans[0]._runtime.cache), **what(plans[0], first=False)}


@scene
def another_shape_on_one_rank_with_collectives(rank: int) -> Result:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("ckpt_planner").addHandler(handler)
    batches = [rows(rank), rows(rank, 512 - 128 * rank), rows(rank)]
    compare(rank, around(rank, rows(rank), [], tight=True), Mean, batches)
    logging.getLogger("ckpt_planner").removeHandler(handler)
    assert any("has come on some ranks only" in text for text in said) == bool(rank), said
    return {}


@scene
def another_model(rank: int) -> Result:
    """The group is one of this scene's own, since its ranks part here."""
    group = dist.new_group([0, 1])
    model = make(nn.Tanh if rank else None)
    try:
        optimize(model, "100%", rows(rank), loss_fn=default_loss, process_group=group)
    except CkptPlannerError as error:
        return {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    return {"rank": rank}


@scene
def only_one_rank_plans(rank: int) -> Result:
    group = dist.new_group([0, 1])
    if rank == 0:
        return {"rank": rank}
    ranks.PATIENCE, before = 0.2, ranks.PATIENCE
    try:
        optimize(make(), "100%", rows(rank), loss_fn=default_loss, process_group=group)
    except CkptPlannerError as error:
        return {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    finally:
        ranks.PATIENCE = before
    return {"rank": rank}


@scene
def a_group_of_one_decides_for_itself(rank: int) -> Result:
    groups = [dist.new_group([number]) for number in range(2)]
    plan = optimize(make(nn.Tanh if rank else None), "100%", rows(rank), process_group=groups[rank])
    return {"model": plan.profile.model}


@scene
def a_budget_that_cannot_be_kept(rank: int) -> Result:
    try:
        optimize(make(), 1000, rows(rank), loss_fn=default_loss)
    except CkptPlannerError as error:
        return {"error": f"{type(error).__name__}: {error}", "minimum": error.minimum_bytes}  # type: ignore[attr-defined]
    return {}


@scene
def the_first_rank_cannot_plan(rank: int) -> Result:
    def loss_fn(output: torch.Tensor) -> torch.Tensor:
        if rank == 0:
            raise ValueError("odd")
        return output.sum()

    try:
        optimize(make(), "100%", rows(rank), loss_fn=loss_fn)
    except Exception as error:
        return {"rank": rank, "error": f"{type(error).__name__}: {error}"}
    return {"rank": rank}


def rank_main(rank: int, port: int, queue: Any) -> None:
    """Play every scene; put (rank, scene, result) for each."""
    import tests.distributed_memory  # noqa: F401  (its scenes)

    torch.set_num_threads(1)
    store = dist.TCPStore("127.0.0.1", port, 3, is_master=False, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
    ranks.GRACE = 5.0  # less than in earnest, but a busy machine can keep a rank for seconds
    for name, play in SCENES.items():
        try:
            result = play(rank)
        except Exception as error:
            result = {"failed": f"rank {rank}: {type(error).__name__}: {error}"}
        queue.put((rank, name, result))
    dist.barrier()
    os._exit(0)  # taking gloo down crashes now and then, without a planned model as well
