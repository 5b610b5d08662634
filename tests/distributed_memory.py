"""What two ranks measure of their own memory under DistributedDataParallel, in test_hazards_distributed.py."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ckpt_planner import Plan, optimize
from ckpt_planner.profiling.meter import CpuMeter
from tests.distributed_scenes import Result, scene

WIDTH = 128


def broad() -> nn.Module:
    """Its gradients take about as much as its activations."""
    torch.manual_seed(0)
    return nn.Sequential(*[part for _ in range(6) for part in (nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1))])


def inputs(rank: int) -> tuple[torch.Tensor]:
    torch.manual_seed(10 + rank)
    return (torch.randn(256, WIDTH),)


def loss_fn(output: torch.Tensor) -> torch.Tensor:
    return output.square().mean()


def tight(model: nn.Module, args: Any, **options: Any) -> Plan:
    """A plan for a budget between the least and what the plain step takes."""
    plain = optimize(model, 1 << 40, args, loss_fn=loss_fn, **options)
    above = plain.baseline_peak_bytes - plain.profile.resident_bytes
    plan = optimize(model, plain.profile.resident_bytes + above * 2 // 3, args, loss_fn=loss_fn, **options)
    assert plan.segments
    return plan


def peak_of_steps(plan: Plan, args: tuple[torch.Tensor], wrap: bool, **how: Any) -> int:
    """The most bytes that a copy of the planned model takes, wrapper and inputs included.

    The wrapper makes its buckets anew once, after the first step, and the old ones may go in a thread of gloo's, where
    torch's profiler sees nothing. What is measured begins after that, and what is there by then is what torch says.
    """
    model: Any = copy.deepcopy(plan.model)
    if wrap:
        model = DistributedDataParallel(model, **how)

    def step() -> None:
        model.zero_grad()
        loss_fn(model(*args)).backward()

    for _ in range(3):
        step()
    model.zero_grad()
    dist.barrier()
    wrapper = next(part for part in model.modules() if isinstance(part, DistributedDataParallel))
    there = sum(p.nbytes for p in model.parameters()) + sum(buckets_of(wrapper)) + args[0].nbytes
    with CpuMeter() as meter:
        begin = meter.mark()
        step()
        step()
        end = meter.mark()
    return there + meter.peak(begin, end)


def buckets_of(wrapper: DistributedDataParallel) -> list[int]:
    """Bytes of each bucket, as torch logs them."""
    return [int(size) for size in wrapper._get_ddp_logging_data()["rebuilt_bucket_sizes"].split(",")]


def kept(plan: Plan, args: tuple[torch.Tensor], wrap: bool, **how: Any) -> Result:
    peak = peak_of_steps(plan, args, wrap, **how)
    assert peak <= plan.budget_bytes, (peak, plan.budget_bytes)
    measured = plan.measure().peak_bytes
    assert peak - 4096 <= measured <= plan.budget_bytes, (peak, measured, plan.budget_bytes)
    return {"predicted": plan.peak_bytes}


@scene
def buckets_of_a_wrapped_model(rank: int) -> Result:
    args = inputs(rank)
    return kept(tight(DistributedDataParallel(broad()), args), args, wrap=False)


@scene
def buckets_that_hold_the_gradients(rank: int) -> Result:
    args = inputs(rank)
    return kept(tight(DistributedDataParallel(broad(), gradient_as_bucket_view=True), args), args, wrap=False)


@scene
def buckets_of_a_wrapper_to_come(rank: int) -> Result:
    args = inputs(rank)
    plan = tight(broad(), args)
    assert plan.profile.bucket_bytes
    return kept(plan, args, wrap=True)


@scene
def buckets_of_a_wrapper_to_come_that_hold_the_gradients(rank: int) -> Result:
    args = inputs(rank)
    plan = tight(broad(), args)
    peak = peak_of_steps(plan, args, wrap=True, gradient_as_bucket_view=True)
    assert peak <= plan.budget_bytes, (peak, plan.budget_bytes)
    return {"predicted": plan.peak_bytes}


@scene
def buckets_that_will_not_be(rank: int) -> Result:
    """Said beforehand, nothing is counted for them; the gradients of a sparse embedding go into none."""
    args = inputs(rank)
    assert tight(broad(), args, gradient_buckets=False).profile.bucket_bytes == 0
    sparse = nn.Sequential(nn.Embedding(8, 4, sparse=True), nn.Linear(4, 4, bias=False))
    plan = optimize(sparse, 1 << 40, (torch.arange(8),), loss_fn=loss_fn)
    assert plan.profile.bucket_bytes == 16 * 4 + 8
    return {}


@scene
def gradients_of_a_wrapped_model_at_the_end(rank: int) -> Result:
    """Where parameters outweigh all else the peak is when backward ends, with gradients once and buckets once."""
    args = (inputs(rank)[0][:2],)
    plan = optimize(DistributedDataParallel(broad()), 1 << 40, args, loss_fn=loss_fn)
    size = plan.profile.parameter_bytes
    assert plan.profile.gradient_bytes == size
    assert 3 * size <= plan.peak_bytes <= 3 * size + size // 4, (plan.peak_bytes, size)
    peak = peak_of_steps(plan, args, wrap=False)
    assert peak - 4096 <= plan.peak_bytes <= peak + 4096, (peak, plan.peak_bytes)
    return {}
