"""`python -m benchmarks.plots peers|solver FILE -o OUTPUT`: pictures of what other benchmarks wrote, PNG and SVG.

`peers` draws the points that `benchmarks.peers --points FILE` added: for each model what is measured at every peer's
peak, the peers' and ours by both mechanisms. `solver` draws `benchmarks.solver --points FILE`: seconds and memory
against size. Needs the extra `[plots]`.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from pathlib import Path
from typing import Any

MB = 1e6
MARKS = "osD^vP*X<>"
OURS, THEIRS = "#2457b3", ("#b3401f", "#a0741a", "#5f8a3c", "#7a4a9c", "#444444")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("what", choices=("peers", "solver"))
    parser.add_argument("file", type=Path)
    parser.add_argument("-o", "--output", required=True, help="path without the ending")
    options = parser.parse_args()
    points = [json.loads(line) for line in options.file.read_text().splitlines()]
    figure = peers(points) if options.what == "peers" else solver(points)
    for ending in ("png", "svg"):
        figure.savefig(f"{options.output}.{ending}", dpi=110, metadata={"Date": None} if ending == "svg" else {})


def _pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams["svg.hashsalt"] = "ckpt-planner"  # the same bytes for the same points
    from matplotlib import pyplot

    return pyplot


def peers(points: list[dict[str, Any]]) -> Any:
    """A panel for each model: peak against the time above the plain step's."""
    by_model: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        by_model[point["model"]].append(point)
    kinds = list(dict.fromkeys(_kind(point["peer"]) for point in points))
    columns = min(3, len(by_model))
    rows = math.ceil(len(by_model) / columns)
    figure, grid = _pyplot().subplots(
        rows, columns, figsize=(4.2 * columns, 3.3 * rows), layout="constrained", squeeze=False
    )
    for axes, (model, found) in zip(grid.flat, by_model.items(), strict=False):
        for kind, color, mark in zip(kinds, THEIRS * len(kinds), MARKS, strict=False):
            theirs = [p for p in found if _kind(p["peer"]) == kind]
            axes.plot(
                [p["its_peak"] / MB for p in theirs],
                [100 * p["its_overhead"] for p in theirs],
                mark,
                color=color,
                linestyle="",
                label=kind,
            )
        ours = sorted((p["our_peak"], p["our_overhead"]) for p in found if math.isfinite(p["ours_to_its"]))
        axes.plot([b / MB for b, _ in ours], [100 * o for _, o in ours], "o-", color=OURS, markersize=4, label="ours")
        graph = sorted((p["our_peak"], p["graph_overhead"]) for p in found if p.get("graph_overhead") is not None)
        look = {"color": OURS, "alpha": 0.5, "markersize": 4, "label": 'ours, mechanism "graph"'}
        axes.plot([b / MB for b, _ in graph], [100 * o for _, o in graph], "s--", **look)
        axes.set(title=f"{model}, plain {found[0]['plain_peak'] / MB:.0f} MB", xlabel="peak, MB", ylabel="more time, %")
        axes.grid(alpha=0.3)
    for axes in list(grid.flat)[len(by_model) :]:
        axes.axis("off")
    grid.flat[0].legend(fontsize=8)
    return figure


def _kind(peer: str) -> str:
    return peer.split(" 0.")[0].removesuffix(" 0").removesuffix(" 1")


def solver(points: list[dict[str, Any]]) -> Any:
    """Seconds and memory of the solver against the number of operations."""
    figure, (left, right) = _pyplot().subplots(1, 2, figsize=(9, 3.6), layout="constrained")
    groups: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for point in points:
        groups[point["kind"]].append(point)
    for (kind, found), mark, color in zip(groups.items(), MARKS, (OURS, *THEIRS), strict=False):
        found.sort(key=lambda p: p["operations"])
        sizes = [p["operations"] for p in found]
        left.plot(sizes, [p["seconds"] for p in found], mark, color=color, label=kind)
        right.plot(sizes, [p["mebibytes"] for p in found], mark, color=color, label=kind)
    left.set(xscale="log", yscale="log", xlabel="operations", ylabel="solver, CPU seconds")
    right.set(xscale="log", xlabel="operations", ylabel="peak memory of the process, MiB")
    right.set_ylim(bottom=0)
    for axes in (left, right):
        axes.grid(alpha=0.3, which="both")
    left.legend(fontsize=8)
    return figure


if __name__ == "__main__":
    main()
