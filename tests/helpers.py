"""Plans at a tight budget, and training steps compared bit for bit with plain eager."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ckpt_planner import InfeasibleBudgetError, Plan, optimize
from ckpt_planner.deciding import Planned
from ckpt_planner.decision import Decision
from ckpt_planner.problem import make_problem
from ckpt_planner.solve import Solution, SolveStatus

Loss = Callable[[Any], torch.Tensor]


def planned(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    share: float = 0.5,
    loss_fn: Loss | None = None,
    drops: bool = True,
    **options: Any,
) -> Plan:
    """A plan at `share` of the plain step's activations, or at the least that can be kept; it drops something."""
    torch.set_num_threads(1)
    call = {"example_args": args, "example_kwargs": kwargs, "loss_fn": loss_fn, **options}
    plain = optimize(model, budget=1 << 40, **call)
    resident = plain.profile.resident_bytes
    budget = resident + int(share * (plain.baseline_peak_bytes - resident))
    try:
        plan = optimize(model, budget=budget, **call)
    except InfeasibleBudgetError as error:
        assert error.minimum_bytes > budget
        plan = optimize(model, budget=error.minimum_bytes + (1 << 14), **call)
    assert bool(plan.segments) or not drops, "nothing is dropped, so the test would show nothing"
    return plan


def dropping_all(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    loss_fn: Loss | None = None,
    drops: bool = True,
) -> Plan:
    """A plan that drops all that may be dropped: harder on the mechanism than any budget."""
    torch.set_num_threads(1)
    plan = optimize(model, budget=1 << 40, example_args=args, example_kwargs=kwargs, loss_fn=loss_fn)
    problem = make_problem(plan.profile, 1 << 40)
    judged = problem.judge(problem.candidates)
    solution = Solution(judged.dropped, SolveStatus.FEASIBLE, judged.seconds, judged.peak_bytes)
    hardest = Planned(Decision(plan.profile, solution, 1 << 40, "budget"))
    runtime = plan._runtime
    runtime.first = hardest
    for key in runtime.cache:
        runtime.cache[key] = hardest
    plan.verify()
    assert bool(plan.segments) or not drops, "nothing is dropped, so the test would show nothing"
    return plan


def replayed(plan: Plan) -> set[str]:
    """Names of the operations that run again."""
    return {plan.profile.ops[i].name.rsplit(".", 1)[-1] for i in plan.decision.schedule.again}


def seed(number: int) -> None:
    """Seed every generator that a forward may draw from."""
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)


def generators() -> list[Any]:
    """The states of torch's, Python's and NumPy's generators."""
    return [
        torch.get_rng_state(),
        torch.tensor(random.getstate()[1]),
        torch.tensor(np.random.get_state()[1].astype("i8")),
    ]


def own_inputs(value: Any) -> Any:
    """Inputs of a step's own; a tensor that is given twice is one, given twice."""
    copies: dict[int, torch.Tensor] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            copies[id(leaf)] = leaf.detach().clone().requires_grad_(leaf.requires_grad)
        return copies[id(leaf)]

    return pytree.tree_map(one, value)


def state_of(model: nn.Module, inputs: Any, loss: torch.Tensor) -> dict[str, Any]:
    """Everything that two equal steps leave equal."""
    found: dict[str, Any] = {"loss": loss.detach().clone()}
    for name, parameter in model.named_parameters():
        found[f"gradient of {name}"] = None if parameter.grad is None else parameter.grad.detach().clone()
    for name, buffer in model.named_buffers():
        found[f"buffer {name}"] = buffer.detach().clone()
    for number, leaf in enumerate(pytree.tree_leaves(inputs)):
        if isinstance(leaf, torch.Tensor):
            found[f"input {number}"] = leaf.detach().clone()
            found[f"gradient of input {number}"] = leaf.grad
    for number, state in enumerate(generators()):
        found[f"generator {number}"] = state
    return found


def differences(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    """Names of what is not equal bit for bit."""
    assert expected.keys() == found.keys()
    return [name for name, value in expected.items() if not same(value, found[name])]


def same(a: Any, b: Any) -> bool:
    """Equal bit for bit; NaN equals NaN."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        if a.layout is not torch.strided:
            return a.layout == b.layout and same(a.to_dense(), b.to_dense())
        if a.is_meta or b.is_meta:
            return a.is_meta and b.is_meta and a.shape == b.shape
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(a.nan_to_num(7.25), b.nan_to_num(7.25))
    return type(a) is type(b) and bool(a == b)


def one_step(
    call: nn.Module,
    model: nn.Module,
    args: Any,
    kwargs: Any,
    loss_fn: Loss | None = None,
    number: int = 0,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> dict[str, Any]:
    """One training step through `call`, from seeded generators; what it left."""
    args, kwargs = own_inputs((args, kwargs))
    model.zero_grad()
    seed(number)
    with around():
        output = call(*args, **kwargs)
        loss = loss_fn(output) if loss_fn is not None else default_loss(output)
    loss.backward()
    return state_of(model, (args, kwargs), loss)


def default_loss(output: Any) -> torch.Tensor:
    """A scalar that depends on every tensor of the output that requires a gradient."""
    leaves = pytree.tree_leaves(output if isinstance(output, (tuple, list, dict, torch.Tensor)) else vars(output))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    return torch.stack([(t.float() * torch.linspace(0.5, 1.5, t.numel()).view(t.shape)).sum() for t in tensors]).sum()


def assert_same_step(
    make: Callable[[], nn.Module],
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Loss | None = None,
    share: float = 0.5,
    steps: int = 3,
    before: Callable[[nn.Module, int], None] = lambda model, step: None,
    observe: Callable[[nn.Module], Any] = lambda model: None,
    lr: float = 0.05,
    tight: bool = True,
    again: str = "",
    drops: bool = True,
    around: Callable[[], AbstractContextManager[Any]] = nullcontext,
) -> Plan:
    """Train a plain and planned models side by side; every step has to be the same.

    One plan drops all that may be dropped; another is for a tight budget, unless `tight` is False to save time.

    Args:
        make: makes the model; called for each, from the same seed.
        before: called with the model before each of its steps.
        observe: more of the model to compare after each step (counts of hook calls, Python attributes).
        drops: whether something has to be dropped where everything may be.
        again: name of an operation that has to be among those that run again.
        around: a context that each forward runs in.

    Returns:
        The plan that drops everything.
    """
    kwargs = kwargs or {}
    models = []
    for _ in range(2 + tight):
        seed(1234)
        models.append(make().train())
    fresh = observe(models[0])
    with around():
        hardest = dropping_all(models[1], args, kwargs, loss_fn or default_loss, drops)
        plans = [hardest]
        if tight:
            plans.append(planned(models[2], args, kwargs, share, loss_fn or default_loss, drops=False))
    assert all(observe(m) == fresh for m in models), "planning left a trace on the model"
    states = [m.state_dict() for m in models]
    for name, value in states[0].items():
        if isinstance(value, torch.Tensor):
            assert all(same(value, state[name]) for state in states), f"planning left a trace on {name}"
    assert not again or again in replayed(hardest), replayed(hardest)
    calls = [models[0], *[plan.model for plan in plans]]
    optimizers = [torch.optim.SGD(m.parameters(), lr=lr) for m in models if list(m.parameters())]
    for step in range(steps):
        states = []
        for call, model in zip(calls, models, strict=True):
            before(model, step)
            states.append({**one_step(call, model, args, kwargs, loss_fn, step, around), "observed": observe(model)})
        for state, which in zip(states[1:], ("everything dropped", "tight budget"), strict=False):
            assert differences(states[0], state) == [], f"{which}, step {step}"
        for optimizer in optimizers:
            optimizer.step()
    with around():
        for plan in plans:
            plan.verify()
    return hardest
