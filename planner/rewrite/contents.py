"""What is in a container, in forms that can be compared."""

from __future__ import annotations

import enum
import sys
import types
from collections import deque
from typing import Any

import torch

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)
LIBRARIES = ("torch", "numpy", "builtins", "ckpt_planner")  # whose objects hold no state of a user's
_LARGEST = 1 << 16  # bytes of an array that is compared by what is in it


def content(value: Any) -> Any:
    """What is in a container, so that it can be compared: atoms by value, the rest by identity."""
    if isinstance(value, types.CellType):
        try:
            return ("cell", content(value.cell_contents))
        except ValueError:
            return ("cell",)
    if isinstance(value, dict):
        return ("dict", tuple((k, content(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple, deque)):
        return (type(value).__name__, tuple(map(content, value)))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(content, value)))
    if is_array(value):
        return ("array", str(value.dtype), value.shape, value.tobytes() if value.nbytes <= _LARGEST else id(value))
    if names := slots_of(value):
        return ("slots", tuple(content(getattr(value, name, None)) for name in names))
    return (type(value).__name__, value if isinstance(value, ATOMS) else id(value))


def is_array(value: Any) -> bool:
    """Whether a value is an array of NumPy's, which is not imported for this."""
    return type(value).__module__ == "numpy" and type(value).__name__ == "ndarray"


def slots_of(value: Any) -> tuple[str, ...]:
    """Names of the attributes of an object that keeps them in slots; only where somebody's own class does."""
    kind = type(value)
    package = kind.__module__.partition(".")[0]
    if "__slots__" not in vars(kind) or package in sys.stdlib_module_names or package in LIBRARIES:
        return ()
    own = kind.__slots__
    return (own,) if isinstance(own, str) else tuple(own)


def kinds(value: Any) -> Any:
    """What is in a container: atoms by value, the rest by type."""
    if isinstance(value, dict):
        return tuple((k if isinstance(k, str) else type(k).__name__, kinds(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(kinds, value))
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, len(value))
    return value if isinstance(value, ATOMS) else type(value).__name__
