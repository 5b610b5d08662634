"""Strategy "all": what people do by hand, every repeated block of the model one checkpointed region.

Blocks are read off the module paths: the outermost siblings with integer names, such as `h.0` and `h.1`. A model
without any is cut at its top-level children.
"""

from __future__ import annotations

from ..problem import Judged, Problem
from .segments import needed_span


def block_of_ops(problem: Problem) -> tuple[int, ...]:
    """For each operation, the number of its block, counted in the order in which blocks begin; -1 outside of blocks.

    A block that runs several times is a block each time.
    """
    names = [_block_name(op.module) if op.inside else "" for op in problem.profile.ops]
    containers: dict[str, set[str]] = {}
    for name in names:
        if name:
            containers.setdefault(name.rpartition(".")[0], set()).add(name)
    repeated = {name for siblings in containers.values() if len(siblings) > 1 for name in siblings}
    if repeated:
        names = [name if name in repeated else "" for name in names]
    else:
        names = [op.module.partition(".")[0] if op.inside else "" for op in problem.profile.ops]
    found, number, current = [], -1, ""
    for name in names:
        if name != current and name:
            number += 1
        current = name
        found.append(number if name else -1)
    return tuple(found)


def block_cuts(problem: Problem) -> tuple[int, ...]:
    """Positions at which a block begins or ends."""
    block = block_of_ops(problem)
    return tuple(p for p in range(1, len(block)) if block[p] != block[p - 1])


def solve_all(problem: Problem) -> Judged:
    """Drops whatever is made and needed within one block."""
    block = block_of_ops(problem)
    wish = []
    for s in problem.candidates:
        first, last = needed_span(problem, s)
        if block[first] >= 0 and block[first] == block[last]:
            wish.append(s)
    return problem.judge(wish)


def _block_name(module: str) -> str:
    """The path up to the first integer name; empty if there is none."""
    parts = module.split(".") if module else []
    for depth, part in enumerate(parts):
        if part.isdigit():
            return ".".join(parts[: depth + 1])
    return ""
