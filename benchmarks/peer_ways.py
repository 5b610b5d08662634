"""The ways in which checkpoints are placed without us: each as a training step to time and to measure."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from benchmarks.family import Family
from ckpt_planner.profiling.loss import loss_of
from ckpt_planner.profiling.meter import make_meter

Step = Callable[[], None]


def step_of(model: Callable[..., Any], family: Family) -> Step:
    """One training step of `model` on the family's call."""

    def run() -> None:
        family.model.zero_grad(set_to_none=True)
        output = model(*family.args, **family.kwargs)  # held until the end, as in most training loops
        loss, _ = loss_of(output, family.loss_fn)
        loss.backward()

    return run


def peak_of(step: Step, family: Family) -> int:
    """Measured peak of a step: everything that is live, bytes."""
    step()  # lazy initialisation, compilation
    family.model.zero_grad(set_to_none=True)
    held = (*family.model.parameters(), *family.model.buffers())  # not all buffers are in a state_dict
    resident = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in held}
    given = [t for t in (*family.args, *family.kwargs.values()) if isinstance(t, torch.Tensor)]
    meter = make_meter(torch.device("cpu"))
    with meter:
        first = meter.mark()
        step()
        last = meter.mark()
    family.model.zero_grad(set_to_none=True)
    return meter.peak(first, last) + sum(resident.values()) + sum({id(t): t.nbytes for t in given}.values())


def blocks_of(model: nn.Module, kind: str) -> list[nn.Module]:
    """The blocks that people wrap, by the name of their class; sequences of blocks are none."""
    return [
        module
        for module in model.modules()
        if type(module).__name__ == kind
        and not (isinstance(module, nn.Sequential) and any(True for part in module for _ in part.children()))
    ]


@contextmanager
def wrapped(blocks: list[nn.Module], context_fn: Callable[[], Any] | None = None) -> Iterator[None]:
    """Each block's forward inside `torch.utils.checkpoint`."""
    how: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": False}
    if context_fn is not None:
        how["context_fn"] = context_fn
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, **how)
    try:
        yield
    finally:
        for block in blocks:
            del block.forward


def selective() -> Any:
    """Save matrix products and attention, but recompute every second product."""
    aten = torch.ops.aten
    products = {aten.mm.default, aten.addmm.default, aten.bmm.default, aten.convolution.default}
    saved = products | {
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
    }
    counts = {True: 0, False: 0}

    def policy(context: Any, function: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if function in products:
            counts[context.is_recompute] += 1
            if counts[context.is_recompute] % 2 == 0:
                return CheckpointPolicy.PREFER_RECOMPUTE
        return CheckpointPolicy.MUST_SAVE if function in saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def sequences(model: nn.Module) -> list[nn.Sequential]:
    """Sequences of at least four blocks."""
    return [
        m
        for m in model.modules()
        if isinstance(m, nn.Sequential) and len(m) >= 4 and all(any(True for _ in c.children()) for c in m)
    ]


@contextmanager
def in_sequence(found: list[nn.Sequential]) -> Iterator[None]:
    """Each sequence in sqrt(N) segments."""
    for sequence in found:
        segments = max(2, round(math.sqrt(len(sequence))))
        functions = list(sequence)
        sequence.forward = partial(checkpoint_sequential, functions, segments, use_reentrant=False)
    try:
        yield
    finally:
        for sequence in found:
            del sequence.forward


def compiled(family: Family, share: float) -> Step:
    """torch's knapsack over saved values, at a share of the saved bytes, with eager kernels."""
    import torch._dynamo
    import torch._functorch.config as functorch

    torch._dynamo.reset()
    model = torch.compile(family.model, backend="aot_eager")
    run = step_of(model, family)

    def step() -> None:
        with functorch.patch(activation_memory_budget=share):
            run()

    return step


def inside(run: Step, context: Callable[[], Any]) -> Step:
    def step() -> None:
        with context():
            run()

    return step


def peers(family: Family, kind: str, shares: list[float]) -> Iterator[tuple[str, Step]]:
    """Each peer's name and its step; `kind` is the class of the model's blocks."""
    run, blocks, found = step_of(family.model, family), blocks_of(family.model, kind), sequences(family.model)
    if blocks:
        yield "by hand", inside(run, lambda: wrapped(blocks))
        yield "selective", inside(run, lambda: wrapped(blocks, selective))
    if found:
        yield "sequential", inside(run, lambda: in_sequence(found))
    for share in shares:
        yield f"compiler {share:g}", compiled(family, share)
