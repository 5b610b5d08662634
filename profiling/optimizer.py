"""What an optimizer takes: its state, and the working memory of its step, without allocating either.

The optimizer is built and stepped once on `meta` copies of the parameters, under a dispatch mode that adds up the
storages that it makes. `foreach` is chosen as it would be on the real device.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from ckpt_planner.errors import UnsupportedModelError
from ckpt_planner.replay.calls import tensors_in


class _Watch(TorchDispatchMode):
    """Bytes of the `meta` storages that are live, and the most there were."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}
        self._seen: set[int] = set()
        self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        given = {t.untyped_storage()._cdata for t in tensors_in((args, kwargs or {}))}
        for tensor in tensors_in(result):
            ref = StorageWeakRef(tensor.untyped_storage())
            if tensor.device.type == "meta" and ref.cdata not in given and ref.cdata not in self._live:
                self._live[ref.cdata] = (ref, tensor.untyped_storage().nbytes())
        self.peak = max(self.peak, self.live())
        return result

    def live(self) -> int:
        self._live = {k: v for k, v in self._live.items() if not v[0].expired()}
        return sum(size for _, size in self._live.values())


def optimizer_memory(optimizer: Any, model: nn.Module, device: torch.device) -> tuple[str, int, int]:
    """(name, bytes of state, most bytes that one step allocates above parameters, gradients and state).

    Args:
        optimizer: an instance of `torch.optim.Optimizer`, or a class (its defaults are taken, with lr=0.001).
        model: whose parameters it optimises.
        device: where they are.

    Raises:
        UnsupportedModelError: the optimizer cannot be stepped on `meta` tensors.
    """
    cls: Any = optimizer if inspect.isclass(optimizer) else type(optimizer)
    if inspect.isclass(optimizer):
        groups, defaults = [{"params": [p for p in model.parameters() if p.requires_grad]}], {}
    else:
        groups, defaults = optimizer.param_groups, optimizer.defaults
    accepted = inspect.signature(cls.__init__).parameters
    options = {k: v for k, v in defaults.items() if k in accepted}
    fused = bool(options.pop("fused", None))
    if "foreach" in accepted and options.get("foreach") is None:
        options["foreach"] = device.type == "cuda" and not fused
    if "lr" in accepted and "lr" not in options and accepted["lr"].default is inspect.Parameter.empty:
        options["lr"] = 1e-3
    made = []
    for group in groups:
        parameters = []
        for parameter in group["params"]:
            if parameter.requires_grad:
                stand_in = nn.Parameter(torch.empty_like(parameter, device="meta"))
                stand_in.grad = torch.empty_like(stand_in)
                parameters.append(stand_in)
        if parameters:
            kept = {k: v for k, v in group.items() if k != "params" and k in accepted and k not in ("fused", "foreach")}
            made.append({**kept, "params": parameters})
    if not made:
        return cls.__name__, 0, 0
    try:
        watch = _Watch()
        trial = cls(made, **options)
        with watch:
            trial.step()
            state = watch.live()
            watch.peak = state
            trial.step()
    except Exception as error:
        raise UnsupportedModelError(
            f"the memory of {cls.__name__} could not be found by a trial step on meta tensors: "
            f"{type(error).__name__}: {error}. Leave optimizer out and lower the budget by what it takes."
        ) from error
    return cls.__name__, state, 0 if fused else max(0, watch.peak - state)


@contextmanager
def stepped(optimizer: Any, model: nn.Module) -> Iterator[tuple[Any, int]]:
    """A function that takes one step of such an optimizer on `model`'s parameters, and the bytes of its state.

    The step is taken on copies of the parameters, so that the parameters' shared memory stays as it is; the copies are
    made before anything is measured. Without an optimizer the function does nothing.
    """
    if optimizer is None:
        yield (lambda: None), 0
        return
    trainable = [p for p in model.parameters() if p.requires_grad]
    copies = [nn.Parameter(p.detach().clone()) for p in trainable]
    cls: Any = optimizer if inspect.isclass(optimizer) else type(optimizer)
    accepted = inspect.signature(cls.__init__).parameters
    defaults = {} if inspect.isclass(optimizer) else {k: v for k, v in optimizer.defaults.items() if k in accepted}
    if "lr" in accepted and "lr" not in defaults and accepted["lr"].default is inspect.Parameter.empty:
        defaults["lr"] = 1e-3
    made = cls(copies, **defaults)
    for copy in copies:
        copy.grad = torch.zeros_like(copy)
    made.step()
    made.zero_grad(set_to_none=True)
    sizes = {t.untyped_storage()._cdata: t.untyped_storage().nbytes() for t in tensors_in(list(made.state.values()))}
    state = sum(sizes.values())

    def take_step() -> None:
        for parameter, copy in zip(trainable, copies, strict=True):
            copy.grad = parameter.grad
        made.step()

    yield take_step, state
