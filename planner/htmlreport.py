"""The report as one HTML page without anything outside it. Free of torch.

The page is made from the report's JSON: every number on it is looked up there by its path, and carries that path in the
page, so that one can be checked against the other. What a name holds is never taken for HTML: the templates escape what
they print, the JSON inside the page holds no character that ends a script, and no script but the page's own may run.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

import jinja2
import msgspec
from markupsafe import Markup

from . import charts
from .budget import format_bytes
from .report import MEMORY_PARTS, Report
from .report import json as as_json
from .textreport import seconds

PARTS = Path(__file__).parent / "htmlparts"
SCRIPTS = ("numbers.js", "page.js", "tree.js")
MOST_SEGMENTS = 40  # rows that are shown before the others are asked for


def render(report: Report) -> str:
    """The page, complete: styles, scripts and data are inside it, and it asks the network for nothing."""
    data = msgspec.json.decode(as_json(report))
    script = "\n".join((PARTS / name).read_text(encoding="utf-8") for name in SCRIPTS)
    page = _environment().get_template("page.html")
    return page.render(
        r=data,
        n=_numbers(data),
        timeline=_timeline(data),
        frontier=_frontier(data),
        kinds=MEMORY_PARTS,
        most_segments=MOST_SEGMENTS,
        style=Markup((PARTS / "style.css").read_text(encoding="utf-8")),
        script=Markup(script),
        policy=_policy(script),
        embedded=embedded(data),
    )


def embedded(data: Any) -> Markup:
    """`data` as JSON that can stand in a script element, whatever its strings hold."""
    text = msgspec.json.encode(data).decode()
    # "<" would let a string end the element or open a comment; the other two end a line in older scripts.
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return Markup(text)


def shown(value: float | None, form: str) -> str:
    """A number as the page shows it; the page's own script has the same rules.

    Args:
        value: the number; None is shown as a dash.
        form: "bytes", "seconds", "count", "share", or "change" (a share with its sign).
    """
    if value is None:
        return "–"  # noqa: RUF001
    if form == "bytes":
        return format_bytes(int(value))
    if form == "seconds":
        return seconds(value)
    if form == "count":
        return f"{value:,}"
    if form == "change":
        return f"{value:+.1%}" if value else "0%"
    return f"{value:.1%}"


def look_up(data: Any, path: str) -> Any:
    """What `data` holds at a path such as "alive.3.planned.activations"; "length" is a list's own."""
    for part in path.split("."):
        if isinstance(data, list) and part == "length":
            return len(data)
        data = data[int(part) if isinstance(data, list) else part]
    return data


def _numbers(data: Any) -> Any:
    def number(path: str, form: str) -> Markup:
        value = look_up(data, path)
        return Markup('<data value="{}" data-json="{}" data-form="{}">{}</data>').format(
            "" if value is None else msgspec.json.encode(value).decode(), path, form, shown(value, form)
        )

    return number


def _policy(script: str) -> str:
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src data:; "
        "base-uri 'none'; form-action 'none'"
    )


@cache
def _environment() -> jinja2.Environment:
    return jinja2.Environment(
        loader=jinja2.FileSystemLoader(PARTS, encoding="utf-8"),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _timeline(data: Any) -> dict[str, Any]:
    t, budget = data["timeline"], data["budget_bytes"]
    scale = charts.bytes_scale([*t["plain_high_bytes"], *t["planned_high_bytes"], *([budget] if budget else [])])
    # A budget far above the step would press it flat.
    tallest = max(1, *t["plain_high_bytes"], *t["planned_high_bytes"])
    fits = budget is not None and budget <= 1.5 * tallest
    if not fits:
        scale = charts.bytes_scale([tallest])
    count, first = t["moments"], t["first"]
    lines = {name: charts.outline(first, count, t[f"{name}_high_bytes"], scale) for name in ("plain", "planned")}
    edges, at = [], 0
    for index, phase in enumerate(t["phases"]):
        edges.append({"index": index, "name": phase["name"], "at": at / count, "share": phase["moments"] / count})
        at += phase["moments"]
    return {
        "lines": lines,
        "areas": {name: charts.area(line) for name, line in lines.items()},
        "bands": {
            name: charts.band(first, count, t[f"{name}_high_bytes"], t[f"{name}_low_bytes"], scale)
            for name in ("plain", "planned")
        },
        "ticks": charts.bytes_ticks(scale),
        "budget": scale.share(budget) if fits else None,
        "budget_fits": fits,
        "phases": edges,
        "peaks": {
            name: ((t[f"{name}_peak_moment"] + 0.5) / count, scale.share(max(t[f"{name}_high_bytes"])))
            for name in ("plain", "planned")
        },
    }


def _frontier(data: Any) -> dict[str, Any] | None:
    if data["frontier"] is None:
        return None
    # What is computed again, for the plan too: its own overhead may hold more.
    step = data["baseline_step_seconds"] or 1.0
    points = [(p["peak_bytes"], p["recompute_seconds"] / step) for p in data["frontier"]["points"]]
    chosen = data["peak_bytes"], data["recompute_seconds"] / step
    sizes = [x for x, _ in (*points, chosen)] + [data["baseline_peak_bytes"]]
    across = charts.around(sizes, max(1.0, max(sizes) * 0.02))
    up = charts.Scale(0.0, max(0.01, *(y for _, y in (*points, chosen))) * charts.HEADROOM)
    budget = data["budget_bytes"]
    return {
        "line": charts.steps(points, across, up),
        "points": [(across.share(x), up.share(y)) for x, y in points],
        "chosen": (across.share(chosen[0]), up.share(chosen[1])),
        "across": charts.bytes_ticks(across),
        "up": charts.share_ticks(up),
        "budget": across.share(budget) if budget is not None and across.low <= budget <= across.high else None,
    }
