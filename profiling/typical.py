"""One figure from many measurements of the same work."""

from __future__ import annotations

import msgspec

from ckpt_planner.profile import Op, Step


def typical(seconds: list[float]) -> float:
    """The median, or the least of two: the first run of a kernel in a process is often far slower."""
    ordered = sorted(seconds)
    return ordered[0] if len(ordered) <= 2 else ordered[len(ordered) // 2]


def steadied(steps: list[Step], ops: tuple[Op, ...]) -> list[Step]:
    """Each step's time made that of its kind: one disturbed measurement among many of the same work is no figure."""

    def kind(step: Step) -> tuple[str, str, int]:
        return step.name, ops[step.op].signature if step.op >= 0 else "", step.gradient_bytes

    samples: dict[tuple[str, str, int], list[float]] = {}
    for step in steps:
        samples.setdefault(kind(step), []).append(step.seconds)
    return [msgspec.structs.replace(step, seconds=typical(samples[kind(step)])) for step in steps]
