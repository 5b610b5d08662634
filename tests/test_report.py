"""The report: the data that it is made of, the verdict's rule, and text that fits."""

from __future__ import annotations

import json
import re
from typing import Any

import plans
import pytest
from hypothesis import given
from hypothesis import strategies as st
from plans import MB, measurement, memory, plan, segment

from ckpt_planner import labels, report, textreport


def shown(made: Any, **options: Any) -> str:
    return report.text(report.describe(made), **options)


def test_json_has_the_plans_attribute_names() -> None:
    made = plan()
    data = json.loads(report.json(report.describe(made, measurement(), True)))
    of_the_plan = set(vars(made)) - {"decision"}
    ours = {
        "measurement",
        "verified",
        "verdict",
        "peak_change",
        "headroom_bytes",
        "memory_change",
        "alike",
        "follow_seconds",
    }
    assert set(data) == of_the_plan | ours | {"starting_seconds", "timeline", "alive", "tree", "frontier"}
    for name in ("peak_bytes", "baseline_peak_bytes", "budget_bytes", "overhead", "strategy", "gap"):
        assert data[name] == getattr(made, name)
    assert data["status"] == plans.Status.OPTIMAL.value
    assert data["memory"]["activations"] == 30 * MB
    assert data["segments"][0]["modules"] == ["transformer.h.0.mlp.act", "transformer.h.0.mlp.c_fc"]
    assert data["measurement"]["peak_bytes"] == 53 * MB
    assert data["verified"] is True


def test_json_of_the_same_plan_is_the_same() -> None:
    assert report.json(report.describe(plan())) == report.json(report.describe(plan()))


@pytest.mark.parametrize(
    ("peak", "overhead", "pays"),
    [(54, 0.12, True), (54, 0.31, False), (140, 0.02, False), (82, 0.12, False), (54, 0.3, False)],
)
def test_verdict_pays_over_half_of_the_memory_for_under_30_percent(peak: int, overhead: float, pays: bool) -> None:
    verdict = report.describe(plan(peak_bytes=peak * MB, overhead=overhead)).verdict
    assert verdict.pays is pays
    assert verdict.saved == pytest.approx((150 - peak) / 136)
    assert f"{overhead:.0%}" in verdict.sentence
    assert verdict.sentence.startswith("Pays" if pays else "Does not pay")


def test_verdict_says_so_where_a_plan_takes_more() -> None:
    verdict = report.describe(plan(peak_bytes=184 * MB)).verdict
    assert verdict.pays is False
    assert "it adds 25% to the memory" in verdict.sentence


def test_verdict_without_segments_weighs_nothing() -> None:
    assert report.describe(plan(segments=(), overhead=0.0)).verdict.pays is None


def test_verdict_is_by_measured_peaks_where_there_are_any() -> None:
    assert report.describe(plan(), measurement(peak_bytes=140 * MB)).verdict.pays is False
    # A single step's time is noise.
    assert report.describe(plan(), measurement(step_seconds=0.2)).verdict.pays is True
    assert "peaks measured" in report.describe(plan(), measurement()).verdict.sentence
    unmeasured = measurement(baseline_peak_bytes=None, baseline_step_seconds=None)
    assert "predicted" in report.describe(plan(), unmeasured).verdict.sentence


def test_text_names_what_a_user_looks_for() -> None:
    text = shown(plan())
    for part in ("GPT2LMHeadModel", "150.00 MiB", "54.00 MiB", "-64.0%", "60.00 MiB", "62,914,560 B", "6.00 MiB below"):
        assert part in text
    for part in ("activations", "transformer.h.{0…11}.mlp.{act, c_fc}", plans.Status.OPTIMAL.value, "gap 1.0%"):
        assert part in text
    assert "\n  optimizer" not in text  # no row for what is nothing


def test_text_says_when_a_budget_is_broken() -> None:
    text = report.text(report.describe(plan(budget_bytes=53 * MB - 1), measurement()))
    assert "ABOVE" in text
    assert "BREAKS" in text
    assert "keeps" in report.text(report.describe(plan(), measurement()))


def test_text_says_what_was_not_measured_and_what_differs() -> None:
    unmeasured = measurement(baseline_peak_bytes=None, baseline_step_seconds=None)
    text = report.text(report.describe(plan(), unmeasured, False))
    assert text.count("not run") == 2
    assert "DIFFER" in text


@given(
    width=st.integers(20, 160),
    names=st.lists(st.lists(st.sampled_from(["", "a", "encoder.layers.10.self_attention" * 4, "h.1"]), max_size=5)),
)
def test_text_fits_its_width(width: int, names: list[list[str]]) -> None:
    made = plan(segments=tuple(segment(*n) for n in names), notes=("word " * 60,))
    lines = shown(made, width=width).splitlines()
    assert max(map(len, lines)) <= max(width, textreport.NARROWEST)
    plain = re.sub(r"\x1b\[\d+m", "", shown(made, width=width, color=True))
    assert plain.splitlines() == lines


def test_a_long_module_path_is_shown_whole_where_it_fits() -> None:
    path = "model.decoder.layers.0.encoder_attention.output_projection.lora"
    assert path in shown(plan(segments=(segment(path),)), width=80)


def test_a_long_table_is_cut_and_says_so() -> None:
    made = plan(segments=tuple(segment(f"block{i}", freed=i * MB) for i in range(1, 31)))
    text = shown(made)
    assert "block30 " in text
    assert "block1 " not in text
    assert "11 smaller segments that free 66.00 MiB" in text


def test_zero_times_and_sizes_are_shown() -> None:
    nothing = memory()
    made = plan(step_seconds=0.0, baseline_step_seconds=0.0, memory=nothing, baseline_memory=nothing, peak_bytes=0)
    assert "0 B" in shown(made)


def test_alike_segments_are_one_row_and_others_are_not() -> None:
    parts = [segment(f"h.{i}.{part}", freed=size) for i in range(4) for part, size in (("attn", MB), ("mlp", 2 * MB))]
    rows = textreport.merge([*parts, segment("h.4.attn", freed=3 * MB)])  # type: ignore[list-item]
    assert [(label, total.bytes_freed, count) for label, total, count in rows] == [
        ("h.{0…3}.attn", 4 * MB, 4),
        ("h.{0…3}.mlp", 8 * MB, 4),
        ("h.4.attn", 3 * MB, 1),
    ]


@pytest.mark.parametrize(
    ("modules", "label"),
    [
        ((), labels.ROOT),
        (("",), labels.ROOT),
        (("h.0.mlp",), "h.0.mlp"),
        (("", "h.0.mlp"), "h.0.mlp"),
        (("h.0.mlp", "h.0.mlp.act"), "h.0.mlp"),
        (("h.0.mlp.act", "h.0.mlp.drop"), "h.0.mlp.{act, drop}"),
        (("h.0.ln", "h.0.a.x", "h.0.a.y", "h.0.z"), "h.0.{ln … z} (4 modules)"),
        (("a", "b"), "{a, b}"),
    ],
)
def test_label_of_modules(modules: tuple[str, ...], label: str) -> None:
    assert labels.of_modules(modules) == label


@pytest.mark.parametrize(
    ("many", "label"),
    [
        (["h.0"], "h.0"),
        (["h.0", "h.1"], "h.{0, 1}"),
        (["h.0.x", "h.1.x", "h.2.x", "h.7.x"], "h.{0…2, 7}.x"),
        (["h.9.x", "h.10.x", "h.11.x"], "h.{9…11}.x"),
        (["a.0.b.1", "a.0.b.2"], "a.0.b.{1, 2}"),
        (["{h.0, h.1}", "{h.1, h.2}"], "{h.0, h.1} … {h.1, h.2}"),
        (["conv1x1.0", "conv1x1.1"], "conv1x1.{0, 1}"),
        (["same", "same"], "same"),
    ],
)
def test_label_of_labels(many: list[str], label: str) -> None:
    assert len({labels.pattern(text) for text in many}) == 1
    assert labels.of_labels(many) == label


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.0, "0.0 ms"), (8.3e-4, "830 µs"), (0.0125, "12.5 ms"), (1.254, "1.25 s"), (-0.002, "-2.0 ms")],
)
def test_times(value: float, text: str) -> None:
    assert textreport.seconds(value) == text
