"""The linear model of keep-or-compute-again, shared by the planner ("budget") and by the lower bound.

Variables, all in [0, 1]: d_s, storage s is dropped; r_i, operation i runs again; k_(s,b), storage s, of no own use to
backward any more, is kept for operations that are replayed at stage b.

Rows: d_s <= r_i for what makes s, writes into it or fills its slots that are read; r_p >= r_i + d_s - 1 for a mere look
p by which i reads s (`Schedule.recompute_seconds` counts it); k_(s,b) >= r_i - d_s for every i that reads s;
k_(s,b) + r_p >= r_i where p makes s and s has no slots: what is read is kept or computed again; r_i <= d_s where i can
only run again if s does. The replay that fills a slot of s lasts until s's last step, so r_(i,b) >= d_s, "i runs again
in a replay that lasts until stage b", with the same rows for what i reads.

*Stages* number the moments of backward from the last (0) to the first; what is needed at stage b is live at every
stage >= b. `kept[j]` is the running sum of kept bytes at stage j, one variable each, so that memory rows stay sparse.
Bytes are scaled to shares of the budget and seconds to shares of forward, which is what the simplex method likes.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from ortools.linear_solver import pywraplp

from ..facts import facts_of
from ..problem import Problem
from .tables import tables_of

GAP = 1e-3
WHOLE = 0.01  # what the model drops to within this of nothing or all is taken as whole


class Relaxation:
    """The model without any memory row.

    Args:
        problem: what is decided.
        stages: how many stages there are.
        own_stage: for each storage, the stage of the last step that reads its slots; -1 if it has none.
        use_stage: the stage until which a replayed operation surely needs what it reads.
        may_drop: storages that are free to be dropped; the others are kept.
        nodes: with any, each d_s is 0 or 1, and branch and bound (SCIP) looks at so many nodes at most; else the
            simplex method solves the program.
    """

    def __init__(
        self,
        problem: Problem,
        stages: int,
        own_stage: tuple[int, ...],
        use_stage: Callable[[int], int],
        may_drop: tuple[int, ...],
        *,
        nodes: int = 0,
    ) -> None:
        self.problem, self.stages = problem, stages
        self.own_stage, self.use_stage = own_stage, use_stage
        self.solver = pywraplp.Solver.CreateSolver("SCIP" if nodes else "GLOP")
        if nodes:
            # Counted work ends the search, not the clock, so that every machine finds the same plan.
            self.solver.SetSolverSpecificParametersAsString(f"limits/nodes = {nodes}\nlimits/gap = {GAP}")
        self.byte_unit = float(max(1, problem.budget_bytes))
        self.second_unit = max(1e-12, math.fsum(problem.cost))
        self.dropped = {s: self.solver.Var(0.0, 1.0, bool(nodes), "") for s in may_drop}
        self.again: dict[int, pywraplp.Variable] = {}
        # What each stage adds to the running sum of kept bytes: (variable or None for a constant, bytes).
        self._terms: list[list[tuple[pywraplp.Variable | None, int]]] = [[] for _ in range(stages)]
        self._add_makers()
        self._add_reads()
        self.lasting = self._add_lasting()
        for s in range(len(problem.made)):
            self._add_kept(s)
        self._add_sums()
        objective = self.solver.Objective()
        for i, var in self.again.items():
            objective.SetCoefficient(var, problem.cost[i] / self.second_unit)
        objective.SetMinimization()

    def row(self, low: float, high: float, *terms: tuple[pywraplp.Variable, float]) -> pywraplp.Constraint:
        """Adds low <= sum of coefficient times variable <= high."""
        constraint = self.solver.Constraint(low, high)
        for var, coefficient in terms:
            constraint.SetCoefficient(var, coefficient)
        return constraint

    def _op(self, i: int) -> pywraplp.Variable:
        if i not in self.again:
            self.again[i] = self.solver.NumVar(0.0, 1.0, "")
        return self.again[i]

    def _add_makers(self) -> None:
        p = self.problem
        for s, d in self.dropped.items():
            read = [x for x in p.slots_of[s] if p.profile.slots[x].step >= 0]
            makers = {p.profile.storages[s].birth, *p.touching.get(s, ()), *(p.seed[x] for x in read)}
            # Nothing is ever replayed for slots that backward does not read.
            for i in sorted(makers) if read or not p.slots_of[s] else ():
                self.row(0.0, 1.0, (self._op(i), 1.0), (d, -1.0))
            # What fills those may run again with others, and what looks into two storages may tie the groups of both.
            for i in sorted(makers.union(p.touched[s], (p.seed[x] for x in p.slots_of[s]))):
                if len(meets := tables_of(p).meets[i]) > 1 and not self.dropped.keys().isdisjoint({*meets} - {s}):
                    self._op(i)

    def _add_reads(self) -> None:
        """A look by which an operation reads a dropped storage is made again; these join the list meanwhile."""
        ops, todo, seen = self.problem.profile.ops, sorted(self.again, reverse=True), set(self.again)
        look_of = facts_of(self.problem.profile).look_of
        while todo:
            i = todo.pop()
            r = self._op(i)
            for s in self.problem.needs_dropped[i]:
                if s in self.dropped:
                    self.row(0.0, 1.0, (self.dropped[s], 1.0), (r, -1.0))
                else:
                    r.SetUb(0.0)
            for s, producer in sorted({(read.storage, read.producer) for read in ops[i].reads}):
                if s not in self.dropped or look_of.get(producer) != s:
                    continue
                self.row(-1.0, 2.0, (self._op(producer), 1.0), (r, -1.0), (self.dropped[s], -1.0))
                if producer not in seen:
                    seen.add(producer)
                    todo.append(producer)

    def _add_lasting(self) -> dict[int, list[tuple[int, pywraplp.Variable]]]:
        """For each operation, the stages until which its replay lasts because of its own slots or its readers'.

        Followed through values without slots only: the others have stages of their own.
        """
        p, found = self.problem, dict[tuple[int, int], pywraplp.Variable]()
        todo: list[tuple[int, int]] = []

        def lasts(i: int, b: int) -> pywraplp.Variable:
            if (i, b) not in found:
                found[i, b] = self.solver.NumVar(0.0, 1.0, "")
                self.row(0.0, 1.0, (self._op(i), 1.0), (found[i, b], -1.0))
                todo.append((i, b))
            return found[i, b]

        for s, d in self.dropped.items():
            if not any(p.profile.slots[x].step >= 0 for x in p.slots_of[s]):
                continue  # no replay is for it
            for i in sorted({p.seed[x] for x in p.slots_of[s]}):
                if self.own_stage[s] < self.use_stage(i):
                    self.row(0.0, 1.0, (lasts(i, self.own_stage[s]), 1.0), (d, -1.0))
        while todo:
            i, b = todo.pop()
            for s in sorted({read.storage for read in p.profile.ops[i].reads}):
                maker = p.profile.storages[s].birth
                if s in self.dropped and not p.slots_of[s] and b < self.use_stage(maker):
                    self.row(-1.0, 2.0, (lasts(maker, b), 1.0), (found[i, b], -1.0), (self.dropped[s], -1.0))
        by_op: dict[int, list[tuple[int, pywraplp.Variable]]] = {}
        for (i, b), var in sorted(found.items(), key=lambda item: item[0]):
            by_op.setdefault(i, []).append((b, var))
        return by_op

    def _add_kept(self, s: int) -> None:
        p = self.problem
        if not p.made[s]:
            return
        size, own, d = p.profile.storages[s].bytes, self.own_stage[s], self.dropped.get(s)
        if p.profile.storages[s].death > len(p.profile.ops):
            self._terms[0].append((None, size))
            return
        if own >= 0:
            self._terms[own].append((None, size))
            if d is not None:
                self._terms[own].append((d, -size))
        # (what has to run again where this is kept no longer, the reader's running again) for each stage.
        uses: dict[int, list[tuple[pywraplp.Variable | None, pywraplp.Variable]]] = {}
        maker = p.profile.storages[s].birth
        for i in p.readers[s]:
            if i not in self.again:
                continue
            again = self.again.get(maker) if d is not None and own < 0 else None
            if own < 0 or self.use_stage(i) < own:
                uses.setdefault(self.use_stage(i), []).append((again, self.again[i]))
            for b, lasting in self.lasting.get(i, ()):
                if own < 0 or b < own:
                    longer = dict(self.lasting.get(maker, ())).get(b, again) if again is not None else None
                    uses.setdefault(b, []).append((longer, lasting))
        later: tuple[int, pywraplp.Variable] | None = None
        for b in sorted(uses):
            k = self.solver.NumVar(0.0, 1.0, "")
            for maker_again, reader in uses[b]:
                extra = [(d, 1.0)] if d is not None else []
                self.row(0.0, 2.0, (k, 1.0), (reader, -1.0), *extra)
                if maker_again is not None:
                    self.row(0.0, 2.0, (k, 1.0), (maker_again, 1.0), (reader, -1.0))
            self._terms[b].append((k, size))
            if later is not None:
                self.row(0.0, 1.0, (k, 1.0), (later[1], -1.0))
                self._terms[b].append((later[1], -size))
            later = (b, k)
        if later is not None and own >= 0:
            self._terms[own].append((later[1], -size))

    def _add_sums(self) -> None:
        """kept[j] = kept[j - 1] + what stage j adds."""
        infinity = self.solver.infinity()
        self.kept = [self.solver.NumVar(-infinity, infinity, "") for _ in range(self.stages)]
        for j, terms in enumerate(self._terms):
            constant = sum(size for var, size in terms if var is None) / self.byte_unit
            coefficients: dict[int, float] = {}
            by_index: dict[int, pywraplp.Variable] = {}
            for var, size in terms:
                if var is not None:
                    coefficients[var.index()] = coefficients.get(var.index(), 0.0) - size / self.byte_unit
                    by_index[var.index()] = var
            chain = [(self.kept[j], 1.0)] + ([(self.kept[j - 1], -1.0)] if j else [])
            self.row(constant, constant, *chain, *((by_index[x], c) for x, c in coefficients.items()))

    def add_groups(self) -> None:
        """Adds the cost of groups, of which there are at least as many as operations less the ties between them.

        What runs again falls into groups: operations are tied where they have a dropped storage in common. A storage
        ties all of its operations by one tie for each but its maker, e_(i,s) <= r_i, d_s.
        """
        p, infinity = self.problem, self.solver.infinity()
        if not p.profile.replay_group_seconds:
            return
        groups = self.solver.NumVar(0.0, infinity, "")
        self.solver.Objective().SetCoefficient(groups, p.profile.replay_group_seconds / self.second_unit)
        terms = [(groups, 1.0)]
        meets = tables_of(p).meets
        for i, r in self.again.items():
            terms.append((r, -1.0))
            for s in meets[i]:
                if s in self.dropped and p.profile.storages[s].birth != i:
                    tie = self.solver.NumVar(0.0, 1.0, "")
                    self.row(0.0, 1.0, (r, 1.0), (tie, -1.0))
                    self.row(0.0, 1.0, (self.dropped[s], 1.0), (tie, -1.0))
                    terms.append((tie, 1.0))
        self.row(0.0, infinity, *terms)

    def solve(self) -> bool:
        """Runs the solver; True where it found a solution: the optimum, or with integers the best within the limits."""
        status = self.solver.Solve()
        self.infeasible = status == pywraplp.Solver.INFEASIBLE
        return bool(status in (pywraplp.Solver.OPTIMAL, pywraplp.Solver.FEASIBLE))


def parts_of(problem: Problem, values: dict[int, float]) -> list[list[int]]:
    """Storages that a model drops by halves, those with operations in common together, in order of birth."""
    storages = [s for s, v in values.items() if WHOLE < v < 1 - WHOLE]
    t, number = tables_of(problem), {s: s for s in storages}

    def root(s: int) -> int:
        while number[s] != s:
            number[s] = number[number[s]]
            s = number[s]
        return s

    first: dict[int, int] = {}
    for s in storages:
        for i in t.around[s]:
            a, b = root(first.setdefault(i, s)), root(s)
            if a != b:
                number[max(a, b)] = min(a, b)
    parts: dict[int, list[int]] = {}
    for s in sorted(storages, key=lambda s: (t.birth[s], s)):
        parts.setdefault(root(s), []).append(s)
    return list(parts.values())
