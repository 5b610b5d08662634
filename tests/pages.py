"""Reports to show, and an HTML page taken apart: its elements, its numbers, its words."""

from __future__ import annotations

import json
from functools import cache
from html.parser import HTMLParser
from typing import Any, NamedTuple

import msgspec
import plans
import profiles

from ckpt_planner import report
from ckpt_planner.decision import Decision, decide
from ckpt_planner.profile import Profile

VOID = {"area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr", "path"}

HOSTILE = (
    "</script><script>window.hacked = 1</script>",
    "<img src=http://example.invalid/x onerror='window.hacked = 1'>",
    "\"' onmouseover='window.hacked = 1' x=\"",
    "<!--<script>",
    "]]>&lt;b&gt;&amp;&#60;",
    "{{ 7 * 7 }}{% raw %}${7*7}",
    "\u202egnihton\u2028\u2029",
    "\x1b[2J\x07\nnew line",
    "__proto__",
    "constructor",
)


@cache
def decision(layers: int = 3, strategy: str = "all") -> Decision:
    """A made-up GPT's plan."""
    return decide(profiles.transformer(layers, width=64, tokens=128, vocabulary=512), 10**12, strategy)


def described(of: Decision | None = None, **options: Any) -> report.Report:
    """The report of a decision."""
    return report.describe(plans.plan_of(of or decision()), **options)


def frontier(count: int = 6) -> Any:
    """A frontier as the planner's own module gives it, with its points in no order."""

    class Point(NamedTuple):
        peak_bytes: int
        overhead: float
        recompute_seconds: float
        gap: float

    class Frontier(NamedTuple):
        points: tuple[Point, ...]
        knee: int

    points = [Point(10**6 * (10 + i), 0.3 - 0.04 * i, 0.03 - 0.004 * i, 0.02 * i) for i in range(count)]
    return Frontier(tuple(reversed(points)), 1)


def renamed(profile: Profile, names: tuple[str, ...]) -> Profile:
    """A profile whose every name is one of `names`."""

    def name(i: int) -> str:
        return names[i % len(names)]

    ops = [
        msgspec.structs.replace(
            op, name=name(i), module=f"{name(i)}.{i % 3}.{name(i + 1)}", place=f"{name(i + 2)}.py:1"
        )
        for i, op in enumerate(profile.ops)
    ]
    return msgspec.structs.replace(
        profile,
        model=names[0],
        device=names[1 % len(names)],
        optimizer=names[2 % len(names)],
        loss=f"a stand-in {names[3 % len(names)]}",
        torch_version=names[4 % len(names)],
        notes=names,
        ops=tuple(ops),
        steps=tuple(msgspec.structs.replace(s, name=name(i)) for i, s in enumerate(profile.steps)),
        storages=tuple(
            msgspec.structs.replace(s, name=f"{name(i)}.{name(i + 1)}" if s.name else "")
            for i, s in enumerate(profile.storages)
        ),
    )


def hostile() -> Decision:
    """A plan of a model whose every name tries to be something else."""
    profile = renamed(profiles.transformer(1, width=16, tokens=16, vocabulary=32), HOSTILE)
    return decide(profile, 10**12, "all")


def large(layers: int = 450) -> Decision:
    """A plan of more than 10,000 operations, within a budget; the profile is made up."""
    profile = msgspec.structs.replace(profiles.transformer(layers), model=f"GPT, {layers} layers")
    found = decide(profile, 10**15, "all")
    return Decision(profile, found.solution, found.plain.peak_bytes * 6 // 10, "all")


class Element(NamedTuple):
    """An opened element."""

    tag: str
    attributes: dict[str, str | None]


class Parsed(HTMLParser):
    """A page taken apart.

    Attributes:
        elements: every element, in order.
        numbers: value, path in the JSON, form and text of each number.
        words: the text outside of numbers, scripts, styles and the marks on an axis.
        wrong: what is not balanced.
    """

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[Element] = []
        self.numbers: list[tuple[str, str, str, str]] = []
        self.words: list[str] = []
        self.scripts: list[str] = []
        self.wrong: list[str] = []
        self._open: list[Element] = []
        self.feed(page)
        self.close()
        self.wrong += [f"<{element.tag}> is never closed" for element in self._open]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        element = Element(tag, dict(attrs))
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)
        if tag == "data":
            a = element.attributes
            self.numbers.append((a["value"] or "", a["data-json"] or "", a["data-form"] or "", ""))
        if tag == "script":
            self.scripts.append("")

    def handle_endtag(self, tag: str) -> None:
        if tag in VOID:
            return
        if not self._open or self._open[-1].tag != tag:
            self.wrong.append(f"</{tag}> closes {self._open[-1].tag if self._open else 'nothing'}")
            return
        self._open.pop()

    def handle_data(self, data: str) -> None:
        tags = [element.tag for element in self._open]
        classes = {name for element in self._open for name in (element.attributes.get("class") or "").split()}
        if "data" in tags:
            value, path, form, text = self.numbers[-1]
            self.numbers[-1] = value, path, form, text + data
        elif "script" in tags:
            self.scripts[-1] += data
        elif "style" not in tags and "tick" not in classes:
            self.words.append(data)

    @property
    def embedded(self) -> Any:
        """The report inside the page."""
        return json.loads(self.scripts[0])


def strings(value: Any) -> list[str]:
    """Every string of a JSON value."""
    if isinstance(value, str):
        return [value]
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return [text for part in inner for text in strings(part)]
