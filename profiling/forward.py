"""The first half of a measured step: one forward pass that keeps nothing, turned into a profile without backward."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from ckpt_planner.profile import SCHEMA_VERSION, UNSEEN, Op, Profile, Slot, Storage
from ckpt_planner.replay.ambient import generator_states
from ckpt_planner.replay.calls import bytes_of, storage_key, tensors_in

from .loss import loss_of
from .meter import Meter, device_name
from .record import Recorder
from .running import call, without_compiling
from .shadow import copied_inputs, nothing_new, shadow
from .signature import input_signature, model_structure
from .typical import typical

# What one call and one group cost beyond the kernels that run again: on a CPU the first is measured (see `calibrate`).
REPLAY_OP_SECONDS = 6e-6
REPLAY_GROUP_SECONDS = 12e-6

_MOST_UNSEEN = 1 << 16  # bytes: numbers are far below; more is a cache that an operation filled, not a saved tensor

Loss = Callable[[Any], torch.Tensor]


def device_of(model: nn.Module, inputs: Any = ()) -> torch.device:
    """The device that the budget is about: the parameters', or the inputs' where there are none."""
    for tensor in (*model.parameters(), *model.buffers(), *tensors_in(inputs)):
        if tensor.device.type != "meta":
            return tensor.device
    return torch.device("cpu")


def _known(model: nn.Module, args: Any, kwargs: Any) -> list[tuple[str, Any, torch.Tensor]]:
    known: list[tuple[str, Any, torch.Tensor]] = [(n, "parameter", p) for n, p in model.named_parameters()]
    known += [(n, "buffer", b) for n, b in model.named_buffers()]
    known += [(f"input {i}", "input", t) for i, t in enumerate(tensors_in((args, kwargs)))]
    return known


def resident(model: nn.Module, args: Any, kwargs: Any, device: torch.device) -> dict[str, int]:
    """Bytes of parameters, buffers and inputs on the device, each storage once."""
    sizes, seen = {"parameter": 0, "buffer": 0, "input": 0}, set()
    for _, kind, tensor in _known(model, args, kwargs):
        key = storage_key(tensor)
        if key is None or key in seen or tensor.device != device:
            continue
        seen.add(key)
        sizes[kind] += bytes_of(tensor)
    return sizes


def record(
    model: nn.Module, args: Any, kwargs: Any, loss_fn: Loss | None, meter: Meter, device: torch.device
) -> tuple[Profile, list[int]]:
    """The profile of one forward pass, without steps, and autograd's sequence number of each operation."""
    copy, (args, kwargs) = shadow(model), copied_inputs((args, kwargs))
    with meter:
        begin = meter.mark()
        recorder = Recorder(copy, _known(copy, args, kwargs), meter, device)
        sizes = resident(copy, args, kwargs, device)  # now, since forward may put more into what it is given
        with recorder.overwritten.put_back(model, copy), recorder, without_compiling():
            output = call(copy, args, kwargs, recorder.where)
            recorder.outside()
            nothing_new(model, copy)
            loss, origin = loss_of(output, loss_fn)
        storages, ops, slots = recorder.finish()
        del output, loss
        end = meter.mark()
    samples: dict[str, list[float]] = {}
    for op, marks in zip(ops, recorder.marks, strict=True):
        samples.setdefault(op.signature, []).append(meter.seconds(*marks))
    for signature, marks in recorder.faithful.marks.items():
        samples.setdefault(signature, []).append(meter.seconds(*marks))
    ops = tuple(
        msgspec.structs.replace(
            op,
            seconds=typical(samples[op.signature]),
            workspace_bytes=max(0, meter.peak(*marks) - meter.live(marks[0])),
        )
        for op, marks in zip(ops, recorder.marks, strict=True)
    )
    storages, slots = _with_unseen(storages, ops, slots, recorder.marks, meter)
    profile = Profile(
        schema=SCHEMA_VERSION,
        model=type(model).__name__,
        input_signature=input_signature(args, kwargs),
        structure=model_structure(model),
        torch_version=str(torch.__version__),
        device=device_name(device),
        storages=storages,
        ops=ops,
        slots=slots,
        steps=(),
        parameter_bytes=sizes["parameter"],
        buffer_bytes=sizes["buffer"],
        input_bytes=sizes["input"],
        gradient_bytes=0,
        end_live_bytes=0,
        rng_state_bytes=sum(s.nbytes for s in generator_states() if s.device.type == device.type),
        replay_op_seconds=REPLAY_OP_SECONDS,
        replay_group_seconds=REPLAY_GROUP_SECONDS,
        profiling_peak_bytes=with_copies(sizes) + meter.peak(begin, end),
        loss=origin,
    )
    return profile, recorder.sequences


def _with_unseen(
    storages: tuple[Storage, ...],
    ops: tuple[Op, ...],
    slots: tuple[Slot, ...],
    marks: list[tuple[int, int]],
    meter: Meter,
) -> tuple[tuple[Storage, ...], tuple[Slot, ...]]:
    """Adds what autograd saves without telling a hook (numbers wrapped as tensors), found as bytes left unexplained.

    The slots for it come after all others.
    """
    more_storages, more_slots = list(storages), list(slots)
    for i, (op, (first, last)) in enumerate(zip(ops, marks, strict=True)):
        explained = sum(storages[s].bytes for s in (*op.makes, *op.hides))
        unseen = meter.live(last) - meter.live(first) - explained
        if 0 < unseen <= _MOST_UNSEEN:
            more_slots.append(Slot(i, UNSEEN, len(more_storages), -1, -1, True))
            more_storages.append(Storage(unseen, "hidden", i, i + 1))
    return tuple(more_storages), tuple(more_slots)


def with_copies(sizes: dict[str, int]) -> int:
    """Bytes that are there while a stand-in is measured: the user's, and its own buffers and inputs."""
    return sizes["parameter"] + 2 * (sizes["buffer"] + sizes["input"])
