"""docs/ci.md and the files beside it: they parse, and every command, option and key in them exists."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import click
import pytest
import yaml

from ckpt_planner.cli import main
from ckpt_planner.config import find_config
from ckpt_planner.regress import Tolerance

DOCS = Path(__file__).parent.parent / "docs"
PAGE = (DOCS / "ci.md").read_text()


def parsed(line: str) -> click.Context:
    """A line of a shell as the command would read it; wrong usage raises."""
    program, name, *arguments = shlex.split(line, comments=True)
    assert program == "ckpt-plan"
    return main.commands[name].make_context(name, [a for a in arguments if a != "..."], resilient_parsing=False)


def commands(text: str) -> list[str]:
    """Lines that start with the command, in indented blocks and between backticks."""
    return re.findall(r"^(?: {4,}|\s*run: |\s*entry: )(ckpt-plan .+)$", text, re.MULTILINE)


def test_the_workflow_runs_the_check_and_reports_to_github() -> None:
    workflow: dict[Any, Any] = yaml.safe_load((DOCS / "ci-workflow.yml").read_text())
    # YAML 1.1 reads the key `on` as a boolean.
    assert set(workflow[True]) == {"pull_request", "push"}
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert {"runs-on", "steps", "timeout-minutes"} <= set(job)
    assert all(("uses" in step) != ("run" in step) for step in job["steps"])
    (check,) = [step["run"] for step in job["steps"] if "ckpt-plan " in step.get("run", "")]
    assert parsed(check).params["form"] == "github"


def test_the_hook_runs_the_check() -> None:
    (repository,) = yaml.safe_load((DOCS / "ci-pre-commit.yml").read_text())["repos"]
    (hook,) = repository["hooks"]
    assert repository["repo"] == "local"
    assert {"id", "name", "entry", "language"} <= set(hook)
    assert hook["pass_filenames"] is False
    assert parsed(hook["entry"]).params["plans"] == ()
    assert re.search(hook["files"], "src/model.py")


def test_every_command_in_the_page_is_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plans").mkdir()
    for file in ("old.json", "plans/model.json", "plans/model.profile.json"):
        (tmp_path / file).touch()
    lines = commands(PAGE)
    assert len(lines) >= 3
    for line in lines:
        parsed(line)
    options = {o for c in main.commands.values() for p in c.params for o in p.opts}
    assert set(re.findall(r"--[a-z][a-z-]+", PAGE)) - {"--ckpt-plan-update"} <= options


def test_the_configuration_in_the_page_is_read(tmp_path: Path) -> None:
    (block,) = re.findall(r"```toml\n(.*?)```", PAGE, re.DOTALL)
    (tmp_path / "pyproject.toml").write_text(block)
    found = find_config(tmp_path)
    assert [model.name for model in found.models] == ["gpt2", "vit"]
    assert found.tolerance == Tolerance(), "the page shows the defaults"
    assert found.plan_of(found.models[0]) == tmp_path / "plans" / "gpt2.json"
    assert found.models[1].tolerance.overhead == 0.05
