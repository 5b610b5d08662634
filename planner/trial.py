"""Real steps under a plan beside plain ones: what they take, and whether they compute the same."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from .decision import Decision
from .errors import VerificationError
from .profiling.garbage import cheap_collections
from .profiling.rehearse import Way, outcome, rehearse

ROUNDS = 3  # timed steps of each way in `measured`
SLOW = 1.0  # seconds of a step above which one round has to do

Call = tuple[nn.Module, Any, Any]  # the model, and a call's arguments
Loss = Callable[[Any], torch.Tensor]


class Measurement(msgspec.Struct, frozen=True):
    """What a real step took, beside what was predicted.

    Attributes:
        peak_bytes, predicted_peak_bytes: of the planned step, the optimizer's step included if one was given.
        step_seconds: forward and backward of the planned step.
        baseline_peak_bytes, baseline_step_seconds: the plain step's; None where it did not fit.
    """

    peak_bytes: int
    predicted_peak_bytes: int
    step_seconds: float
    baseline_peak_bytes: int | None = None
    baseline_step_seconds: float | None = None


@cheap_collections()
def measured(call: Call, loss_fn: Loss | None, optimizer: Any, way: Way, predicted: Decision) -> Measurement:
    """Steps by `way` and plain ones where they fit; see `Plan.measure`."""
    buckets = predicted.profile.bucket_bytes
    model, args, kwargs = call
    ways: dict[str, Way] = {"planned": way, "plain": None}
    peaks: dict[str, int] = {}
    seconds: dict[str, list[float]] = {}
    slow = False
    for name, taken in tuple(ways.items()):
        try:
            real = rehearse(model, args, kwargs, loss_fn, taken, optimizer=optimizer, other_bytes=buckets)
        except (torch.OutOfMemoryError, MemoryError):
            if name == "planned":
                raise
            del ways[name]
            continue
        peaks[name], seconds[name] = real.peak_bytes, []
        slow = slow or real.seconds > SLOW
    # In turn, because a machine is not equally fast at all times; the steps above have warmed it up.
    for _ in range(1 if slow else ROUNDS):
        for name, taken in ways.items():
            timed = rehearse(model, args, kwargs, loss_fn, taken, timed_only=True)
            seconds[name].append(timed.seconds)
    typical = {name: statistics.median(found) for name, found in seconds.items()}
    return Measurement(
        peaks["planned"],
        predicted.timeline.peak_bytes,
        typical["planned"],
        peaks.get("plain"),
        typical.get("plain"),
    )


def compare(call: Call, loss_fn: Loss | None, way: Way) -> None:
    """Raises a VerificationError where a step by `way` and a plain one differ; see `Plan.verify`."""
    model, args, kwargs = call
    plain = dict(outcome(model, args, kwargs, loss_fn, None))
    found = dict(outcome(model, args, kwargs, loss_fn, way))
    again: dict[str, torch.Tensor] | None = None
    if plain.keys() != found.keys():
        missing = sorted(plain.keys() ^ found.keys())
        raise VerificationError(f"the planned step and the plain one do not give the same values: {missing[0]}")
    for name, value in plain.items():
        if _equal(value, found[name]):
            continue
        if value.device.type != "cpu":
            again = again or dict(outcome(model, args, kwargs, loss_fn, None))
            if _distance(found[name], value) <= 2 * _distance(again[name], value):
                continue
        raise VerificationError(
            f"{name} differs between the planned and the plain step, by up to {_distance(found[name], value):.3g}"
        )


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.layout != b.layout or a.shape != b.shape or a.dtype != b.dtype:
        return False
    if a.is_meta:  # a module that only says how to compute with other weights
        return b.is_meta
    a, b = _dense(a), _dense(b)
    return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """The numbers of a tensor of any layout."""
    if tensor.is_nested:
        return torch.cat([part.flatten() for part in tensor.unbind()])
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _distance(a: torch.Tensor, b: torch.Tensor) -> float:
    return float((_dense(a).double() - _dense(b).double()).abs().max())
