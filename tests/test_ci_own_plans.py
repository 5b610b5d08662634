"""The project's own examples have committed plans, checked as a user's would be."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from ci_repo import ckpt_plan

from ckpt_planner.config import find_config
from ckpt_planner.lockio import read_locked

ROOT = Path(__file__).parent.parent
MOST_BYTES = 200_000  # of a plan and its profile: they are read in every diff


def _release(version: str) -> str:
    """Without what the build is for: "2.13.0" of "2.13.0+cpu"."""
    return version.partition("+")[0]


def test_the_committed_plans_hold(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    for option in ("BUDGET", "STRATEGY", "OPTIMIZER", "DEVICE"):
        monkeypatch.delenv(f"CKPT_PLAN_{option}", raising=False)
    config = find_config(ROOT)
    made_by = {_release(read_locked(config.plan_of(model))[1].profile.torch_version) for model in config.models}
    if made_by != {_release(torch.__version__)}:
        pytest.skip(f"the plans were made with torch {', '.join(made_by)}, and this is {torch.__version__}")
    result = ckpt_plan("check")
    assert result.exit_code == 0, f"{result.stdout}\nckpt-plan check --update accepts it; see CONTRIBUTING.md"


def test_their_files_are_small() -> None:
    files = list((ROOT / "examples" / "plans").iterdir())
    assert files and sum(path.stat().st_size for path in files) <= MOST_BYTES * len(files) / 2
