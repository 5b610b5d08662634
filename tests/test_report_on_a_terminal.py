"""The text where it is looked at: bars and colours on a terminal, nothing of the kind elsewhere."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import msgspec
import pages
import plans
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

import ckpt_planner
from ckpt_planner import cli, report, terminal, timechart
from ckpt_planner.budget import format_bytes
from ckpt_planner.errors import CkptPlannerError, InfeasibleBudgetError

ESCAPE = re.compile(r"\x1b\[[0-9;]*m")
BLOCKS = set(timechart.EIGHTHS.strip())


class Terminal(io.TextIOWrapper):
    """A stream that says it is one."""

    def __init__(self, encoding: str = "utf-8") -> None:
        super().__init__(io.BytesIO(), encoding=encoding)

    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def plain_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setenv("TERM", "xterm")


@given(width=st.integers(20, 200), layers=st.integers(1, 4), budget=st.one_of(st.none(), st.integers(0, 10**7)))
def test_the_chart_fits_and_its_highest_column_is_the_peak(width: int, layers: int, budget: int | None) -> None:
    made = pages.described(pages.decision(layers))
    lines = timechart.chart(made.timeline, budget, width, "31")
    plain = [ESCAPE.sub("", line) for line in lines]
    assert plain == timechart.chart(made.timeline, budget, width)
    if not lines:
        assert width < 60
        return
    assert max(map(len, plain)) <= width
    rows = timechart.ROWS
    assert len(lines) == 2 * rows + 1
    assert "█" in plain[0]
    assert plain[0].endswith(format_bytes(made.baseline_peak_bytes))
    assert plain[rows].endswith(format_bytes(made.peak_bytes))
    assert any("\x1b[31m" in line for line in lines) == (budget is not None and budget < made.baseline_peak_bytes)


def test_every_column_is_as_high_as_its_highest_moment() -> None:
    timeline = pages.described(pages.decision(2)).timeline
    width = timeline.moments + 60
    room = width - 3 - len("planned ") - len(format_bytes(max(timeline.plain_high_bytes)))
    drawn = timechart.chart(timeline, None, width, rows=1)[1][10 : 10 + room]
    highest = max(timeline.plain_high_bytes)
    for column, cell in enumerate(drawn.ljust(room)):
        found = [
            value
            for first, value in zip(timeline.first, timeline.planned_high_bytes, strict=True)
            if first * room // timeline.moments <= column <= -(-(first + 1) * room // timeline.moments) - 1
        ]
        assert timechart.EIGHTHS.index(cell) == round(8 * max(found) / highest)


def test_no_chart_where_there_is_nothing_to_draw() -> None:
    empty = report.describe(plans.plan())
    assert timechart.chart(empty.timeline, None, 100) == []
    assert "Memory over the step" not in report.text(empty, 100, True, True)


def test_a_terminal_gets_bars_and_colours_and_a_pipe_neither() -> None:
    made = pages.described()
    piped = report.text(made, *terminal.look(io.StringIO()))
    assert not BLOCKS & set(piped)
    assert "\x1b" not in piped
    shown = report.text(made, *terminal.look(Terminal()))
    assert BLOCKS & set(shown)
    assert "\x1b[1m" in shown
    assert set(piped.splitlines()) <= set(ESCAPE.sub("", shown).splitlines())


def test_colours_are_off_where_they_are_not_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal.look(Terminal()).color
    monkeypatch.setenv("NO_COLOR", "1")
    assert terminal.look(Terminal())[1:] == (False, True)
    monkeypatch.delenv("NO_COLOR")
    monkeypatch.setenv("TERM", "dumb")
    assert not terminal.look(Terminal()).color


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "cp1252"])
def test_no_bars_where_the_terminal_cannot_write_them(encoding: str) -> None:
    assert not terminal.look(Terminal(encoding)).bars


@pytest.mark.parametrize(("columns", "width"), [("80", 80), ("300", terminal.WIDEST)])
def test_the_text_is_as_wide_as_the_terminal_up_to_what_is_read(
    monkeypatch: pytest.MonkeyPatch, columns: str, width: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert terminal.look(Terminal()).width == width
    lines = ESCAPE.sub("", report.text(pages.described(), *terminal.look(Terminal()))).splitlines()
    assert max(map(len, lines)) <= width


def test_names_do_not_drive_the_terminal() -> None:
    made = pages.described(pages.hostile())
    for color in (False, True):
        text = ESCAPE.sub("", report.text(made, 100, color, True))
        assert all(c.isprintable() for c in text.replace("\n", ""))
        assert "\\x1b[2J" in text
        assert "\\u202e" in text


def refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, error: CkptPlannerError, *arguments: str) -> str:
    def optimize(*args: object, **options: object) -> None:
        raise error

    monkeypatch.setattr(ckpt_planner, "optimize", optimize, raising=False)
    (tmp_path / "net.py").write_text("import torch\nmodel = torch.nn.Linear(3, 3)\nexample_inputs = torch.ones(2, 3)\n")
    result = CliRunner().invoke(cli.main, ["report", str(tmp_path / "net.py"), *arguments])
    assert (result.exit_code, result.stdout) == (error.exit_code, "")
    return result.stderr


def test_a_budget_that_cannot_be_kept_names_the_options_that_can(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    error = InfeasibleBudgetError("needs more", budget_bytes=1, minimum_bytes=12345)
    said = refused(monkeypatch, tmp_path, error, "--budget", "1")
    assert said.splitlines() == ["Error: needs more", "  Can be kept: --strategy budget --budget 12345"]


def test_a_report_of_an_earlier_run_is_not_taken_for_this_ones(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    target = tmp_path / "report.html"
    error = CkptPlannerError("no plan")
    arguments = ("--format", "html", "-o", str(target))
    assert "earlier run" not in refused(monkeypatch, tmp_path, error, *arguments)
    assert not target.exists()
    target.write_text("old")
    assert f"{target} is from an earlier run" in refused(monkeypatch, tmp_path, error, *arguments)
    assert target.read_text() == "old"


def test_an_error_on_a_terminal_is_wrapped_and_code_in_it_is_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stream = Terminal()
    monkeypatch.setattr("sys.stderr", stream)
    monkeypatch.setenv("COLUMNS", "60")
    terminal.say_error("word " * 30 + "\n    code = (1,   2)\n           ^^^^")
    stream.flush()
    said = stream.buffer.getvalue().decode()  # type: ignore[attr-defined]
    assert "\x1b[31m" in said
    lines = ESCAPE.sub("", said).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-2:] == ["    code = (1,   2)", "           ^^^^"]


def test_a_page_is_not_poured_into_a_terminal(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "net.py").write_text("model = None\n")
    monkeypatch.setattr(cli, "sys", _Sys())
    result = CliRunner().invoke(cli.main, ["report", str(tmp_path / "net.py"), "--format", "html"])
    assert result.exit_code == 2
    assert "name a file" in result.stderr


class _Sys:
    """`sys` where stdout is a terminal."""

    def __init__(self) -> None:
        self.stderr, self.stdout = sys.stderr, Terminal()


def test_a_report_without_optional_parts_is_shown() -> None:
    made = pages.described(pages.decision(strategy="none"))
    bare = msgspec.structs.replace(made, budget_bytes=None, headroom_bytes=None)
    assert "no budget" in report.text(bare, 100, True, True)
