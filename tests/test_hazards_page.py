"""The page on hazards names tests that exist, for every row."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ROWS = [
    [cell.strip() for cell in line.strip("|").split("|")]
    for line in (ROOT / "docs" / "hazards.md").read_text().splitlines()
    if re.match(r"\| \d+ \|", line)
]


def names_in(file: Path) -> set[str]:
    return {n.name for n in ast.parse(file.read_text()).body if isinstance(n, ast.FunctionDef) and "test_" in n.name}


MUTATIONS = {name for file in (ROOT / "tests").glob("test_hazards_mutations*.py") for name in names_in(file)}


def test_every_row_is_there() -> None:
    assert [int(row[0]) for row in ROWS] == list(range(1, 30))


@pytest.mark.parametrize("row", ROWS, ids=[row[0] for row in ROWS])
def test_each_row_names_its_tests(row: list[str]) -> None:
    _, kind, status, how, tests, mutations = row
    assert kind
    assert status
    assert how
    file, names = "", re.findall(r"`([^`]+)`", tests)
    assert names
    for name in names:
        file = name.split("::")[0] if "::" in name else file
        assert name.split("::")[-1] in names_in(ROOT / "tests" / file), name
    names = re.findall(r"`([^`]+)`", mutations)
    assert names
    assert set(names) <= MUTATIONS


def test_every_mutation_belongs_to_a_row() -> None:
    """Those that show that the unmutated handling is right are named after that."""
    named = {name for row in ROWS for name in re.findall(r"`([^`]+)`", row[-1])}
    assert {name for name in MUTATIONS - named if not name.endswith("_are_right")} == set()
