"""What can be done with one block: a few ways to drop from it, of which none is better than another in every respect.

A way is judged by the bytes that the block keeps for backward, the most that are live during its own backward, and the
seconds of what runs again. The ways at the corners of the lower hull of kept bytes and seconds come from the relaxation
of the block alone, with a price on each kept byte: between two corners, the price at which both cost the same either
gives a third or shows that there is none (Eisner and Severance, 1976). Ways between the corners, and ways with smaller
replays, are found by dropping or keeping one storage more. Of many, the cheapest in each cell of a grid of kept and
live bytes stay.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..problem import Problem
from .relax import Relaxation
from .state import State

CORNERS = 11  # corners of the hull
TRIED, LARGE = 1_000, 50  # changes by one storage; a change counts once more for each LARGE operations
KEPT, LIVE = 16, 3  # cells of the grid
STEEP = 1e4  # a price for all the block's bytes, in its seconds, at which all is dropped that can be


class Option(NamedTuple):
    """A way to drop from a block.

    Attributes:
        kept: bytes that it keeps for backward.
        live: most bytes live during its own backward.
        seconds: what runs again.
        dropped: the storages.
    """

    kept: int
    live: int
    seconds: float
    dropped: tuple[int, ...]


class Effect(NamedTuple):
    """What an option changes against keeping all, in bytes.

    Attributes:
        forward: during each of the block's operations.
        backward: during each step of its backward.
        kept: while the backward of later blocks runs.
        groups: how many groups of operations are replayed.
        again: the block's operations that run again, from 0.
        dropped: the storages.
    """

    forward: NDArray[np.int64]
    backward: NDArray[np.int64]
    kept: int
    groups: int
    again: tuple[int, ...]
    dropped: tuple[int, ...]


def options(problem: Problem, without: Iterable[int] = (), effort: int = TRIED) -> list[Option]:
    """The options of a block that is a problem of its own (see `alone`), by kept bytes.

    Args:
        problem: the block.
        without: storages that each option drops; with none, one of the options is to keep all.
        effort: changes by one storage that are tried.
    """
    state, must = State(problem), {s for s in without if problem.droppable[s]}
    found: dict[tuple[int, ...], Option] = {}

    def note(option: Option) -> None:
        if must.issubset(option.dropped):
            found.setdefault(option.dropped, option)

    note(_here(state))
    for corner in corners(problem, must):
        note(corner)
    left = effort
    for seed in _chosen(found.values()):
        state.move_to(seed.dropped)
        for s in problem.candidates:
            left -= 1 + len(problem.profile.ops) // LARGE
            undo = state.change((), (s,)) if s in state.dropped else state.change((s,), ())
            note(_here(state))
            state.undo(undo)
        if left <= 0:
            break
    return _chosen(found.values())


def effects(problem: Problem, found: Iterable[Option]) -> list[Effect]:
    """What each option changes."""
    state = State(problem)
    forward, backward = state.forward(), state.backward()
    result = []
    for option in found:
        state.move_to(option.dropped)
        after, later = state.forward() - forward, state.backward() - backward
        groups = [group for group in state.groups.values() if group.trigger >= 0]
        again = tuple(sorted(i - 1 for group in groups for i in group.ops))
        result.append(Effect(after[1:], later[1:], int(later[0]), len(groups), again, option.dropped))
    return result


def _here(state: State) -> Option:
    backward = state.backward()
    live = int(backward[1:].max(initial=0))
    return Option(int(backward[0]), live, state.seconds, tuple(sorted(state.dropped)))


def corners(problem: Problem, must: Iterable[int] = ()) -> list[Option]:
    """Options near the corners of the hull, with those of `must` dropped in the relaxation."""
    state = State(problem)
    own = tuple(0 if t >= 0 else -1 for t in problem.last_step)
    model = Relaxation(problem, 1, own, lambda _: 0, problem.candidates)
    model.add_groups()
    for s in must:
        model.dropped[s].SetLb(1.0)
    objective, found = model.solver.Objective(), []

    def at(price: float) -> tuple[float, float]:
        """Kept bytes and seconds where all the block's bytes have this price; both as shares."""
        objective.SetCoefficient(model.kept[0], price)
        if not model.solve():
            return 0.0, 0.0
        state.move_to(s for s, d in model.dropped.items() if d.solution_value() > 0.5)
        found.append(_here(state))
        kept = model.kept[0].solution_value()
        return kept, objective.Value() - price * kept

    pairs = deque([(at(0.0), at(STEEP))])
    while pairs and len(found) < CORNERS:
        a, b = pairs.popleft()  # breadth first, so that a hull with more corners is known evenly
        if a[0] - b[0] < 1e-6:
            continue
        price = (b[1] - a[1]) / (a[0] - b[0])
        c = at(price)
        if c[1] + price * c[0] < a[1] + price * a[0] - 1e-7:
            pairs += [(a, c), (c, b)]
    return found


def _chosen(found: Iterable[Option]) -> list[Option]:
    """Those that are not worse in every respect; of many, the cheapest of each cell."""
    front: list[Option] = []
    for o in sorted(found, key=lambda o: (o.seconds, o.kept, o.live, o.dropped)):
        if not any(other.kept <= o.kept and other.live <= o.live for other in front):
            front.append(o)
    if len(front) > KEPT * LIVE:
        most, least = max(o.kept for o in front), min(o.kept for o in front)
        high, low = max(o.live for o in front), min(o.live for o in front)
        cells: dict[tuple[int, int], Option] = {}
        for o in front:  # the cheapest come first
            cell = (o.kept - least) * KEPT // (most - least + 1), (o.live - low) * LIVE // (high - low + 1)
            cells.setdefault(cell, o)
        keep = {*cells.values(), min(front, key=lambda o: (o.kept, o.seconds)), min(front, key=lambda o: o.live)}
        front = [o for o in front if o in keep]
    return sorted(front, key=lambda o: (o.kept, o.live, o.seconds))
