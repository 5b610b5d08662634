"""Plans over one segmentation: a linear program whose memory rows include the working memory of each replay.

What is computed again inside one segment is alive together from the segment's replay on, and is let go step by step.
Backward is cut into windows, a few for each segment, and each window has the row
    kept and needed at its first step + recomputed in its segment and still waiting then + base <= budget.
`base` (gradients, workspace, what the replay holds for a moment) is not linear in the decision. It is read off a
decision nearby: the model is solved and rounded, each base set to what that decision takes beyond the linear part, and
so on for a few rounds. Forward has a row for each segment in the same manner.

Where blocks are alike the model drops the same half of each of them. What is halved falls into connected parts, about
one for each block, and rounding decides part by part (see `budget`).
"""

from __future__ import annotations

import math
from bisect import bisect_right

import numpy as np
from ortools.linear_solver import pywraplp

from ..problem import Problem
from .relax import Relaxation
from .segments import Cuts
from .state import State

WINDOWS = 120  # rows of backward, about; a segment has up to WINDOWS_EACH
WINDOWS_EACH = 6


class SegmentedModel:
    """The linear program of one segmentation; `solve` tells how far it drops each storage.

    Args:
        problem: what is decided.
        cuts: positions between segments.
    """

    def __init__(self, problem: Problem, cuts: Cuts) -> None:
        self.problem, self.cuts = problem, cuts
        profile = problem.profile
        self.segment = [bisect_right(cuts, i) for i in range(len(profile.ops))]
        self.count = len(cuts) + 1
        self._set_windows()
        own = tuple(-1 if t < 0 else self._stage(t) for t in problem.last_step)
        may_drop = tuple(s for s in problem.candidates if self._local_slots(s))
        uses = self._last_uses()
        self.model = Relaxation(problem, len(self.times), own, lambda i: self._stage(uses[i]), may_drop)
        self._forbid_crossing()
        self.waiting: list[list[int]] = [[] for _ in range(self.count)]
        for s in may_drop:
            if problem.slots_of[s]:
                self.waiting[self.segment[profile.storages[s].birth]].append(s)
        self._add_group_costs()
        # One variable tells by how much the tightest row is missed, so that the model always has a solution.
        self.excess = self.model.solver.NumVar(0.0, self.model.solver.infinity(), "")
        self.model.solver.Objective().SetCoefficient(self.excess, 1e3)
        self._add_backward_rows()
        self._add_forward_rows()

    def _set_windows(self) -> None:
        """`times`: first step of each window, last window first; `window_segment`: the segment it belongs to."""
        of_step, current = [], self.count - 1
        for step in self.problem.profile.steps:
            current = self.segment[step.op] if step.op >= 0 else current
            of_step.append(current)
        each = max(1, min(WINDOWS_EACH, WINDOWS // self.count))
        times, begin = [], 0
        while begin < len(of_step):
            end = begin
            while end < len(of_step) and of_step[end] == of_step[begin]:
                end += 1
            times += sorted({begin + (end - begin) * k // each for k in range(each)})
            begin = end
        self.times = times[::-1] or [0]
        self.window_segment = [of_step[t] if of_step else 0 for t in self.times]
        self._forward_times = times or [0]
        self._stages = np.array([self._stage(t) for t in range(len(of_step))], dtype=np.int64)
        self._windows_of: list[list[int]] = [[] for _ in range(self.count)]
        for j, g in enumerate(self.window_segment):
            self._windows_of[g].append(j)

    def _stage(self, step: int) -> int:
        """The window that `step` lies in, counted from the last one; steps beyond backward lie in the last."""
        return len(self.times) - max(1, bisect_right(self._forward_times, step))

    def _last_uses(self) -> list[int]:
        """For each operation, the last step that reads a slot filled by it or, in its segment, by what depends on it.

        Until then, at least, its replay needs what it reads.
        """
        p, ops = self.problem, self.problem.profile.ops
        last = [-1] * len(ops)
        of_storage = [-1] * len(p.made)
        for index, slot in enumerate(p.profile.slots):
            if (i := p.seed[index]) >= 0:
                last[i] = max(last[i], slot.step)
        for i in reversed(range(len(ops))):
            outs = {*ops[i].makes, *ops[i].output, *ops[i].writes}
            last[i] = max([last[i], *(of_storage[s] for s in outs if p.made[s])])
            for s in {r.storage for r in ops[i].reads}:
                if p.made[s] and self.segment[p.profile.storages[s].birth] == self.segment[i]:
                    of_storage[s] = max(of_storage[s], last[i])
        return last

    def _local_slots(self, s: int) -> bool:
        """Whether all that fills or saves a storage lies in one segment."""
        p = self.problem
        ops = [*p.touched[s], *(p.profile.slots[x].op for x in p.slots_of[s])]
        return len({self.segment[i] for i in ops}) == 1

    def _forbid_crossing(self) -> None:
        """A storage that an operation of another segment reads is kept if that operation runs again."""
        p = self.problem
        for s, d in self.model.dropped.items():
            home = self.segment[p.profile.storages[s].birth]
            for i in p.readers[s]:
                if self.segment[i] != home and i in self.model.again:
                    self.model.row(0.0, 1.0, (d, 1.0), (self.model.again[i], 1.0))

    def _add_group_costs(self) -> None:
        """One group for each segment that replays anything."""
        cost = self.problem.profile.replay_group_seconds / self.model.second_unit
        for waiting in self.waiting:
            group = self.model.solver.NumVar(0.0, 1.0, "")
            self.model.solver.Objective().SetCoefficient(group, cost)
            for s in waiting:
                self.model.row(0.0, 1.0, (group, 1.0), (self.model.dropped[s], -1.0))

    def _share(self, s: int) -> float:
        return self.problem.profile.storages[s].bytes / self.model.byte_unit

    def _add_backward_rows(self) -> None:
        model, infinity = self.model, self.model.solver.infinity()
        self.backward_rows = []
        released: list[list[int]] = [[] for _ in self.times]
        for waiting in self.waiting:
            for s in waiting:
                released[model.own_stage[s]].append(s)
        # Within a segment, what waits at a window also waited at the ones before it: a running sum for each segment.
        sums: dict[int, pywraplp.Variable] = {}
        for j, g in enumerate(self.window_segment):
            terms = [(model.dropped[s], -self._share(s)) for s in released[j] if self._home(s) == g]
            terms += [(sums[g], -1.0)] if g in sums else []
            sums[g] = model.solver.NumVar(0.0, infinity, "")
            model.row(0.0, 0.0, (sums[g], 1.0), *terms)
            self.backward_rows.append(
                model.row(-infinity, infinity, (model.kept[j], 1.0), (sums[g], 1.0), (self.excess, -1.0))
            )

    def _home(self, s: int) -> int:
        return self.segment[self.problem.profile.storages[s].birth]

    def _saved(self) -> list[int]:
        return [s for s, made in enumerate(self.problem.made) if made and self.problem.slots_of[s]]

    def _add_forward_rows(self) -> None:
        model, infinity = self.model, self.model.solver.infinity()
        self.forward_rows = []
        here: list[list[int]] = [[] for _ in range(self.count)]
        for s in self._saved():
            here[self._home(s)].append(s)
        before = None
        for j in range(self.count):
            born = model.solver.NumVar(0.0, infinity, "")
            constant = math.fsum(self._share(s) for s in here[j])
            terms = [(model.dropped[s], self._share(s)) for s in here[j] if s in model.dropped]
            terms += [(before, -1.0)] if before is not None else []
            model.row(constant, constant, (born, 1.0), *terms)
            self.forward_rows.append(model.row(-infinity, infinity, (born, 1.0), (self.excess, -1.0)))
            before = born

    def _linear_part(self, state: State) -> tuple[list[float], list[float]]:
        """Bytes that the memory rows count for a decision, in each window of backward and each segment of forward."""
        p, model, dropped, size = self.problem, self.model, state.dropped, state.t.size
        at, forward = [0.0] * (len(self.times) + 1), [0.0] * self.count
        for s, made in enumerate(p.made):
            if not made:
                continue
            own = model.own_stage[s]
            if state.t.death[s] > state.t.n:
                at[0] += size[s]
            elif s not in dropped:
                uses = [model.use_stage(i) for i in p.readers[s] if state.again(i)] + ([own] if own >= 0 else [])
                at[min(uses, default=-1)] += size[s]
            if p.slots_of[s] and s not in dropped:
                forward[self._home(s)] += size[s]
        for j in range(1, len(self.times)):
            at[j] += at[j - 1]
        for j in range(1, self.count):
            forward[j] += forward[j - 1]
        for s in dropped:
            if p.slots_of[s]:
                for j in self._windows_of[self._home(s)]:
                    if j >= model.own_stage[s]:
                        at[j] += size[s]
        return at, forward

    def set_bases(self, state: State, budget: float) -> None:
        """Sets each memory row's base to what a decision takes beyond the linear part."""
        at, forward = self._linear_part(state)
        infinity, unit = self.model.solver.infinity(), self.model.byte_unit
        peak, forward_peak = np.zeros(len(self.times)), np.zeros(self.count)
        np.maximum.at(peak, self._stages, state.backward())
        np.maximum.at(forward_peak, np.array(self.segment), state.forward())
        for j, row in enumerate(self.backward_rows):
            row.SetBounds(-infinity, (budget - float(peak[j]) + at[j]) / unit)
        for j, row in enumerate(self.forward_rows):
            row.SetBounds(-infinity, (budget - float(forward_peak[j]) + forward[j]) / unit)

    def solve(self) -> dict[int, float] | None:
        """For each storage that may be dropped, how far the model drops it, 0 to 1; None where it finds nothing."""
        if not self.model.solve():
            return None
        return {s: d.solution_value() for s, d in self.model.dropped.items()}
