"""One block of a step as a problem of its own, so that it can be decided once for all blocks of its kind."""

from __future__ import annotations

import statistics

import msgspec

from ..problem import Problem, make_problem
from ..profile import Op, Read, Slot, Step, Storage
from ..schedule import EXTERNAL
from .repeats import Block


def alone(problem: Problem, block: Block, alike: list[Block]) -> Problem:
    """The block as a problem.

    Its first operation stands for all that ran before: it makes what the block is the last to need, which can only be
    kept. What else it reads from outside is there anyway, and what others need of it is kept. The first backward step
    stands for those of later blocks, where all that is kept is live; the others are those from the first to the last
    that read what is inside, with gradients counted from the least that are live meanwhile. Storages are numbered as in
    `block.storages`.

    Args:
        problem: the whole step.
        block: a block of it, with anything inside.
        alike: all blocks of its kind; an operation takes the median of their times.
    """
    p, first, length = problem.profile, block.first, block.stop - block.first
    brought, inside = set(block.brought), set(block.inside)
    end = max(p.slots[x].step for k in inside for x in problem.slots_of[block.storages[k]])
    span = p.steps[block.begin : end + 1]
    least = min((step.live_bytes for step in span), default=0)
    steps = [Step("", -1, 0.0, 0, 0)]
    steps += [Step("", -1, 0.0, x.live_bytes - least, x.peak_bytes - least) for x in span]
    storages: list[Storage] = []
    slots: list[Slot] = []
    for k, s in enumerate(block.storages):
        storage = p.storages[s]
        birth = max(0, storage.birth - first + 1)
        death = max(birth + 1, min(storage.death - first, length) + 1)
        if k in brought or (problem.made[s] and storage.birth >= first):
            storages.append(Storage(storage.bytes, storage.kind, birth, death))
        else:
            kind = storage.kind if storage.kind in EXTERNAL else "input"
            storages.append(Storage(storage.bytes, kind, -1, length + 2))
        if k in inside or k in brought:
            for x in (p.slots[x] for x in problem.slots_of[s]):
                step = min(x.step - block.begin + 1, len(span)) if x.step >= 0 else -1
                op, producer = max(0, x.op - first + 1), max(0, x.producer - first + 1) if x.producer >= 0 else -1
                slots.append(Slot(op, x.position, k, producer, max(-1, step), x.fixed))
        elif problem.slots_of[s] and storage.birth >= first:
            slots.append(Slot(birth, 0, k, birth, -1, fixed=True))
    before = Op(
        name="", module="", place="", signature="", reads=(), makes=block.brought, hides=(), writes=(),
        output=block.brought, seconds=0.0, workspace_bytes=0, replay="never", reason="it is outside the block",
    )  # fmt: skip
    profile = msgspec.structs.replace(
        p,
        storages=tuple(storages),
        ops=(before, *(_op(problem, block, i, alike) for i in range(length))),
        slots=tuple(slots),
        steps=tuple(steps),
        parameter_bytes=0,
        buffer_bytes=0,
        input_bytes=0,
        gradient_bytes=0,
        end_live_bytes=0,
        optimizer_state_bytes=0,
        optimizer_workspace_bytes=0,
        bucket_bytes=0,
    )
    return make_problem(profile, max(1, sum(s.bytes for s in storages if s.birth >= 0)))


def _op(problem: Problem, block: Block, i: int, alike: list[Block]) -> Op:
    """The block's operation number `i`, from 0, with storages numbered and operations counted as within the block."""
    p, first = problem.profile, block.first
    op, number = p.ops[first + i], {s: k for k, s in enumerate(block.storages)}

    def of(found: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[s] for s in found)

    def read(r: Read) -> Read:
        earlier = sum(j < first for j in problem.touching.get(r.storage, ()))
        k = number[r.storage]
        known = r.producer >= first or k in block.brought
        return Read(k, max(0, r.producer - first + 1) if known and r.producer >= 0 else -1, r.version - earlier)

    return msgspec.structs.replace(
        op,
        reads=tuple(read(r) for r in op.reads),
        makes=of(op.makes),
        hides=of(op.hides),
        writes=of(op.writes),
        output=of(op.output),
        # What others need cannot be dropped; where backward does not need it, it is kept only if this block does.
        choices=tuple(number[s] for s in op.makes if number[s] not in block.inside),
        seconds=statistics.median(p.ops[other.first + i].seconds for other in alike),
    )
