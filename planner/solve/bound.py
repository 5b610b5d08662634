"""A lower bound on the seconds that any plan within the budget has to compute again.

Derivation. Take any decision that keeps the budget. Let d_s be 1 where storage s is dropped, r_i be 1 where operation i
runs again. (1) A dropped storage with a slot that backward reads is filled by running again what makes it, what writes
into it and what returns the slot's tensor: d_s <= r_i. A mere look by which something reads a dropped storage is made
again, too. (2) An operation that runs again finds what it reads either kept or computed
again: if it reads s and s is not dropped, then s is kept until the replay that reads it ends. That replay serves some
dropped slot for which i may have to run again, so it does not end before the first of the steps that read those slots:
s is live until then, at least (`used_until`). (3) At backward step t, everything kept whose last use is not before t is
live, and so are what is resident and the step's own gradients and workspace; together they are at most the budget.
A dropped storage is live, too, from the first to the last of the steps that read its slots: it is
filled before the first and let go after the last. What else is being recomputed needs memory as well, which is left
out: the sum only becomes smaller. (4) The decision costs at
least the sum of r_i times the seconds of i, and the seconds of a group for each group, of which there are at least as
many as operations that run again less the ties between them (`Relaxation.add_groups`). So every decision that keeps the
budget is a point of this linear program, and its minimum is a lower bound. Testing (3) at some of the steps only, and
letting variables be fractional, enlarges the set of points, so the bound stays valid.
"""

from __future__ import annotations

from bisect import bisect_left
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..problem import Problem
from .relax import Relaxation

ROWS = 200  # steps at which memory is tested; more make the bound tighter and slower


class Relaxed(NamedTuple):
    """What the program found.

    Attributes:
        seconds: no plan within the budget computes again for less.
        dropped: how far the program's best point drops each storage, 0 to 1; a plan near it is a good start.
    """

    seconds: float
    dropped: dict[int, float]


def lower_bound_seconds(problem: Problem, nodes: int = 0, *, groups: bool = True) -> float | None:
    """Seconds that any plan within the budget computes again, at least; None if no plan can keep the budget.

    The arguments are those of `relaxed`.
    """
    found = relaxed(problem, nodes, groups=groups)
    return None if found is None else found.seconds


def relaxed(problem: Problem, nodes: int = 0, *, groups: bool = True) -> Relaxed | None:
    """Solves the program; None if no plan can keep the budget.

    Args:
        problem: the profile and the budget.
        nodes: with any, decisions are whole in the program, and branch and bound may look at so many nodes.
        groups: whether each group of operations that runs again costs `replay_group_seconds`, as in a replay.
    """
    p = problem.profile
    if not p.steps:
        return Relaxed(0.0, {})
    spans = read_spans(problem)
    times = _row_times(problem, spans)
    stages, last_first = len(times), [-t for t in times]

    def stage(step: int) -> int:
        """The stage of the last row that is not after `step`: what is needed at `step` is live there."""
        return min(bisect_left(last_first, -step), stages - 1)

    own = tuple(stage(t) if t >= 0 else -1 for t in problem.last_step)
    earliest = used_until(problem)
    model = Relaxation(problem, stages, own, lambda i: stage(earliest[i]), problem.candidates, nodes=nodes)
    infinity = model.solver.infinity()
    for j, t in enumerate(times):
        free = problem.budget_bytes - p.resident_bytes - p.steps[t].peak_bytes
        waiting = [
            (model.dropped[s], p.storages[s].bytes / model.byte_unit)
            for s, (first, last) in spans.items()
            if first <= t <= last
        ]
        model.row(-infinity, free / model.byte_unit, (model.kept[j], 1.0), *waiting)
    if groups:
        model.add_groups()
    if not model.solve():
        return None if model.infeasible else Relaxed(0.0, {})
    # The simplex method stops within a tolerance of the optimum; what it may be off by is given away.
    objective = model.solver.Objective()
    least = float(objective.BestBound() if nodes else objective.Value())
    dropped = {s: d.solution_value() for s, d in model.dropped.items()}
    return Relaxed(max(0.0, (least - 1e-6) * model.second_unit), dropped)


def read_spans(problem: Problem) -> dict[int, tuple[int, int]]:
    """For each storage that may be dropped and is read by backward, the first and the last step that read its slots."""
    steps: dict[int, list[int]] = {}
    for slot in problem.profile.slots:
        if slot.step >= 0 and problem.droppable[slot.storage]:
            steps.setdefault(slot.storage, []).append(slot.step)
    return {s: (min(t), max(t)) for s, t in sorted(steps.items())}


def _row_times(problem: Problem, spans: dict[int, tuple[int, int]]) -> list[int]:
    """Steps to test, last first.

    In each of `ROWS` stretches, the step at which most is live when all is kept, and the one at which most is live when
    all is dropped that may be. The first step is always among them, so that there is a row that is not after any step.
    """
    p = problem.profile
    count = min(ROWS, len(p.steps))
    edges = [len(p.steps) * k // count for k in range(count + 1)]
    difference = [0] * (len(p.steps) + 2)
    for s, size in ((s, storage.bytes) for s, storage in enumerate(p.storages)):
        if s in spans:
            difference[spans[s][0]] += size
            difference[spans[s][1] + 1] -= size
        elif problem.made[s] and problem.last_step[s] >= 0:
            difference[0] += size
            difference[problem.last_step[s] + 1] -= size
    least = [step.peak_bytes + live for step, live in zip(p.steps, accumulate(difference), strict=False)]
    most = problem.judge(()).timeline.backward
    stretches = [range(a, b) for a, b in pairwise(edges)]
    chosen = {max(stretch, key=lambda t: (weight[t], -t)) for weight in (least, most) for stretch in stretches}
    return sorted(chosen | {0}, reverse=True)


def used_until(problem: Problem) -> list[int]:
    """For each operation, the first step with a slot that it may have to run again for; len(steps) if there is none.

    What runs again takes with it what returned the tensors that it reads, and all that writes into their storages or
    into those that it returns: also writes that come after it.
    """
    p, m = problem.profile, len(problem.profile.steps)
    first = [m] * len(p.ops)
    read = sorted((slot.step, problem.seed[x]) for x, slot in enumerate(p.slots) if slot.step >= 0)
    for step, seed in read:
        stack = [seed] if seed >= 0 else []
        while stack:
            i = stack.pop()
            if first[i] < m:
                continue  # reached from a step that is not later
            first[i] = step
            touched = {*p.ops[i].output, *(r.storage for r in p.ops[i].reads)}
            made = [s for s in touched if problem.made[s]]
            needed = [p.storages[s].birth for s in made] + [w for s in made for w in problem.touching.get(s, ())]
            stack += [*needed, *(r.producer for r in p.ops[i].reads if problem.made[r.storage])]
    return first
