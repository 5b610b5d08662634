"""Geometry of the report's charts: scales, marks on them, and the paths that are drawn. Free of torch.

Paths are drawn in a box of `WIDTH` by `HEIGHT` that the page stretches to its own size. Words are not part of it: the
page lays them over the drawing, so that they keep their size.
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

WIDTH, HEIGHT = 1000, 300
HEADROOM = 1.08  # of the scale, above the highest value


class Tick(msgspec.Struct, frozen=True):
    """A mark on a scale: where it is, as a share of the scale, and what is written there."""

    at: float
    label: str


class Scale(msgspec.Struct, frozen=True):
    """Values from `low` to `high`, drawn from 0 to 1."""

    low: float
    high: float

    def share(self, value: float) -> float:
        """Where a value is; values outside are put on the edge."""
        return min(1.0, max(0.0, (value - self.low) / (self.high - self.low))) if self.high > self.low else 0.0

    def y(self, value: float) -> float:
        """A value's height in the box, from above."""
        return round(HEIGHT * (1 - self.share(value)), 2)


def bytes_scale(values: Sequence[int]) -> Scale:
    """From zero to a little above the largest of `values`."""
    return Scale(0, max([1, *values]) * HEADROOM)


def around(values: Sequence[float], least: float) -> Scale:
    """A scale that holds `values` with a margin, at least `least` wide."""
    low, high = min(values), max(values)
    margin = max((high - low) * 0.08, (least - (high - low)) / 2)
    return Scale(low - margin, high + margin)


def bytes_ticks(scale: Scale, count: int = 4) -> list[Tick]:
    """About `count` round sizes on a scale of bytes."""
    largest = max(abs(scale.low), abs(scale.high))
    name, unit = next(((n, u) for n, u in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)) if largest >= u), ("B", 1))
    return [Tick(scale.share(v * unit), f"{v:g} {name}") for v in _round(scale.low / unit, scale.high / unit, count)]


def share_ticks(scale: Scale, count: int = 4) -> list[Tick]:
    """About `count` round shares on a scale of shares, as percentages."""
    return [Tick(scale.share(v / 100), f"{v:g}%") for v in _round(scale.low * 100, scale.high * 100, count)]


def _round(low: float, high: float, count: int) -> list[float]:
    """Multiples, within the range, of a step of 1, 2 or 5 times a power of ten."""
    raw = (high - low) / max(count, 1)
    if raw <= 0:
        return []
    power = 1.0
    while power * 10 <= raw:
        power *= 10
    while power > raw:
        power /= 10
    step = next((m * power for m in (1, 2, 5) if m * power >= raw), 10 * power)
    first = -(-low // step)
    return [round((first + i) * step, 10) for i in range(int((high - first * step) / step) + 1)]


def outline(first: Sequence[int], count: int, values: Sequence[int], scale: Scale) -> str:
    """The line over points that start at the moments `first`, of `count` moments; each is as wide as its moments."""
    edges = [round(WIDTH * at / count, 2) for at in (*first, count)]
    parts = [f"M0,{scale.y(values[0])}"]
    parts += [f"V{scale.y(value)}H{end}" for value, end in zip(values, edges[1:], strict=True)]
    return "".join(parts)


def area(line: str) -> str:
    """The area below a line that `outline` drew."""
    return f"{line}V{HEIGHT}H0Z"


def band(first: Sequence[int], count: int, high: Sequence[int], low: Sequence[int], scale: Scale) -> str:
    """The area between `low` and `high` of each point."""
    edges = [round(WIDTH * at / count, 2) for at in (*first, count)]
    boxes = [
        f"M{left},{scale.y(above)}H{right}V{scale.y(below)}H{left}Z"
        for left, right, above, below in zip(edges, edges[1:], high, low, strict=False)
        if above > below
    ]
    return "".join(boxes)


def steps(points: Sequence[tuple[float, float]], across: Scale, up: Scale) -> str:
    """The line through points that each hold until the next one begins."""
    places = [(round(WIDTH * across.share(x), 2), up.y(y)) for x, y in points]
    return f"M{places[0][0]},{places[0][1]}" + "".join(f"H{x}V{y}" for x, y in places[1:])
