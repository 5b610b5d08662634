"""What is in a container, in forms that can be compared."""

from __future__ import annotations

import enum
import types
from typing import Any

import torch

ATOMS = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, enum.Enum)


def content(value: Any) -> Any:
    """What is in a container, so that it can be compared: atoms by value, the rest by identity."""
    if isinstance(value, types.CellType):
        try:
            return ("cell", content(value.cell_contents))
        except ValueError:
            return ("cell",)
    if isinstance(value, dict):
        return ("dict", tuple((k, content(v)) for k, v in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value).__name__, tuple(map(content, value)))
    if isinstance(value, (set, frozenset)):
        return ("set", frozenset(map(content, value)))
    return (type(value).__name__, value if isinstance(value, ATOMS) else id(value))


def kinds(value: Any) -> Any:
    """What is in a container: atoms by value, the rest by type."""
    if isinstance(value, dict):
        return tuple((k if isinstance(k, str) else type(k).__name__, kinds(v)) for k, v in value.items())
    if isinstance(value, (list, tuple)):
        return tuple(map(kinds, value))
    if isinstance(value, (set, frozenset)):
        return (type(value).__name__, len(value))
    return value if isinstance(value, ATOMS) else type(value).__name__
