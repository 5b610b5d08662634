"""What of a model decides, beside a call's arguments, which plan is the right one."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn


def model_state(model: nn.Module) -> tuple[Any, ...]:
    """Modes, what is frozen, and the parameters' types and devices, of each module and parameter once.

    As `modules()` and `parameters()` would give them, in a fraction of the time: this is done for each call.
    """
    modes: list[bool] = []
    kinds: list[tuple[bool, torch.dtype, torch.device]] = []
    seen: set[int] = set()
    waiting: list[nn.Module] = [model]
    while waiting:
        module = waiting.pop()
        if id(module) in seen:
            continue
        seen.add(id(module))
        modes.append(module.training)
        for parameter in module._parameters.values():
            if parameter is not None and id(parameter) not in seen:
                seen.add(id(parameter))
                kinds.append((parameter.requires_grad, parameter.dtype, parameter.device))
        waiting += [child for child in module._modules.values() if child is not None]
    return tuple(modes), tuple(kinds)
