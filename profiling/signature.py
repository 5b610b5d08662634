"""What a plan was made for, as text: the call's shapes and types, and the model's structure."""

from __future__ import annotations

import hashlib
from typing import Any

import torch
from torch import nn

from ckpt_planner.replay.ambient import autocast_state


def input_signature(args: Any, kwargs: Any) -> str:
    """Shapes, types and structure of a call's arguments, and whether autocast is on.

    Example:
        >>> input_signature((torch.zeros(2, 3),), {"flag": True})
        '(float32[2,3],){flag:True}'
    """
    text = _describe(tuple(args)) + (_describe(kwargs) if kwargs else "")
    on = [f"{device}:{dtype}" for device, enabled, dtype in autocast_state() if enabled]
    return text + (" autocast " + ",".join(on) if on else "")


def _describe(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        text = f"{str(value.dtype).removeprefix('torch.')}[{','.join(map(str, value.shape))}]"
        return text + ("*" if value.requires_grad else "")
    if isinstance(value, tuple):
        return "(" + "".join(_describe(v) + "," for v in value) + ")"
    if isinstance(value, list):
        return "[" + ",".join(map(_describe, value)) + "]"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_describe(v)}" for k, v in value.items()) + "}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return repr(value)
    fields = getattr(value, "__dict__", None)
    return type(value).__name__ + (_describe(fields) if fields else "")


def model_structure(model: nn.Module) -> str:
    """A fingerprint of what decides which operations run: classes, shapes, types, modes, what is frozen."""
    digest = hashlib.blake2b(digest_size=8)
    for name, module in model.named_modules():
        digest.update(f"{name}:{type(module).__qualname__}:{module.training}\n".encode())
    for name, tensor in [*model.named_parameters(), *model.named_buffers()]:
        digest.update(
            f"{name}:{tuple(tensor.shape)}:{tensor.dtype}:{tensor.requires_grad}:{tensor.device.type}\n".encode()
        )
    return digest.hexdigest()
