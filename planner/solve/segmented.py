"""Plans over one segmentation: a linear program whose memory rows include the working memory of each replay.

What is computed again inside one segment is alive together when the segment is replayed, so each segment has the row
    kept at its replay + recomputed saved bytes of the segment + base <= budget.
`base` (gradients, workspace, what Python holds) is not linear in the decision. It is read off the simulation of the
last decision: the model is solved, its rounding simulated, each base set to what the simulation says beyond the linear
part, and so on for a few rounds. Rows of this shape are nearly integral: rounding at any threshold keeps every implication
of the form "dropped, so runs again" and moves memory by a few storages only.
"""

from __future__ import annotations

from bisect import bisect_right

from ..problem import Judged, Problem
from .relax import Relaxation
from .segments import Cuts, inside_segments

ROUNDS = 5
THRESHOLDS = (0.999, 0.75, 0.5, 0.25, 0.001)


class SegmentedModel:
    """The linear program of one segmentation; `plan` yields decisions for a budget.

    Args:
        problem: what is decided.
        cuts: positions between segments.
    """

    def __init__(self, problem: Problem, cuts: Cuts, *, integral: bool = False) -> None:
        self.problem, self.cuts = problem, cuts
        profile, ops = problem.profile, problem.profile.ops
        self.segment = [bisect_right(cuts, i) for i in range(len(ops))]
        self.count = len(cuts) + 1
        self.step_segment = self._step_segments()
        m = len(profile.steps)
        own = tuple(-1 if t < 0 else 0 if t >= m else self.step_segment[t] for t in problem.last_step)
        may_drop = tuple(s for s in problem.candidates if self._local_slots(s))
        self.model = Relaxation(problem, self.count, own, lambda i: self.segment[i], may_drop, integral=integral)
        self._forbid_crossing()
        self.waiting: list[list[int]] = [[] for _ in range(self.count)]
        for s in may_drop:
            if problem.slots_of[s]:
                self.waiting[self.segment[profile.storages[s].birth]].append(s)
        self._add_group_costs()
        self._add_memory_rows()

    def _step_segments(self) -> list[int]:
        found, current = [], self.count - 1
        for step in self.problem.profile.steps:
            current = self.segment[step.op] if step.op >= 0 else current
            found.append(current)
        return found

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

    def _add_memory_rows(self) -> None:
        model, profile = self.model, self.problem.profile
        infinity = model.solver.infinity()
        self.backward_rows, self.forward_rows = [], []
        # One variable tells by how much the tightest row is missed, so that the model always has a solution.
        self.excess = model.solver.NumVar(0.0, infinity, "")
        model.solver.Objective().SetCoefficient(self.excess, 1e3)
        born = [model.solver.NumVar(0.0, infinity, "") for _ in range(self.count)]
        for j in range(self.count):
            waiting = [(model.dropped[s], profile.storages[s].bytes / model.byte_unit) for s in self.waiting[j]]
            self.backward_rows.append(
                model.row(-infinity, infinity, (model.kept[j], 1.0), (self.excess, -1.0), *waiting)
            )
        kept_here: list[list[tuple[object, float]]] = [[] for _ in range(self.count)]
        constant = [0.0] * self.count
        for s in range(len(self.problem.made)):
            if self.problem.made[s] and self.problem.slots_of[s]:
                j = self.segment[profile.storages[s].birth]
                constant[j] += profile.storages[s].bytes / model.byte_unit
                if s in model.dropped:
                    kept_here[j].append((model.dropped[s], profile.storages[s].bytes / model.byte_unit))
        for j in range(self.count):
            chain = [(born[j], 1.0)] + ([(born[j - 1], -1.0)] if j else [])
            model.row(constant[j], constant[j], *chain, *kept_here[j])
            self.forward_rows.append(model.row(-infinity, infinity, (born[j], 1.0), (self.excess, -1.0)))

    def _linear_part(self, judged: Judged) -> tuple[list[float], list[float]]:
        """Bytes that the memory rows count for a decision, at each segment's replay and in forward."""
        p, profile = self.problem, self.problem.profile
        dropped = set(judged.dropped)
        again = judged.again
        at = [0.0] * self.count
        forward = [0.0] * self.count
        for s, made in enumerate(p.made):
            if not made:
                continue
            size, own = profile.storages[s].bytes, self.model.own_stage[s]
            home = self.segment[profile.storages[s].birth]
            if profile.storages[s].death > len(profile.ops):
                first = 0
            elif s in dropped:
                if p.slots_of[s]:
                    at[home] += size
                continue
            else:
                uses = [self.segment[i] for i in p.readers[s] if i in again] + ([own] if own >= 0 else [])
                first = min(uses, default=self.count)
            for j in range(first, self.count):
                at[j] += size
            if p.slots_of[s]:
                for j in range(home, self.count):
                    forward[j] += size
        return at, forward

    def set_bases(self, judged: Judged, budget: float) -> None:
        """Sets each memory row's base to what the simulation of `judged` counts beyond the linear part."""
        at, forward = self._linear_part(judged)
        infinity = self.model.solver.infinity()
        peak, forward_peak = [0] * self.count, [0] * self.count
        for t, b in enumerate(judged.timeline.backward):
            peak[self.step_segment[t]] = max(peak[self.step_segment[t]], b)
        for i, b in enumerate(judged.timeline.forward):
            forward_peak[self.segment[i]] = max(forward_peak[self.segment[i]], b)
        for j in range(self.count):
            unit = self.model.byte_unit
            self.backward_rows[j].SetBounds(-infinity, (budget - peak[j] + at[j]) / unit)
            self.forward_rows[j].SetBounds(-infinity, (budget - forward_peak[j] + forward[j]) / unit)

    def plans(self, budget: float, start: Judged | None = None, rounds: int = ROUNDS) -> list[Judged]:
        """Decisions met on the way to a fixed point of the bases, in that order.

        Args:
            budget: bytes of peak that the model keeps to; less than what is wanted where roundings exceed it, 0 to
                have the smallest peak.
            start: the decision whose simulation gives the first bases; all that is inside segments by default.
            rounds: how often the model is solved, at most.
        """
        found: list[Judged] = []
        current = start or self.problem.judge(inside_segments(self.problem, self.cuts))
        for _ in range(rounds):
            self.set_bases(current, budget)
            if not self.model.solve():
                break
            values = {s: d.solution_value() for s, d in self.model.dropped.items()}
            rounded: dict[tuple[int, ...], Judged] = {}
            for threshold in THRESHOLDS:
                judged = self.problem.judge(s for s, v in values.items() if v >= threshold)
                rounded.setdefault(judged.dropped, judged)
            known = {j.dropped for j in found}
            fresh = [j for j in rounded.values() if j.dropped not in known]
            found.extend(fresh)
            if not fresh:
                break
            current = min(rounded.values(), key=lambda j: (max(0, j.peak_bytes - budget), j.seconds, j.dropped))
        return found
