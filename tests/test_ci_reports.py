"""Checks as text, JSON, Markdown and GitHub's annotations: the same facts, and nothing that a name can break."""

from __future__ import annotations

import json
import re
from pathlib import Path

import msgspec
import pytest
from ci_repo import ckpt_plan

from ckpt_planner import checkreport, cli_ci
from ckpt_planner.config import Tolerance
from ckpt_planner.lockfile import Locked, LockedSegment
from ckpt_planner.moved import ModuleChange, moved_segments
from ckpt_planner.regress import Check, Figures, Finding, Moved, judge, moved

HOSTILE = "a|b`c<script>\n::error::x%0A,y:z"


def segment(module: str, freed: int = 100, us: int = 10, operations: tuple[str, ...] = ("linear",)) -> LockedSegment:
    return LockedSegment((module,), operations, freed, 50, us)


def figures(**changes: float) -> Figures:
    return msgspec.structs.replace(Figures(1_000_000, 2_000_000, 1_100_000, 10_000, 0, 100_000, 0.1), **changes)


def plan(*segments: LockedSegment, inputs: str = "(float32[2],)", **changes: float) -> Locked:
    f = figures(**changes)
    return Locked(
        2, "", "m.py", "Net", inputs, "1MB", f.budget_bytes, 0, "budget", None, None, f.peak_bytes,
        f.baseline_peak_bytes, f.baseline_step_us, f.recompute_us, f.follow_us, f.overhead, {}, segments, "", "", {},
    )  # fmt: skip


def verdict(old: Locked, new: Locked, tolerance: Tolerance | None = None) -> tuple[str, list[str]]:
    status, findings = judge(old, new, moved(old, new, None, None), tolerance or Tolerance())
    return status, [f.kind for f in findings if not f.allowed]


def test_what_counts_as_worse() -> None:
    a, b = segment("a"), segment("b")
    old = plan(a)
    assert verdict(old, plan(a)) == ("unchanged", [])
    assert verdict(old, plan(a, peak_bytes=1_010_000)) == ("moved", [])
    assert verdict(old, plan(a, peak_bytes=1_010_001)) == ("failed", ["peak"])
    assert verdict(old, plan(a, peak_bytes=1_050_000), Tolerance(peak=0.05)) == ("moved", [])
    assert verdict(old, plan(a, peak_bytes=1_100_001)) == ("failed", ["budget", "peak"])
    assert verdict(old, plan(a, recompute_us=12_100, overhead=0.121)) == ("failed", ["overhead"])
    assert verdict(old, plan(a, recompute_us=12_000, overhead=0.12)) == ("moved", [])
    assert verdict(old, plan(a, baseline_step_us=50_000, overhead=0.2)) == ("moved", []), "the model got faster"
    assert verdict(old, plan(b)) == ("failed", ["segments"])
    assert verdict(old, plan(segment("a", operations=("gelu",)))) == ("failed", ["segments"])
    assert verdict(old, plan(segment("a", freed=120))) == ("moved", [])
    assert verdict(old, plan(a, inputs="(float32[3],)")) == ("failed", ["inputs"])
    allow = Tolerance(allow=("peak", "segments", "inputs"))
    assert verdict(old, plan(b, peak_bytes=1_050_000, inputs="x"), allow) == ("moved", [])


def test_what_counts_as_better() -> None:
    a, b = segment("a"), segment("b")
    old = plan(a, b)
    assert verdict(old, plan(recompute_us=0, overhead=0.0)) == ("improved", []), "segments went"
    assert verdict(old, plan(a, segment("c"), recompute_us=9_000, overhead=0.09)) == ("improved", [])
    assert verdict(old, plan(a, b, peak_bytes=900_000)) == ("improved", [])
    assert verdict(old, plan(a, b, peak_bytes=999_999)) == ("moved", []), "hardly"
    traded = {"recompute_us": 9_000, "overhead": 0.09, "peak_bytes": 1_005_000}
    assert verdict(old, plan(a, **traded)) == ("failed", ["segments"]), "time bought with memory"
    smaller = {**traded, "baseline_peak_bytes": 1_900_000}
    assert verdict(old, plan(a, **smaller)) == ("improved", [])


def test_segments_are_told_apart_by_modules_and_operations() -> None:
    old = [segment("a"), segment("a"), segment("b"), segment("c")]
    new = [segment("a"), segment("b", operations=("gelu",)), segment("c", freed=120), segment("d")]
    changes = {(c.kind, c.modules, c.same_operations) for c in moved_segments(old, new)}
    assert changes == {
        ("went", ("a",), False),
        ("changed", ("b",), False),
        ("changed", ("c",), True),
        ("came", ("d",), False),
    }
    assert moved_segments(old, list(old)) == ()


def hostile(status: str = "failed", plan_name: str = "plans/a.json") -> Check:
    old, new = [segment(HOSTILE), segment("h.0.mlp"), segment("h.1.mlp")], [segment("h.2.mlp", us=900)]
    return Check(
        plan=plan_name, model=f"{HOSTILE}.py", status=status,  # type: ignore[arg-type]
        findings=(Finding("peak", f"the peak of {HOSTILE} grew"),),
        before=figures(), after=figures(peak_bytes=1_200_000), segments=moved_segments(old, new),
        modules=tuple(ModuleChange(f"h.{i}.{HOSTILE}", 0, 4096, 0, 0, 1, 1) for i in range(30)),
        estimated=(HOSTILE,), notes=("a note",), exit_code=1, place="model.py:12", file="src/model.py",
        accept="ckpt-plan check --update plans/a.json",
    )  # fmt: skip


def test_ten_lines_at_most_with_what_matters() -> None:
    many = msgspec.structs.replace(
        hostile(), modules=tuple(ModuleChange(f"m{i}", 0, 10**6 - i, 0, 0, 1, 1) for i in range(50)),
        segments=moved_segments([], [segment(f"m{i}", freed=i) for i in range(50)]),
    )  # fmt: skip
    lines = checkreport.lines(many)
    assert len(lines) == 10
    assert lines[0] == "plans/a.json: FAILED"
    assert lines[1].startswith("  The peak of ")
    assert "+200,000 B" in lines[2]
    assert any("module m0: +1,000,000 B saved for backward" in line for line in lines)
    assert any("more kinds of segments" in line for line in lines)
    assert lines[-1] == "  To accept it: ckpt-plan check --update plans/a.json"


def test_alike_changes_share_a_line() -> None:
    assert checkreport.module_lines([ModuleChange(f"h.{i}.mlp", 0, 4096, 0, 8, 1, 1) for i in range(12)]) == [
        "module h.{0…11}.mlp: +4,096 B saved for backward each (0 B → 4.00 KiB), +8 B of parameters each (0 B → 8 B)"
    ]
    old = [segment(f"h.{i}.mlp", freed=1024) for i in range(3)]
    assert checkreport.segment_lines(moved_segments(old, [])) == [
        "3 segments h.{0…2}.mlp: went, freed 3.00 KiB for 30 µs"
    ]
    grown = [segment(f"h.{i}.mlp", freed=2048, us=15) for i in range(3)]
    assert checkreport.segment_lines(moved_segments(old, grown)) == [
        "3 segments h.{0…2}.mlp: grew, frees 3.00 KiB → 6.00 KiB (+3,072 B) for 30 µs → 45 µs"
    ]


def test_json_has_every_attribute() -> None:
    data = json.loads(checkreport.json([hostile()]))
    assert msgspec.convert(data, list[Check]) == [hostile()]


def test_annotations_are_one_a_plan_with_file_and_line_and_nothing_breaks_them() -> None:
    (line,) = checkreport.github([hostile(), msgspec.structs.replace(hostile(), status="unchanged")])
    assert line.startswith("::error file=src/model.py,line=12,title=plans/a.json%3A FAILED::The peak of ")
    assert "\n" not in line
    assert "%250A" in line, "a percent sign of a name is none of a command"
    assert line.count("%0A") >= 5
    improved = checkreport.github([hostile("improved")])
    assert improved[0].startswith("::notice ")


def test_ten_annotations_at_most_failures_first() -> None:
    checks = [hostile("improved", f"p{i}.json") for i in range(6)] + [hostile("failed", f"q{i}.json") for i in range(8)]
    found = checkreport.github(checks)
    assert len(found) == 10
    assert [line.split(" ")[0] for line in found[:8]] == ["::error"] * 8
    assert "5 more plans" in found[-1]


def test_markdown_cannot_be_broken_by_a_name() -> None:
    page = checkreport.markdown([hostile(plan_name=f"plans/{HOSTILE}.json")])
    assert "| computed again |" in page
    rows = [line for line in page.splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert all(row.count("|") == 6 for row in rows)
    # What is left without code spans (a run of backticks, up to the next run of the same length) is ours.
    left = re.sub(r"(?<!`)(`+)(?!`)(.*?)(?<!`)\1(?!`)", "", page)
    assert "<script>" in page
    assert not {"<", "`"} & set(left)


def test_a_long_summary_is_cut_below_what_github_takes() -> None:
    page = checkreport.markdown([hostile(plan_name=f"p{i}" + "x" * 500) for i in range(1500)])
    assert len(page.encode()) < 2**20
    assert page.endswith("The rest is cut off.\n")


def test_in_actions_the_summary_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "summary.md"
    page.write_text("before\n")
    monkeypatch.setenv("GITHUB_STEP_SUMMARY", str(page))
    monkeypatch.chdir(tmp_path)
    result = ckpt_plan("check", "nowhere.json", "--format", "github")
    assert result.exit_code == 2
    assert result.stdout.startswith("::error file=")
    assert page.read_text().startswith("before\n## Plans of activation checkpointing")
    cli_ci._append_summary("more\n")
    assert page.read_text().endswith("more\n")


def test_a_difference_in_words_and_numbers() -> None:
    both = Moved(
        figures(), figures(recompute_us=30_000, overhead=0.3, peak_bytes=900_000),
        moved_segments([segment("a")], [segment("a"), segment("b", us=20_000)]), (),
    )  # fmt: skip
    text = checkreport.shown_difference(both, ("old", "new"), "text")
    assert text.splitlines()[0] == "new takes 20.0 ms more a step than old, and its peak is 878.91 KiB (-100,000 B)."
    assert "segment b: came, frees 100 B for 20.0 ms" in text
    assert "10.0% → 30.0%" in text
    assert checkreport.shown_difference(both, ("old", "new"), "markdown").startswith("## `new takes 20.0 ms more")
    assert checkreport.shown_difference(both, ("old", "new"), "github").startswith("::notice file=new::new takes")
    assert json.loads(checkreport.shown_difference(both, ("old", "new"), "json"))["after"]["recompute_us"] == 30_000
