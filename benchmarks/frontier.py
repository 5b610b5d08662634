"""`python -m benchmarks.frontier FILE[:NAME] -o frontier`: the frontier of a model as a picture, PNG and SVG.

With `--strategies`, the points of "sqrt" and "all" are drawn beside it, as predicted from the same profile. Needs the
extra `[plots]`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from ckpt_planner import optimize, userfile
from ckpt_planner.decision import Decision
from ckpt_planner.solve import make_problem, solve

MIB = 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", metavar="FILE[:NAME]")
    parser.add_argument("--points", type=int, default=16)
    parser.add_argument("--strategies", action="store_true", help='draw "sqrt" and "all", too')
    parser.add_argument("-o", "--output", default="frontier", help="path without the ending")
    options = parser.parse_args()
    path, name = userfile.split(options.target)
    subject = userfile.load(path, name)
    subject.model.train()
    plan = optimize(subject.model, 1 << 60, subject.args, subject.kwargs, subject.loss_fn)
    curve = plan.frontier(options.points)
    beside = others(plan.profile) if options.strategies else {}
    draw(plan.profile.model, curve.points, curve.knee, beside, options.output)


def others(profile: object) -> dict[str, tuple[float, float]]:
    """Peak in MiB and overhead in percent of the strategies that follow a rule."""
    found = {}
    for strategy in ("sqrt", "all"):
        solution = solve(make_problem(profile, 1 << 60), strategy)  # type: ignore[arg-type]
        decision = Decision(profile, solution, 1 << 60, strategy)  # type: ignore[arg-type]
        found[strategy] = (decision.timeline.peak_bytes / MIB, 100 * decision.overhead)
    return found


def draw(title: str, points: tuple, knee: int, beside: dict[str, tuple[float, float]], output: str) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout="constrained")
    peaks = [p.peak_bytes / MIB for p in points]
    costs = [100 * p.overhead for p in points]
    axes.plot(peaks, costs, marker="o", color="#2457b3", label="budget")
    axes.plot(peaks[knee], costs[knee], marker="o", markersize=11, fillstyle="none", color="#b3401f", label="knee")
    for (strategy, (peak, cost)), marker in zip(beside.items(), "s^", strict=False):
        axes.plot(peak, cost, marker=marker, linestyle="", color="#555555", label=strategy)
    axes.set(xlabel="peak of a training step, MiB (predicted)", ylabel="more time, % of the plain step", title=title)
    axes.grid(alpha=0.3)
    axes.legend()
    for ending in ("png", "svg"):
        figure.savefig(Path(f"{output}.{ending}"), dpi=110)


if __name__ == "__main__":
    main()
