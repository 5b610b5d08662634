"""The page: whole, alone, with the numbers of the JSON, and with names that stay names."""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pages
import plans
import profiles
import pytest
from click.testing import CliRunner
from pages import Parsed, described, strings
from plans import MB, measurement

import ckpt_planner
from ckpt_planner import htmlreport, report
from ckpt_planner.cli import main
from ckpt_planner.decision import decide
from ckpt_planner.profile import Profile


def one_operation() -> report.Report:
    b = profiles.Builder()
    b.op("linear", "", [b.external(64, "input"), b.external(256)], 64, 1e-3)
    return described(decide(b.build(), 10**9, "none"))


def nothing_alive() -> report.Report:
    b = profiles.Builder()
    b.op("linear", "head", [b.external(0, "input")], 0, 0.0)
    return described(decide(b.build(), 10**9, "budget"))


def stand_in() -> report.Report:
    profile = profiles.transformer(1, width=16, tokens=16, vocabulary=32)
    return described(decide(msgspec.structs.replace(profile, loss="a stand-in loss: the sum"), 10**9, "none"))


def measured(**changes: Any) -> report.Report:
    return report.describe(plans.plan(), measurement(**changes), True)


CASES: dict[str, tuple[Callable[[], report.Report], str]] = {
    "planned": (described, "Segments that differ only in their numbers share a row"),
    "plain": (lambda: described(pages.decision(strategy="none")), "this is the plain step"),
    "fits": (lambda: described(pages.decision(strategy="budget")), "The plain step fits the budget as it is"),
    "one operation": (one_operation, "1 operation"),
    "no operation": (lambda: report.describe(plans.plan(segments=())), "The profile has no operations"),
    "nothing alive": (nothing_alive, "No activations are alive at the peak"),
    "stand-in": (stand_in, "Planned with a stand-in loss: the sum."),
    "no budget": (lambda: report.describe(plans.plan(budget_bytes=None, headroom_bytes=None)), "nothing was asked for"),
    "over": (lambda: report.describe(plans.plan(budget_bytes=50 * MB)), "over it:"),
    "measured": (measured, "keeps the budget"),
    "broken": (lambda: measured(peak_bytes=61 * MB), "The budget is broken."),
    "no plain step": (
        lambda: measured(baseline_peak_bytes=None, baseline_step_seconds=None),
        "The plain step did not fit on this device.",
    ),
    "different": (lambda: report.describe(plans.plan(), None, False), "Not the same step."),
    "frontier": (lambda: described(frontier=pages.frontier()), "What other budgets cost"),
    "one point": (lambda: described(frontier=pages.frontier(1)._replace(knee=0)), "What other budgets cost"),
    "hostile": (lambda: described(pages.hostile(), frontier=pages.frontier()), "window.hacked"),
    "many segments": (
        lambda: report.describe(plans.plan(segments=tuple(plans.segment(f"b{i}", freed=i) for i in range(1, 99)))),
        "The other rows, of",
    ),
}


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[report.Report, Parsed, str]:
    make, said = CASES[request.param]
    made = make()
    return made, Parsed(report.html(made)), said


def test_the_page_is_balanced_and_says_what_the_case_is(case: tuple[report.Report, Parsed, str]) -> None:
    _, page, said = case
    assert page.wrong == []
    words = " ".join("".join(page.words + [text for *_, text in page.numbers]).split())
    plain = " ".join(re.sub(r"<[^>]+>", "", "".join(page.words)).split())
    assert said in words or said in plain or said.replace("1 ", "") in plain
    ids = [e.attributes["id"] for e in page.elements if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    links = {(e.attributes["href"] or "")[1:] for e in page.elements if e.tag == "a"}
    assert links <= set(ids)


def test_every_number_is_in_the_json_and_shown_by_one_rule(case: tuple[report.Report, Parsed, str]) -> None:
    made, page, _ = case
    data = json.loads(report.json(made))
    assert len(page.numbers) > 10
    for value, path, form, text in page.numbers:
        found = htmlreport.look_up(data, path)
        assert value == ("" if found is None else msgspec.json.encode(found).decode()), path
        assert text == htmlreport.shown(found, form), path


def test_no_other_digit_is_on_the_page(case: tuple[report.Report, Parsed, str]) -> None:
    made, page, _ = case
    words = "".join(page.words)
    data = json.loads(report.json(made))
    # The page's script shows the tree, and segments are shown by their label; both have names such as "0".
    del data["tree"][1:], data["segments"]
    for text in sorted(strings(data), key=len, reverse=True):
        assert not text.isdigit()
        words = words.replace(text, "")
    assert re.findall(r".*\d.*", words) == []


def test_the_page_holds_the_json_report_unchanged(case: tuple[report.Report, Parsed, str]) -> None:
    made, page, _ = case
    assert page.embedded == json.loads(report.json(made))


def test_the_page_needs_nothing_from_outside_and_allows_nothing(case: tuple[report.Report, Parsed, str]) -> None:
    _, page, _ = case
    for tag, attributes in page.elements:
        assert tag not in {"img", "iframe", "object", "embed", "base", "form"}
        assert not any(name.startswith("on") or name in ("src", "srcset", "action") for name in attributes)
        assert (attributes.get("href") or "#").startswith(("#", "data:,"))
    parts = [path.read_text() for path in htmlreport.PARTS.iterdir()]
    assert not any(re.search(r"https?://|@import|url\(", part) for part in parts)
    policy = next(e.attributes["content"] for e in page.elements if e.attributes.get("http-equiv"))
    assert policy is not None
    assert "default-src 'none'" in policy
    data, script = page.scripts
    assert base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() in policy
    assert not set("<>&\u2028\u2029") & set(data)


def test_hostile_names_are_shown_as_they_are() -> None:
    made = described(pages.hostile())
    page = Parsed(report.html(made))
    assert len(page.scripts) == 2
    words = "".join(page.words)
    for name in pages.HOSTILE:
        assert name in words
    assert page.embedded["profile"]["model"] == pages.HOSTILE[0]


def test_sections_are_there_only_where_there_is_something_to_show() -> None:
    def sections(made: report.Report) -> set[str]:
        found = {e.attributes.get("id") for e in Parsed(report.html(made)).elements if e.tag == "section"}
        return {name for name in found if name}

    always = {"timeline", "alive", "tree", "again"}
    assert sections(described()) == always
    assert sections(described(frontier=pages.frontier())) == always | {"frontier"}
    assert sections(described(frontier=pages.frontier(0))) == always
    assert sections(measured()) == always | {"checked"}


def test_the_frontier_is_in_the_order_of_its_peaks_with_the_same_knee() -> None:
    given = pages.frontier()
    found = described(frontier=given).frontier
    assert found is not None
    peaks = [point.peak_bytes for point in found.points]
    assert peaks == sorted(peaks)
    assert found.points[found.knee].peak_bytes == given.points[given.knee].peak_bytes


def test_a_large_model_is_a_small_page_until_it_is_opened() -> None:
    made = described(pages.large(60))
    page = Parsed(report.html(made))
    assert len(made.tree) > 1600
    assert len(page.elements) < 1000
    assert made.timeline.per_point > 1
    assert "the line is the highest of each" in " ".join("".join(page.words).split())


def test_the_command_writes_the_page(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = plans.plan_of(pages.decision())
    curve = made.frontier()
    monkeypatch.setattr(type(made), "frontier", lambda *args, **options: curve)  # it takes a while
    monkeypatch.setattr(ckpt_planner, "optimize", lambda *args, **options: made, raising=False)
    (tmp_path / "net.py").write_text("import torch\nmodel = torch.nn.Linear(3, 3)\nexample_inputs = torch.ones(2, 3)\n")
    target = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", str(tmp_path / "net.py"), "--format", "html", "-o", str(target)])
    assert (result.exit_code, result.stdout) == (0, "")
    assert target.read_text(encoding="utf-8") == report.html(report.describe(made, frontier=curve))
    piped = CliRunner().invoke(main, ["report", str(tmp_path / "net.py"), "--format", "html"])
    assert piped.stdout_bytes.decode() == target.read_text(encoding="utf-8")


def test_the_same_plan_is_the_same_page() -> None:
    profile: Profile = pages.decision().profile
    assert report.html(described()) == report.html(described(decide(profile, 10**12, "all")))
