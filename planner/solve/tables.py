"""What a `State` looks up of a problem, prepared once: lists by operation and by storage, without external storages."""

from __future__ import annotations

from itertools import chain
from typing import Any

import numpy as np

from ..problem import Problem


class Tables:
    """Facts of one profile in the shape that changing a decision step by step needs.

    Attributes:
        n, m: how many operations and steps there are.
        size, birth, death, made, hidden, last_step, droppable: by storage.
        seeds: operations that fill a storage's slots.
        around: operations that fill it, touch it or read it.
        touching: operations that write into it in place.
        reads: (storage, producer) of what an operation reads that is made during the step.
        output, makes, hides, needs: storages of an operation, as in the profile; `needs` must be dropped if it runs
            again.
        touched_output: those of `output` that operations write into in place.
        meets: storages that tie an operation to others of its group.
        read_of: storages that it reads, without those that exist before the step.
        meets_at: `meets` as a dictionary, with the operation as the value of each.
        fills: (storage, first step, the first slot that it reads, last step, whether one is never read) of the slots
            that it fills; -1 for no step.
        cost, workspace, random, extra: by operation; `extra` are the bytes noted in forward if it runs again.
        composer: the blocks with their options, once they have been looked for.
    """

    def __init__(self, problem: Problem) -> None:
        self.composer: Any = None
        p, ops, storages = problem.profile, problem.profile.ops, problem.profile.storages
        self.n, self.m = len(ops), len(p.steps)
        self.size = [s.bytes for s in storages]
        self.birth = [s.birth for s in storages]
        self.death = [s.death for s in storages]
        self.made = problem.made
        self.hidden = [s.kind == "hidden" for s in storages]
        self.last_step = problem.last_step
        self.droppable = problem.droppable
        self.seeds = [tuple(dict.fromkeys(problem.seed[x] for x in slots)) for slots in problem.slots_of]
        self.touching = [problem.touching.get(s, ()) for s in range(len(storages))]
        self.around = [
            tuple(dict.fromkeys((*self.seeds[s], *problem.touched[s], *problem.readers[s])))
            for s in range(len(storages))
        ]
        self.reads = [
            tuple(dict.fromkeys((r.storage, r.producer) for r in op.reads if self.made[r.storage])) for op in ops
        ]
        self.output = [tuple(s for s in dict.fromkeys(op.output) if self.made[s]) for op in ops]
        self.touched_output = [tuple(s for s in output if self.touching[s]) for output in self.output]
        self.makes = [op.makes for op in ops]
        self.hides = [op.hides for op in ops]
        self.needs = problem.needs_dropped
        self.meets = [
            tuple(
                s
                for s in dict.fromkeys(chain((r.storage for r in op.reads), op.makes, op.output, op.writes))
                if self.made[s]
            )
            for op in ops
        ]
        self.read_of = [frozenset(s for s, _ in reads) for reads in self.reads]
        self.meets_at = [dict.fromkeys(met, i) for i, met in enumerate(self.meets)]
        filled: list[dict[int, list[tuple[int, int]]]] = [{} for _ in ops]
        for x, slot in enumerate(p.slots):
            if problem.seed[x] >= 0:
                filled[problem.seed[x]].setdefault(slot.storage, []).append((slot.step, x))
        self.fills = [tuple(_filled(s, steps) for s, steps in slots.items()) for slots in filled]
        self.cost = problem.cost
        self.group_cost = p.replay_group_seconds
        self.rng = p.rng_state_bytes
        self.workspace = [op.workspace_bytes for op in ops]
        self.random = [op.random for op in ops]
        self.extra = [
            p.rng_state_bytes * op.random + sum(storages[op.reads[x].storage].bytes for x in op.snapshot) for op in ops
        ]
        self.resident = p.resident_bytes
        self.forward_base = np.array(self.workspace, dtype=np.int64) + p.resident_bytes
        self.step_peak = np.array([step.peak_bytes for step in p.steps], dtype=np.int64)
        self.step_live = np.array([step.live_bytes for step in p.steps], dtype=np.int64)
        held = sum(s.bytes for s, made in zip(storages, self.made, strict=True) if made and s.death > self.n)
        self.optimizer = p.resident_bytes + held + p.gradient_bytes + p.optimizer_workspace_bytes


def _filled(s: int, slots: list[tuple[int, int]]) -> tuple[int, int, int, int, bool]:
    read = sorted(slot for slot in slots if slot[0] >= 0) or [(-1, -1)]
    return s, *read[0], read[-1][0], any(step < 0 for step, _ in slots)


def tables_of(problem: Problem) -> Tables:
    """The tables of a problem, made once for all its budgets."""
    if problem.tables is None:
        problem.tables = Tables(problem)
    found: Tables = problem.tables
    return found
