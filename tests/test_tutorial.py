"""The tutorial runs as it is written, with 24 layers and smaller sizes, and says what is true."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils import _pytree as pytree

from benchmarks import tutorial as benchmark
from benchmarks.tutorial import Row, blocks, with_sizes

SMALL = {
    "WIDTH": 32,
    "LENGTH": 64,
    "VOCABULARY": 256,
    "BERT_BUDGET": "18MB",
    "IMAGES": 8,
    "SIDE": 64,
    "VIT_BUDGET": "7.2MB",
}


def test_the_tutorial_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    first, *others = blocks(benchmark.TUTORIAL.read_text())
    made: dict[str, Any] = {}
    exec(compile(with_sizes(first, SMALL), "the tutorial's sizes and models", "exec"), made)
    assert made["LAYERS"] == 24
    for number, code in enumerate(others, 2):
        exec(compile(code, f"the tutorial's block {number}", "exec"), made)
    assert made["refused"].budget_bytes == 18_000_000
    for plan in (made["plan"], made["vit_plan"]):
        assert plan.segments
        assert plan.peak_bytes <= plan.budget_bytes < plan.baseline_peak_bytes
        assert sum(type(m).__name__ in ("BertLayer", "ViTLayer") for m in plan.model.modules()) == 24
    with open("run.csv", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["planning"] for row in rows] == ["0", "0", "1", "0", "1", "0"]
    assert len({row["signature"] for row in rows}) == 3
    for row in (rows[1], rows[3], rows[5]):  # plain precision, mixed precision, twice the batch
        assert abs(float(row["error"])) < 0.02
        assert int(row["peak_bytes"]) <= 18_000_000
    first_name, first_value = next(iter(made["plan"].model.state_dict().items()))
    assert first_name in torch.load("plain.pt")
    assert first_value.shape == torch.load("plain.pt")[first_name].shape
    assert pytree.tree_leaves(torch.load("step.pt"))


def row(**changes: Any) -> Row:
    values: dict[str, Any] = {
        "case": "bert",
        "budget": 50,
        "plain": 110,
        "predicted": 46,
        "measured": 45,
        "hand": 60,
        "resident": 10,
        "predicted_time": 0.2,
        "time": 0.2,
        "hand_time": 0.3,
        "monitored_time": 1.0,
        "planning": 3.0,
        "own_budget": True,
    }
    return Row(**{**values, **changes})


@pytest.mark.parametrize(
    ("changes", "beats"), [({}, True), ({"measured": 51}, False), ({"budget": 44}, False), ({"time": 0.25}, False)]
)
def test_the_rule_of_thumb_is_beaten_only_in_memory_and_time(changes: dict[str, Any], beats: bool) -> None:
    assert row(**changes).beats is beats


def test_the_figures_replace_the_ones_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = tmp_path / "tutorial.md"
    page.write_text(benchmark.TUTORIAL.read_text() + "\nThe end.\n")
    monkeypatch.setattr(benchmark, "TUTORIAL", page)
    sizes = {"LAYERS": 24, "WIDTH": 256}
    for number in (1, 2):
        benchmark.write(benchmark.section([row(case=f"case {number}")], sizes, "the command"))
    text = page.read_text()
    assert text.endswith("\nThe end.\n")
    assert "case 1" not in text
    assert "| case 2 | 0.0 MB |" in text
    assert "| 64.0% | 65.0% | +20.0% | +20.0% | 50.0% | +30.0% |" in text
    assert "1 of 1 models beat the rule" in text
    assert text.count(benchmark.BEGIN) == text.count(benchmark.END) == 1
    assert blocks(text) == blocks(benchmark.TUTORIAL.read_text())
