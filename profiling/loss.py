"""Which scalar is differentiated."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ckpt_planner.errors import CaptureError
from ckpt_planner.replay.calls import tensors_in

STAND_IN = "a stand-in (the sum of the outputs' mean squares), because the output is no loss and loss_fn was not given"


def loss_of(output: Any, loss_fn: Callable[[Any], torch.Tensor] | None) -> tuple[torch.Tensor, str]:
    """The scalar to differentiate and where it comes from.

    Raises:
        CaptureError: nothing in the output depends on anything that requires a gradient.
    """
    if loss_fn is not None:
        loss, origin = loss_fn(output), "loss_fn(output)"
    elif isinstance(output, torch.Tensor) and output.numel() == 1:
        loss, origin = output, "the output"
    elif isinstance(getattr(output, "loss", None), torch.Tensor):
        loss, origin = output.loss, "output.loss"
    elif isinstance(output, dict) and isinstance(output.get("loss"), torch.Tensor):
        loss, origin = output["loss"], 'output["loss"]'
    else:
        loss, origin = _stand_in(output), STAND_IN
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        shape = tuple(loss.shape) if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise CaptureError(f"the loss must be a tensor with one element; {origin} gave {shape}")
    if not loss.requires_grad:
        raise CaptureError(
            "the loss does not depend on anything that requires a gradient: is every parameter frozen, the model in a "
            "no_grad block, or its output detached?"
        )
    return loss, origin


def _stand_in(output: Any) -> torch.Tensor:
    if not isinstance(output, (torch.Tensor, tuple, list, dict)):
        output = getattr(output, "__dict__", {})
    tensors = [t for t in tensors_in(output) if t.requires_grad]
    if not tensors:
        raise CaptureError("the model's output holds no tensor that requires a gradient; give loss_fn")
    return sum((t.abs() if t.is_complex() else t).float().pow(2).mean() for t in tensors)  # type: ignore[return-value]
