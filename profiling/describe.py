"""Names for calls: a signature that is equal for equal work, and the user's line that made the call."""

from __future__ import annotations

import hashlib
import sys
import sysconfig
from pathlib import Path
from types import FrameType
from typing import Any

import torch

from ckpt_planner.replay.calls import call_name, is_plain, transforming

_OURS = (
    str(Path(__file__).parent),
    str(Path(torch.__file__).parent),
    str(Path(call_name.__code__.co_filename).parent.parent),
)
_STANDARD = sysconfig.get_paths()["stdlib"]


def call_signature(name: str, args: Any, kwargs: Any, tensors: list[torch.Tensor], device: torch.device) -> str:
    """Function, shapes, types, layouts, options and modes of a call, as a name and a short digest.

    The model's own device is left out, so that a call has the same signature wherever the model is.
    """
    parts = [name, str(torch.is_grad_enabled()), str(torch.is_autocast_enabled(device.type))]
    parts += [
        f"{t.dtype}{tuple(t.shape)}{t.stride() if t.layout is torch.strided else t.layout}{t.requires_grad}"
        + _where(t.device, device)
        for t in tensors
    ]
    parts += [type(t).__name__ for t in tensors if not is_plain(t)]
    parts += ["transformed"] * transforming()
    parts.append(_plain(args, device) + _plain(kwargs, device))
    return name + "#" + hashlib.blake2b("|".join(parts).encode(), digest_size=6).hexdigest()


def _where(device: torch.device, main: torch.device) -> str:
    return "" if device == main else str(device)


def _plain(value: Any, main: torch.device) -> str:
    """The arguments that are no tensors, as text; `main` is the model's device."""
    if isinstance(value, torch.Tensor):
        return "T"
    if isinstance(value, (tuple, list)):
        return "(" + ",".join(_plain(v, main) for v in value) + ")"
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_plain(v, main)}" for k, v in value.items()) + "}"
    if isinstance(value, torch.device):
        return f"device({_where(value, main)})"
    if isinstance(value, (int, float, bool, str, slice, torch.dtype, type(None), type(...))):
        return repr(value)
    return type(value).__name__


def calling_line() -> str:
    """The line outside torch and this package that made the call that is being recorded."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None:
        place = users_line(frame, frame.f_lineno)
        if place:
            return place
        frame = frame.f_back
    return ""


def is_ours(filename: str) -> bool:
    """Whether a file is this package's."""
    return filename.startswith((_OURS[0], _OURS[2]))


def users_line(frame: FrameType, line: int) -> str:
    """A frame's place in a file outside torch, this package and Python's own library; "" for those within."""
    name = frame.f_code.co_filename
    if name.startswith(_OURS) or (name.startswith(_STANDARD) and "site-packages" not in name) or name.startswith("<"):
        return ""
    return f"{Path(name).name}:{line}"
