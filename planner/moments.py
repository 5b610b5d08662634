"""The memory of a step over its course, in as many points as can be drawn. Free of torch.

A *moment* is an operation of forward, a step of backward, or the optimizer's step; the plain and the planned step have
the same ones, so that both can be drawn over each other. A step of many moments is merged into points, each with the
highest and the lowest of its moments: no peak is lost.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import msgspec

from .decision import Decision
from .profile import Profile
from .simulate import Timeline

MOST_POINTS = 480  # a screen shows hardly more
OPTIMIZER = "the optimizer's step"


class Phase(msgspec.Struct, frozen=True):
    """One part of the step: "forward", "backward" or "optimizer".

    Attributes:
        moments: how many moments it has.
        plain_bytes, planned_bytes: the highest of them, in the plain and in the planned step.
    """

    name: str
    moments: int
    plain_bytes: int
    planned_bytes: int


class Moments(msgspec.Struct, frozen=True):
    """Live bytes over the step, with and without the plan. The lists have one entry for each point.

    Attributes:
        moments: how many there are.
        per_point: the most moments that one point stands for; 1 where none were merged.
        phases: forward, backward and optimizer, in that order.
        plain_peak_moment, planned_peak_moment: the first moment of the step's highest memory.
        plain_peak_during, planned_peak_during: what runs then.
        plain_saved_bytes, planned_saved_bytes: saved for backward when forward has ended.
        first: the first moment of each point.
        during: what runs at the point's highest planned moment.
        plain_high_bytes, plain_low_bytes, planned_high_bytes, planned_low_bytes: the most and the least bytes that are
            live at any moment of the point.
    """

    moments: int
    per_point: int
    phases: tuple[Phase, ...]
    plain_peak_moment: int
    plain_peak_during: str
    plain_saved_bytes: int
    planned_peak_moment: int
    planned_peak_during: str
    planned_saved_bytes: int
    first: tuple[int, ...]
    during: tuple[str, ...]
    plain_high_bytes: tuple[int, ...]
    plain_low_bytes: tuple[int, ...]
    planned_high_bytes: tuple[int, ...]
    planned_low_bytes: tuple[int, ...]


def moments(decision: Decision, most: int = MOST_POINTS) -> Moments:
    """The step's memory in at most about `most` points; no point holds moments of both forward and backward."""
    profile, n, m = decision.profile, len(decision.profile.ops), len(decision.profile.steps)
    plain, planned = _all(decision.plain), _all(decision.timeline)
    size = max(1, -(-(n + m + 1) // most))
    spans = list(_spans((0, n, n + m, n + m + 1), size))
    peaks = plain.index(max(plain)), planned.index(max(planned))
    cuts = (("forward", 0, n), ("backward", n, n + m), ("optimizer", n + m, n + m + 1))
    return Moments(
        moments=n + m + 1,
        per_point=max((b - a for a, b in spans), default=1),
        phases=tuple(
            Phase(name, b - a, max(plain[a:b], default=0), max(planned[a:b], default=0)) for name, a, b in cuts
        ),
        plain_peak_moment=peaks[0],
        plain_peak_during=during(profile, peaks[0]),
        plain_saved_bytes=decision.plain.saved,
        planned_peak_moment=peaks[1],
        planned_peak_during=during(profile, peaks[1]),
        planned_saved_bytes=decision.timeline.saved,
        first=tuple(a for a, _ in spans),
        during=tuple(during(profile, max(range(a, b), key=planned.__getitem__)) for a, b in spans),
        plain_high_bytes=tuple(max(plain[a:b]) for a, b in spans),
        plain_low_bytes=tuple(min(plain[a:b]) for a, b in spans),
        planned_high_bytes=tuple(max(planned[a:b]) for a, b in spans),
        planned_low_bytes=tuple(min(planned[a:b]) for a, b in spans),
    )


def during(profile: Profile, moment: int) -> str:
    """What runs at a moment: "linear in h.0.mlp", "AddmmBackward0 of h.0.mlp"."""
    n = len(profile.ops)
    if moment < n:
        op = profile.ops[moment]
        return f"{op.name} in {op.module}" if op.module else op.name
    if moment >= n + len(profile.steps):
        return OPTIMIZER
    step = profile.steps[moment - n]
    module = profile.ops[step.op].module if step.op >= 0 else ""
    return f"{step.name} of {module}" if module else step.name


def _all(timeline: Timeline) -> tuple[int, ...]:
    return (*timeline.forward, *timeline.backward, timeline.optimizer_bytes)


def _spans(cuts: tuple[int, ...], size: int) -> Iterator[tuple[int, int]]:
    for start, end in itertools.pairwise(cuts):
        yield from ((a, min(a + size, end)) for a in range(start, end, size))
