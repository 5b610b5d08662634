"""What a forward does that a graph of its calls does not repeat."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn
from torch.nn.modules import module as hooks

_OF_A_MODULE = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
OF_ALL_MODULES = (
    "_global_forward_hooks",
    "_global_forward_pre_hooks",
    "_global_backward_hooks",
    "_global_backward_pre_hooks",
)


@contextmanager
def side_effects(model: nn.Module) -> Iterator[list[str]]:
    """Around a forward: fills the list with sentences' ends about what it did that is not in its calls."""
    found: list[str] = []
    for name, module in model.named_modules():
        if any(getattr(module, kind, None) for kind in _OF_A_MODULE):
            found.append(f"hooks on module '{name}'")
            break
    if any(getattr(hooks, kind, None) for kind in OF_ALL_MODULES):
        found.append("hooks on all modules")
    before = _draws()
    yield found
    if _draws() != before:
        found.append("a draw from Python's or NumPy's random generator")


def _draws() -> Any:
    numpy = sys.modules.get("numpy")
    state = numpy.random.get_state() if numpy is not None else None
    return random.getstate(), (state[1].tobytes(), state[2:]) if state is not None else None
