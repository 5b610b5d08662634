"""One real step, plain or planned, on a stand-in for the model: its peak, its time, and what it computed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import msgspec
import torch
from torch import nn

from ckpt_planner.replay.ambient import generator_states
from ckpt_planner.replay.calls import tensors_in
from ckpt_planner.replay.directions import Directions
from ckpt_planner.replay.follow import Follower

from .forward import device_of, resident
from .loss import loss_of
from .meter import make_meter
from .optimizer import stepped
from .shadow import copied_inputs, shadow, untouched


class Runs(Protocol):
    """Something that runs a model's forward in its own way."""

    def prepare(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        """Do whatever is to be done once, before anything is measured."""

    def forward(self, model: nn.Module, args: Any, kwargs: Any) -> Any:
        """Run the forward of `model`, which may be a copy."""


Way = Directions | Runs | None


class Rehearsal(msgspec.Struct, frozen=True):
    """What one step took.

    Attributes:
        peak_bytes: the most bytes live on the device at any moment, all that is resident included.
        seconds: wall time of forward and backward.
        diverged: where the step left the plan, as (operation, expected, found); None if it followed it.
    """

    peak_bytes: int
    seconds: float
    diverged: tuple[int, str, str] | None = None


def rehearse(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    loss_fn: Callable[[Any], torch.Tensor] | None,
    way: Way,
    *,
    optimizer: Any = None,
    other_bytes: int = 0,
    timed_only: bool = False,
) -> Rehearsal:
    """Run one step and measure it; the user's model is left as it was.

    Args:
        model, args, kwargs, loss_fn: as they were profiled.
        way: the plan: directions for following the forward, or what runs it otherwise; None for the plain step.
        optimizer: stepped as well if given, on copies; its state is made first.
        other_bytes: what is resident beside parameters, buffers and inputs, and is not made here: buckets of gradients,
            and the optimizer's state where none is stepped.
        timed_only: measure the time without the memory events, which cost some.
    """
    device = device_of(model, (args, kwargs))
    with untouched(), torch.enable_grad():
        copy, (args, kwargs) = shadow(model), copied_inputs((args, kwargs))
        follower = Follower(way, trusting=True) if isinstance(way, Directions) else None
        step = _Step(copy, args, kwargs, loss_fn, follower, None if follower is not None else way)
        if timed_only:
            _synchronise(device)
            begin = time.perf_counter()
            step.run()
            _synchronise(device)
            return Rehearsal(0, time.perf_counter() - begin, follower.diverged if follower else None)
        base = sum(resident(copy, args, kwargs, device).values()) + other_bytes
        with stepped(optimizer, copy) as (take_step, state):
            meter = make_meter(device)
            with meter:
                first = meter.mark()
                output = step.run()
                middle = meter.mark()
                take_step()
                last = meter.mark()
                del output
            peak = meter.peak(first, last) + base + state
            return Rehearsal(peak, meter.seconds(first, middle), follower.diverged if follower else None)


class _Step:
    def __init__(
        self, model: nn.Module, args: Any, kwargs: Any, loss_fn: Any, follower: Follower | None, runs: Any = None
    ) -> None:
        self.model, self.args, self.kwargs, self.loss_fn, self.follower = model, args, kwargs, loss_fn, follower
        self.runs = runs
        if runs is not None:
            runs.prepare(model, args, kwargs)

    def run(self) -> Any:
        if self.runs is not None:
            output = self.runs.forward(self.model, self.args, self.kwargs)
        elif self.follower is None:
            output = self.model(*self.args, **self.kwargs)
        else:
            with self.follower:
                output = self.model(*self.args, **self.kwargs)
            self.follower.finish()
        loss, _ = loss_of(output, self.loss_fn)
        loss.backward()
        return output, loss


def outcome(model: nn.Module, args: Any, kwargs: Any, loss_fn: Any, way: Way) -> Iterator[tuple[str, torch.Tensor]]:
    """Run one step from the present state and yield every value that a plan must not change, with its name.

    Loss, the gradients of parameters and inputs, parameters and buffers, and the generators' states after the step.
    """
    with untouched(), torch.enable_grad():
        copy, (args, kwargs) = shadow(model), copied_inputs((args, kwargs))
        given = list(tensors_in((args, kwargs)))  # forward may put more into what it is given
        follower = Follower(way, trusting=True) if isinstance(way, Directions) else None
        step = _Step(copy, args, kwargs, loss_fn, follower, None if follower is not None else way)
        _, loss = step.run()
        states = generator_states()
    yield "loss", loss.detach()
    for name, parameter in copy.named_parameters():
        if parameter.grad is not None:
            yield f"gradient of {name}", parameter.grad
    for i, tensor in enumerate(given):
        if tensor.grad is not None:
            yield f"gradient of input {i}", tensor.grad
    for name, parameter in copy.named_parameters():
        yield f"parameter {name}", parameter.detach()
    for name, buffer in copy.named_buffers():
        yield f"buffer {name}", buffer
    for i, state in enumerate(states):
        yield f"state of random generator {i}", state


def _synchronise(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
