"""Functions that belong to a module and hold on to it in a closure: hooks, attributes made by a lambda.

A deep copy takes functions as they are, so that a copied hook would work on the original's attributes.
"""

from __future__ import annotations

from types import CellType, FunctionType
from typing import Any

from torch import nn


def rebind_closures(copy: nn.Module, memo: dict[int, Any]) -> None:
    """Have the functions that `copy` and its modules hold refer to what was copied.

    Args:
        copy: made by `deepcopy`.
        memo: as `deepcopy` left it: the copy of each object by the original's `id`.
    """
    made: dict[int, FunctionType] = {}
    for module in copy.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, dict):  # hooks are kept in dicts
                for key, item in value.items():
                    if isinstance(item, FunctionType):
                        value[key] = _rebound(item, memo, made)
            elif isinstance(value, FunctionType):
                vars(module)[name] = _rebound(value, memo, made)


def _rebound(function: FunctionType, memo: dict[int, Any], made: dict[int, FunctionType]) -> FunctionType:
    if id(function) in made:
        return made[id(function)]
    made[id(function)] = function  # one that holds itself
    cells = tuple(_cell(cell, memo, made) for cell in function.__closure__ or ())
    if all(new is old for new, old in zip(cells, function.__closure__ or (), strict=True)):
        return function
    other = FunctionType(function.__code__, function.__globals__, function.__name__, function.__defaults__, cells)
    other.__kwdefaults__, other.__qualname__ = function.__kwdefaults__, function.__qualname__
    other.__dict__.update(function.__dict__)
    made[id(function)] = other
    return other


def _cell(cell: CellType, memo: dict[int, Any], made: dict[int, FunctionType]) -> CellType:
    try:
        held = cell.cell_contents
    except ValueError:  # not filled yet
        return cell
    other = _rebound(held, memo, made) if isinstance(held, FunctionType) else memo.get(id(held), held)
    return cell if other is held else CellType(other)
