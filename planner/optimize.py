"""The one call that most users make."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from .config import MECHANISMS
from .errors import CkptPlannerError, UnsupportedModelError
from .plan import Plan
from .planned import plain_module
from .progress import stage_reporter
from .runtime import Runtime
from .solve import STRATEGIES


def optimize(
    model: nn.Module,
    budget: str | int | None = None,
    example_args: tuple[Any, ...] | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    loss_fn: Callable[[Any], torch.Tensor] | None = None,
    optimizer: Any = None,
    strategy: str = "budget",
    process_group: Any = None,
    mechanism: str = "slice",
    gradient_buckets: bool | None = None,
) -> Plan:
    """Plan the training step of `model` under a budget of peak memory.

    Args:
        model: the module to train, on its device; it is left as it was.
        budget: bytes of peak of a whole training step: "8GB" (10^9), "8GiB" (2^30), an integer, or "60%" of the plain
            step's peak; None takes the device's free memory less 5 %.
        example_args, example_kwargs: the arguments of a training call. With either, the step is planned now; without,
            at the first training call of `plan.model`.
        loss_fn: makes the scalar that is differentiated from the output. Without it: the output if it has one element,
            its `.loss` if it has one, else a stand-in, and the plan says so.
        optimizer: a `torch.optim.Optimizer` or a class of one, whose state and working memory count towards the peak.
        strategy: "budget" (least recomputation that fits), "sqrt" (about sqrt(N) segments, Chen et al. 2016), "all"
            (every repeated block, as by hand), "none".
        process_group: the ranks that train this model together, as `DistributedDataParallel` takes it; by default all.
            Where there are several, each has to plan, and the first of them decides for all.
        mechanism: "slice" follows the model's forward and runs only what was dropped again; "graph" does so on a graph
            captured from the forward, which costs less and is guarded; "torch" runs that graph with regions in
            `torch.utils.checkpoint`.
        gradient_buckets: whether `DistributedDataParallel` will be wrapped around `plan.model`: its buckets, a second
            copy of the gradients, then count from the start. By default they do where several ranks plan together and
            the model holds no wrapper; the buckets of one that it holds always count.

    Returns:
        The plan; `plan.model` is the module to train.

    Raises:
        BudgetError: the budget is not one.
        InfeasibleBudgetError: no plan keeps it; it has `minimum_bytes`.
        CaptureError, UnsupportedModelError: the step cannot be measured or planned.

    Example:
        >>> import torch
        >>> from ckpt_planner import optimize
        >>> model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.Tanh(), torch.nn.Linear(64, 1))
        >>> x = torch.randn(256, 64)
        >>> plan = optimize(model, budget="100%", example_args=(x,), loss_fn=lambda y: y.mean())
        >>> plan.model(x).mean().backward()
        >>> plan.peak_bytes <= plan.budget_bytes
        True
    """
    if not isinstance(model, nn.Module):
        raise CkptPlannerError(f"optimize plans a torch.nn.Module, not a {type(model).__name__}")
    if strategy not in STRATEGIES:
        raise CkptPlannerError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    if mechanism not in MECHANISMS:
        raise CkptPlannerError(f"mechanism {mechanism!r} is unknown; choose one of {', '.join(MECHANISMS)}")
    _refuse_what_cannot_be_followed(model)
    model = plain_module(model)
    runtime = Runtime(
        budget, strategy, loss_fn, optimizer, stage_reporter(), process_group, mechanism, gradient_buckets
    )
    call = None
    if example_args is not None or example_kwargs is not None:
        args = example_args if isinstance(example_args, tuple) else (example_args,) if example_args is not None else ()
        call = (args, dict(example_kwargs or {}))
        if not model.training:
            raise CkptPlannerError(
                "the model is in eval mode, and a plan is for training: call model.train() before optimize"
            )
        runtime.plan(model, *call)
    return Plan(runtime, model, call)


def _refuse_what_cannot_be_followed(model: nn.Module) -> None:
    for name, module in model.named_modules():
        where = f"'{name}'" if name else "the model itself"
        if isinstance(module, torch.jit.ScriptModule):
            raise UnsupportedModelError(
                f"{where} is a ScriptModule: its operations run inside TorchScript, where they can neither be measured "
                "nor run again one by one. Plan the module it was scripted from."
            )
        if type(module).__name__ == "OptimizedModule":
            raise UnsupportedModelError(
                f"{where} is compiled (torch.compile): its operations are fused and cannot be run again one by one. "
                "Plan the module it was compiled from."
            )
