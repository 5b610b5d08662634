"""The frontier: falling, from the smallest peak to the plain step's, and every point a plan that can be applied."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from profiles import layered, transformer
from torch import nn

from ckpt_planner import CkptPlannerError, Plan, optimize
from ckpt_planner.cli import main
from ckpt_planner.cli_sweep import POINTS
from ckpt_planner.frontier import POINTS as POINTS_OF_FRONTIER
from ckpt_planner.frontier import frontier, knee_of
from ckpt_planner.problem import make_problem
from ckpt_planner.profile import Profile
from ckpt_planner.regional import decide_regions
from ckpt_planner.schedule import Schedule
from ckpt_planner.simulate import simulate
from ckpt_planner.solve import SolveStatus, minimum, solve

MODEL = """
import torch
from torch import nn
print("a line of the user's own")
def block():
    return nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16))
def model():
    return nn.Sequential(*[block() for _ in range(3)])
def example_inputs():
    return torch.randn(256, 16)
def loss_fn(output):
    return output.square().mean()
"""


@pytest.mark.parametrize("profile", [transformer(2), layered(3, 25), layered(8, 40)], ids=["blocks", "graph", "other"])
def test_peaks_rise_and_times_fall_from_the_smallest_peak_to_the_plain_step(profile: Profile) -> None:
    curve = frontier(profile, 6)
    points = curve.points
    assert points[0].peak_bytes <= points[0].budget_bytes == minimum(profile).peak_bytes
    assert points[-1].solution.status is SolveStatus.NOTHING_TO_DO
    assert points[-1].peak_bytes == simulate(profile, Schedule(profile, ())).peak_bytes
    for one, next_ in pairwise(points):
        assert one.peak_bytes < next_.peak_bytes
        assert one.recompute_seconds > next_.recompute_seconds
        assert one.lower_bound_seconds >= next_.lower_bound_seconds
    for point in points:
        schedule = Schedule(profile, point.solution.dropped, point.solution.inner)
        assert simulate(profile, schedule).peak_bytes == point.peak_bytes <= point.budget_bytes
        assert schedule.recompute_seconds == point.recompute_seconds
        assert point.overhead == pytest.approx(point.recompute_seconds / profile.step_seconds)
        assert 0 <= point.lower_bound_seconds <= point.recompute_seconds


@pytest.mark.parametrize("profile", [transformer(2), layered(3, 25)], ids=["blocks", "graph"])
def test_no_point_is_dearer_than_the_plan_for_its_budget_alone(profile: Profile) -> None:
    for point in frontier(profile, 5).points:
        alone = solve(make_problem(profile, point.budget_bytes))
        assert point.recompute_seconds <= alone.recompute_seconds


def test_the_same_frontier_each_time() -> None:
    assert frontier(layered(3, 25), 4) == frontier(layered(3, 25), 4)


def test_fewer_than_two_points_are_no_frontier() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        frontier(transformer(1), 1)


def test_the_knee_is_where_the_curve_bends() -> None:
    assert knee_of([(0, 10), (1, 2), (2, 1), (3, 0)]) == 1
    assert knee_of([(0, 10), (1, 9), (2, 1), (3, 0)]) == 2
    assert knee_of([(x, 1 / x) for x in range(1, 11)]) == 2  # Satopää et al., where y' is that of the line
    assert knee_of([(5, 5)]) == 0
    assert knee_of([(0, 3), (7, 0)]) == 1


@given(
    heights=st.lists(st.integers(1, 1000), min_size=2, max_size=8, unique=True),
    units=st.tuples(st.sampled_from([1e-3, 1.0, 1e9]), st.sampled_from([1e-3, 1.0, 1e9])),
)
def test_the_knee_does_not_depend_on_units(heights: list[int], units: tuple[float, float]) -> None:
    curve = [(float(x), float(y)) for x, y in enumerate(sorted(heights, reverse=True))]
    assert knee_of([(x * units[0], y * units[1]) for x, y in curve]) == knee_of(curve)


def chain() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)) for _ in range(3)))


def gradients(model: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


def test_every_point_is_a_plan_that_trains_and_keeps_its_budget(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(512, 16)
    plan = optimize(model, "100%", (x,), loss_fn=lambda y: y.square().mean())
    curve = plan.frontier(5)
    expected = gradients(model, x)
    assert len(curve.points) > 2
    for point in curve.points:
        at = plan.at(point)
        assert (at.peak_bytes, at.budget_bytes, at.gap) == (point.peak_bytes, point.budget_bytes, point.gap)
        assert at.overhead == pytest.approx(point.overhead)
        assert bool(at.segments) == bool(point.recompute_seconds)
        assert all(torch.equal(a, b) for a, b in zip(gradients(at.model, x), expected, strict=True))
        assert at.measure().peak_bytes <= point.budget_bytes + 4096
    assert plan.segments == ()  # which is as it was


def test_a_point_of_a_loaded_plan_can_be_saved_and_applied(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(512, 16)
    optimize(model, "100%", (x,), loss_fn=lambda y: y.square().mean()).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json")
    loaded.at(loaded.frontier(3).points[0]).save(tmp_path / "tight.json")
    tight = Plan.load(tmp_path / "tight.json")
    assert tight.segments
    assert all(torch.equal(a, b) for a, b in zip(gradients(tight.apply(model), x), gradients(model, x), strict=True))


def test_sweep_prints_the_frontier_and_marks_the_knee(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    shown = CliRunner().invoke(main, ["sweep", str(path), "--points", "5"])
    assert shown.exit_code == 0, shown.stderr
    assert "a line of the user's own" in shown.stderr
    lines = shown.stdout.splitlines()
    assert sum("<- knee" in line for line in lines) == 1
    assert any("100.0%" in line and "+0.0%" in line for line in lines)
    written = CliRunner().invoke(main, ["sweep", str(path), "--points", "5", "--format", "json", "-o", f"{path}.json"])
    assert (written.exit_code, written.stdout) == (0, "")
    data = json.loads(Path(f"{path}.json").read_text())
    assert data["points"][-1]["peak_bytes"] == data["baseline_peak_bytes"]
    assert set(data["points"][data["knee"]]) >= {"budget_bytes", "peak_bytes", "overhead", "gap", "solution"}


def test_sweep_refuses_what_it_cannot_do(tmp_path: Path) -> None:
    (tmp_path / "empty.py").write_text("")
    assert CliRunner().invoke(main, ["sweep", str(tmp_path / "empty.py")]).exit_code == 2
    assert CliRunner().invoke(main, ["sweep", str(tmp_path / "empty.py"), "--points", "1"]).exit_code == 2
    assert CliRunner().invoke(main, ["sweep", str(tmp_path / "empty.py"), "-o", "/nowhere/at/all"]).exit_code == 2


def test_the_command_offers_as_many_points_as_the_library() -> None:
    assert POINTS == POINTS_OF_FRONTIER


def test_points_of_regions_are_plans_of_torch_checkpoint() -> None:
    model, x = chain(), torch.randn(512, 16)
    plan = optimize(model, "100%", (x,), loss_fn=lambda y: y.square().mean(), mechanism="torch")
    curve, expected = plan.frontier(5), gradients(model, x)
    assert len(curve.points) > 2 and curve.points[-1].peak_bytes == plan.baseline_peak_bytes
    for one, next_ in pairwise(curve.points):
        assert one.peak_bytes < next_.peak_bytes and one.recompute_seconds > next_.recompute_seconds
        assert one.lower_bound_seconds >= next_.lower_bound_seconds
    for point in curve.points:
        at = plan.at(point)
        assert (at.mechanism, at.peak_bytes, at.budget_bytes) == ("torch", point.peak_bytes, point.budget_bytes)
        assert (at.overhead, at.gap, len(at.segments)) == (point.overhead, point.gap, len(point.regions))
        assert at.peak_bytes <= point.budget_bytes
        assert all(torch.equal(a, b) for a, b in zip(gradients(at.model, x), expected, strict=True))
        real = at.measure().peak_bytes
        assert abs(real - point.peak_bytes) <= 0.02 * real
        alone = decide_regions(plan.profile, point.budget_bytes)
        assert point.recompute_seconds <= alone.solution.recompute_seconds


def test_a_loaded_plan_of_regions_needs_its_model_for_a_frontier(tmp_path: Path) -> None:
    model, x = chain(), torch.randn(512, 16)
    loss = {"loss_fn": lambda y: y.square().mean()}
    optimize(model, "100%", (x,), mechanism="torch", **loss).save(tmp_path / "plan.json")
    loaded = Plan.load(tmp_path / "plan.json", **loss)
    with pytest.raises(CkptPlannerError, match="apply it to a model first"):
        loaded.frontier(3)
    loaded.apply(model, x)
    point = loaded.frontier(3).points[0]
    loaded.at(point).save(tmp_path / "tight.json")
    tight = Plan.load(tmp_path / "tight.json")
    assert tight.mechanism == "torch" and tight.segments and tight.peak_bytes == point.peak_bytes
    assert all(torch.equal(a, b) for a, b in zip(gradients(tight.apply(model), x), gradients(model, x), strict=True))
    sliced = optimize(model, "100%", (x,), **loss)
    with pytest.raises(CkptPlannerError, match='mechanism "torch", and this plan of "slice"'):
        sliced.at(point)


def test_sweep_and_report_show_the_frontier_of_regions(tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    shown = CliRunner().invoke(main, ["sweep", str(path), "--points", "3", "--mechanism", "torch", "--format", "json"])
    assert shown.exit_code == 0, shown.stderr
    points = json.loads(shown.stdout)["points"]
    assert points[0]["mechanism"] == "torch" and points[0]["regions"]
    arguments = ["report", str(path), "--budget", "100%", "--mechanism", "torch", "--frontier", "--format", "json"]
    data = json.loads(CliRunner().invoke(main, arguments).stdout)
    assert data["mechanism"] == "torch" and len(data["frontier"]["points"]) > 2
