"""From a model and its inputs to a profile of one training step."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Callable
from typing import Any

import msgspec
import torch
from torch import nn

from ckpt_planner.errors import CaptureError, UnsupportedModelError
from ckpt_planner.profile import UNSEEN, Profile
from ckpt_planner.replay.ambient import foreign_modes
from ckpt_planner.replay.calls import tensors_in
from ckpt_planner.replay.directions import direct
from ckpt_planner.schedule import Schedule
from ckpt_planner.solve import segments_by_bytes

from .backward import Measurer
from .buckets import averaged_parameters, bucket_bytes
from .calibrate import Chain, following_seconds, plain_seconds
from .forward import Loss, device_of, record, with_copies
from .loss import loss_of
from .meter import make_meter
from .optimizer import optimizer_memory
from .running import call
from .shadow import copied_inputs, shadow, untouched
from .typical import steadied, typical

Progress = Callable[[str], None]


def measure_profile(
    model: nn.Module,
    args: tuple[Any, ...] = (),
    kwargs: dict[str, Any] | None = None,
    *,
    loss_fn: Loss | None = None,
    optimizer: Any = None,
    progress: Progress = lambda stage: None,
) -> Profile:
    """Measure one training step of `model`, in the memory of a step that keeps little.

    Two steps are run on a stand-in that shares the parameters' memory: a forward that keeps nothing, which gives the
    operations, and a step that recomputes in about sqrt(N) segments, which gives the backward pass.

    Args:
        model: in the mode (train or eval) in which it is to be planned.
        args, kwargs: the call's arguments.
        loss_fn: makes the scalar to differentiate from the output; see `loss_of` for the default.
        optimizer: a `torch.optim.Optimizer`, or a class of one, whose state and working memory count.
        progress: told the name of each stage.

    Raises:
        CaptureError: the forward fails, or nothing requires a gradient.
        UnsupportedModelError: the model cannot be copied, or a function mode is at work.
    """
    if foreign := foreign_modes():
        raise UnsupportedModelError(
            f"a torch function mode of your own ({', '.join(foreign)}) is at work: what it does to a call in forward "
            "cannot be repeated in backward, where it need not be. Plan outside of it, or do its work in the model."
        )
    return measure_twice(model, args, kwargs or {}, loss_fn=loss_fn, optimizer=optimizer, progress=progress)[1]


def measure_twice(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Loss | None = None,
    optimizer: Any = None,
    progress: Progress = lambda stage: None,
) -> tuple[Profile, Profile]:
    """The profile of forward alone, as `record_forward` gives it, and the whole one; see `measure_profile`."""

    def once() -> tuple[Profile, Profile]:
        draft, sequences = record_forward(model, args, kwargs, loss_fn=loss_fn, progress=progress)
        return draft, complete_profile(
            draft, sequences, model, args, kwargs, loss_fn=loss_fn, optimizer=optimizer, progress=progress
        )

    try:
        return once()
    except _AnotherPath:  # the first run may have filled a cache that outlives it, a table of positions say
        return once()


def record_forward(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Loss | None = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> tuple[Profile, list[int]]:
    """The first half of `measure_profile`: what forward does, without any backward step.

    Returns:
        A profile without steps, and for each operation autograd's sequence number, which `complete_profile` wants.

    Raises:
        CaptureError: the forward fails, or nothing requires a gradient.
        UnsupportedModelError: the model cannot be copied.
    """
    device = device_of(model, (args, kwargs))
    with untouched(), torch.enable_grad():
        progress("recording the forward pass")
        return record(model, args, kwargs, loss_fn, make_meter(device), device)


def complete_profile(
    draft: Profile,
    sequences: list[int],
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    loss_fn: Loss | None = None,
    optimizer: Any = None,
    progress: Callable[[str], None] = lambda stage: None,
) -> Profile:
    """The second half of `measure_profile`: adds the backward pass and the optimizer to what `record_forward` gave.

    Raises:
        CaptureError: the model took another path than when it was recorded.
    """
    device = device_of(model, (args, kwargs))
    dropped = segments_by_bytes(draft)
    with untouched(), torch.enable_grad():
        progress("measuring the backward pass")
        profile = _measure_backward(model, args, kwargs, loss_fn, draft, dropped, sequences, device)
        profile = _without_measuring(profile, device)
    profile = msgspec.structs.replace(profile, bucket_bytes=bucket_bytes(model))
    if optimizer is not None:
        progress("sizing the optimizer")
        name, state, workspace = optimizer_memory(optimizer, model, device)
        profile = msgspec.structs.replace(
            profile, optimizer=name, optimizer_state_bytes=state, optimizer_workspace_bytes=workspace
        )
    return profile


@functools.lru_cache(maxsize=1)
def _measuring_seconds() -> tuple[float, float]:
    """What measuring adds to one operation of forward and to one node of backward on a CPU, seconds."""
    model, device = Chain(), torch.device("cpu")
    draft, sequences = record(model, (), {}, None, make_meter(device), device)
    profile = _measure_backward(model, (), {}, None, draft, (), sequences, device)
    forward, backward = plain_seconds()
    name = profile.ops[0].name
    op = typical([op.seconds for op in profile.ops if op.name == name])
    node = typical([step.seconds for step in profile.steps if step.op >= 0 and profile.ops[step.op].name == name])
    return max(0.0, op - forward), max(0.0, node - backward)


def _without_measuring(profile: Profile, device: torch.device) -> Profile:
    """Takes the cost of measuring out of a profile, and puts the cost of following in. On a CPU; see `calibrate`."""
    if device.type != "cpu":
        return profile
    op_seconds, node_seconds = _measuring_seconds()
    follow, again = following_seconds()
    return msgspec.structs.replace(
        profile,
        ops=tuple(msgspec.structs.replace(op, seconds=max(0.0, op.seconds - op_seconds)) for op in profile.ops),
        steps=tuple(msgspec.structs.replace(s, seconds=max(0.0, s.seconds - node_seconds)) for s in profile.steps),
        follow_op_seconds=follow,
        replay_op_seconds=again,
    )


class _AnotherPath(CaptureError):
    """The second run was not the first."""


def _measure_backward(
    model: nn.Module,
    args: Any,
    kwargs: Any,
    loss_fn: Loss | None,
    draft: Profile,
    dropped: tuple[int, ...],
    sequences: list[int],
    device: torch.device,
) -> Profile:
    copy, (args, kwargs) = shadow(model), copied_inputs((args, kwargs))
    inputs: list[torch.Tensor] = [t for t in tensors_in((args, kwargs)) if t.requires_grad]
    meter = make_meter(device)
    with meter:
        begin = meter.mark()
        measurer = Measurer(direct(draft, Schedule(draft, dropped)), meter, averaged_parameters(copy))
        with measurer.saving:
            start = torch._C._autograd._get_sequence_nr()
            with measurer:
                output = call(copy, args, kwargs)
            diverged = measurer.diverged
            loss, _ = loss_of(output, loss_fn)
        measurer.finish()
        if diverged is None:
            measurer.backward(loss, copy, inputs)
        del output, loss
        end = meter.mark()
    seen = [s for s in draft.slots if s.position != UNSEEN]
    if diverged is not None or len(seen) != measurer.saved_count:
        where = (
            f"operation {diverged[0]}: {diverged[2]} instead of {diverged[1]}"
            if diverged
            else (f"{measurer.saved_count} tensors saved for backward instead of {len(seen)}")
        )
        raise _AnotherPath(
            f"{type(model).__name__} took another path when it was run a second time from the same state ({where}); "
            "its forward depends on something outside the model and torch's, Python's and NumPy's random generators."
        )
    steps, numbers, end_live, gradients = measurer.steps()
    boundaries = sequences
    placed = []
    for step, number in zip(steps, numbers, strict=True):
        op = bisect.bisect_right(boundaries, number - start) - 1 if number - start >= 0 and number < (1 << 62) else -1
        placed.append(msgspec.structs.replace(step, op=min(op, len(draft.ops) - 1)))
    placed = steadied(placed, draft.ops)
    # What no hook sees is freed within the measured steps, so their own bytes tell when it goes: here it never does.
    slots = tuple(
        msgspec.structs.replace(s, step=-1 if s.position == UNSEEN else measurer.read_at.get(i, -1))
        for i, s in enumerate(draft.slots)
        if i not in measurer.gone
    )
    # What such a tensor lies in was there as long as its node was.
    until: dict[int, int] = {}
    for i, position in measurer.gone.items():
        until[draft.slots[i].storage] = max(position, until.get(draft.slots[i].storage, 0))
    storages = tuple(
        msgspec.structs.replace(s, death=max(s.death, until[i])) if i in until and s.birth >= 0 else s
        for i, s in enumerate(draft.storages)
    )
    sizes = {"parameter": draft.parameter_bytes, "buffer": draft.buffer_bytes, "input": draft.input_bytes}
    return msgspec.structs.replace(
        draft,
        storages=storages,
        slots=slots,
        steps=tuple(placed),
        gradient_bytes=gradients,
        end_live_bytes=end_live,
        profiling_peak_bytes=max(draft.profiling_peak_bytes, with_copies(sizes) + meter.peak(begin, end)),
    )
