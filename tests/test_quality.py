"""The code's style and types, checked with the tests so that one command says whether a change is good."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*command: str, **env: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, env={**os.environ, **env}, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder that holds the package under its import name.

    The folders `planner/` and `profiling/` become `ckpt_planner` when installed; mypy does not follow the hook that an
    editable install puts in place for that, so it gets links.
    """
    target = tmp_path / "ckpt_planner"
    target.mkdir()
    for entry in (ROOT / "planner").iterdir():
        if entry.name != "__pycache__":
            (target / entry.name).symlink_to(entry)
    (target / "profiling").symlink_to(ROOT / "profiling")
    return tmp_path


def test_ruff() -> None:
    run("ruff", "check", ".")


def test_types_are_complete_and_right(package: Path) -> None:
    run("mypy", "--cache-dir", str(ROOT / ".mypy_cache"), MYPYPATH=str(package))


def test_files_stay_short() -> None:
    folders = ("planner", "profiling", "tests", "benchmarks", "examples")
    files = [path for folder in folders for path in (ROOT / folder).rglob("*.py")]
    assert files
    lengths = {str(path.relative_to(ROOT)): len(path.read_text().splitlines()) for path in files}
    assert {name: length for name, length in lengths.items() if length > 350} == {}
