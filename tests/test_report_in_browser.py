"""The page in a real browser: silent, alone, right, and usable without a mouse."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import browser
import pages
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ckpt_planner import htmlreport, report

CHROMIUM = browser.find()
if CHROMIUM is None:
    pytest.skip(f"no Chromium here (looked for {', '.join(browser.NAMES)})", allow_module_level=True)

NUMBERS = "[...document.querySelectorAll('data')].map(d => [d.value, d.dataset.json, d.dataset.form, d.textContent])"
ROWS = "[...document.querySelectorAll('#tree-table tbody tr')].map(r => r.querySelector('.name').textContent)"
FOCUSED = "document.activeElement.dataset.node ?? document.activeElement.id"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Iterator[browser.Page]:
    assert CHROMIUM is not None
    with browser.Page(CHROMIUM, tmp_path_factory.mktemp("chromium")) as opened:
        yield opened


@pytest.fixture(scope="module")
def any_page(page: browser.Page, small: report.Report, tmp_path_factory: pytest.TempPathFactory) -> browser.Page:
    """A browser that shows some report: all of them have the same script."""
    return Shown(page, small, tmp_path_factory.mktemp("any") / "report.html").page


class Shown:
    """A report in the browser."""

    def __init__(self, page: browser.Page, made: report.Report, path: Path) -> None:
        self.page, self.data, self.path = page, json.loads(report.json(made)), path
        path.write_text(report.html(made), encoding="utf-8")
        page.problems.clear()
        page.requests.clear()
        page.media(prefers_color_scheme="light")
        page.size(1280, 900)
        page.open(path)

    def check_numbers(self) -> int:
        """Every number on the page is the JSON's, shown as the page's maker shows it; returns how many there are."""
        found = self.page.run(NUMBERS)
        for value, path, form, text in found:
            expected = htmlreport.look_up(self.data, path)
            assert (float(value) if value else None) == expected, path
            assert text == htmlreport.shown(expected, form), path
        return len(found)

    def check_silent(self) -> None:
        """Nothing went wrong, and nothing was asked for but the page itself."""
        self.page.run("0")  # events come before the answer
        assert self.page.problems == []
        assert set(self.page.requests) == {self.path.resolve().as_uri()}


@pytest.fixture(scope="module")
def small() -> report.Report:
    return pages.described(frontier=pages.frontier())


@pytest.fixture
def shown(page: browser.Page, small: report.Report, tmp_path: Path) -> Shown:
    return Shown(page, small, tmp_path / "report.html")


def test_the_numbers_are_those_of_the_json_down_to_the_last_operation(shown: Shown) -> None:
    before = shown.check_numbers()
    for _ in range(8):
        shown.page.run("document.getElementById('open-more').click()")
    assert shown.page.run("document.querySelectorAll('#tree-table tr.op').length") == shown.data["profile"]["ops"]
    assert shown.check_numbers() > before
    shown.check_silent()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_both_colour_schemes_are_silent_and_differ(shown: Shown, scheme: str) -> None:
    shown.page.media(prefers_color_scheme=scheme)
    ground = "getComputedStyle(document.documentElement).backgroundColor"
    light = int(shown.page.run(ground).removeprefix("rgb(").split(",")[0]) > 127
    assert light == (scheme == "light")
    shown.page.run("document.getElementById('theme').click()")
    assert (int(shown.page.run(ground).removeprefix("rgb(").split(",")[0]) > 127) != light
    shown.check_silent()


@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_is_wider_than_the_window(shown: Shown, width: int) -> None:
    shown.page.size(width, 900)
    assert shown.page.run("document.documentElement.scrollWidth") <= width
    for name in ("timeline-phases", "tree-table"):
        table = f"document.getElementById('{name}')"
        assert shown.page.run(f"{table}.offsetWidth <= {table}.parentElement.clientWidth"), name


def test_more_than_ten_thousand_operations(page: browser.Page, tmp_path: Path) -> None:
    made = pages.described(pages.large())
    shown = Shown(page, made, tmp_path / "large.html")
    assert shown.data["profile"]["ops"] > 10_000
    assert page.run("document.querySelectorAll('*').length") < 1500  # what keeps it quick to open
    page.run("document.getElementById('open-more').click()")
    assert page.run("document.querySelectorAll('#tree-table tbody tr').length") < 300
    page.run("[...document.querySelectorAll('.more button')].at(-1).click()")
    assert page.run("document.querySelectorAll('#tree-table tbody tr').length") > 300
    shown.check_numbers()
    find = "const f = document.getElementById('find'); f.value = 'h.449.mlp'; f.dispatchEvent(new Event('input'))"
    page.run(f"(() => {{ {find} }})()")
    assert all("h.449.mlp" in row for row in page.run(ROWS))
    shown.check_numbers()
    shown.check_silent()


def test_hostile_names_do_nothing_but_be_shown(page: browser.Page, tmp_path: Path) -> None:
    shown = Shown(page, pages.described(pages.hostile()), tmp_path / "hostile.html")
    for _ in range(6):
        page.run("document.getElementById('open-more').click()")
    for point in range(len(shown.data["timeline"]["first"])):
        page.run("document.getElementById('timeline-chart').focus()")
        page.key("ArrowRight" if point else "Home")
    rows = page.run(ROWS)
    for name in pages.HOSTILE:
        assert any(name in row for row in rows), name
    assert page.run("window.hacked") is None
    assert page.run("document.scripts.length") == 2
    assert page.run("document.images.length") == 0
    shown.check_numbers()
    shown.check_silent()


def test_the_timeline_is_read_with_the_keyboard(shown: Shown) -> None:
    page, t = shown.page, shown.data["timeline"]
    for _ in range(20):
        page.key("Tab")
        if page.run(FOCUSED) == "timeline-chart":
            break
    else:
        pytest.fail("the tabulator does not reach the chart")
    said = "document.getElementById('readout').textContent"
    for key, point in (
        ("ArrowRight", 0),
        ("ArrowRight", 1),
        ("End", len(t["first"]) - 1),
        ("ArrowLeft", len(t["first"]) - 2),
    ):
        page.key(key)
        text = page.run(said)
        assert t["during"][point] in text
        assert htmlreport.shown(t["planned_high_bytes"][point], "bytes") in text
        assert page.run("document.activeElement.getAttribute('aria-valuetext')") == text
    shown.check_numbers()


def test_the_tree_is_read_with_the_keyboard(shown: Shown) -> None:
    page = shown.page
    page.run("document.querySelector('#tree-table tbody tr').focus()")
    page.run("document.getElementById('close-all').click()")
    page.run("document.querySelector('#tree-table tbody tr').focus()")
    assert len(page.run(ROWS)) == 1
    page.key("ArrowRight")
    opened = len(page.run(ROWS))
    assert opened > 1
    page.key("ArrowDown")
    assert page.run(FOCUSED) == "1"
    page.key("Enter")
    assert len(page.run(ROWS)) > opened
    page.key("ArrowLeft")
    page.key("ArrowLeft")
    assert page.run(FOCUSED) == "0"
    page.key("Home")
    page.key("ArrowLeft")
    assert len(page.run(ROWS)) == 1
    assert page.run("document.querySelectorAll('#tree-table [tabindex=\"0\"]').length") == 1


def test_print_has_everything_and_no_buttons(shown: Shown) -> None:
    shown.page.media("print", prefers_color_scheme="dark")
    hidden = "getComputedStyle(document.querySelector('{}')).display"
    assert [shown.page.run(hidden.format(name)) for name in ("nav", "#theme", ".tools")] == ["none"] * 3
    assert shown.page.run("getComputedStyle(document.documentElement).backgroundColor") == "rgb(255, 255, 255)"
    assert shown.page.send("Page.printToPDF")["data"]
    shown.check_silent()


@given(
    st.one_of(
        st.tuples(
            st.just("bytes"), st.one_of(st.integers(-(2**45), 2**45), st.integers(0, 2**22).map(lambda n: n * 128))
        ),
        st.tuples(st.just("seconds"), st.floats(-100, 100).map(lambda x: round(x, 9) + 0.0)),
        st.tuples(
            st.sampled_from(["share", "change"]),
            st.one_of(st.floats(-4, 4), st.integers(-512, 512).map(lambda n: n / 128)),
        ),
        st.tuples(st.just("count"), st.integers(0, 2**45)),
    )
)
@settings(max_examples=300, deadline=None)
def test_the_pages_script_shows_numbers_as_its_maker_does(any_page: browser.Page, number: tuple[str, Any]) -> None:
    form, value = number
    assert any_page.run(f"shown({json.dumps(value)}, {json.dumps(form)})") == htmlreport.shown(value, form)
