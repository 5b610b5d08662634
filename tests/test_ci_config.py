"""[tool.ckpt-plan]: found, read, and refused with the key's name where it is wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest
from click.testing import CliRunner

from ckpt_planner import config
from ckpt_planner.cli import main
from ckpt_planner.config import ConfigError, Tolerance, find_config, parse_share
from ckpt_planner.solve import Strategy

FULL = """
[tool.ckpt-plan]
plans = "committed"
budget = "8GB"
optimizer = "AdamW"
peak-tolerance = "3%"
allow = ["segments"]

[tool.ckpt-plan.models]
gpt2 = "examples/gpt2/model.py"
vit = { file = "vit.py:net", budget = 4000000000, strategy = "sqrt", overhead-tolerance = 0.1, allow = [] }

[tool.ckpt-plan.report]
format = "json"
measure = true
budget = "60%"
mechanism = "torch"
frontier = false
output = "made/report.json"
"""


def written(folder: Path, text: str) -> Path:
    path = folder / "pyproject.toml"
    path.write_text(text)
    return path


def test_models_have_their_own_values_over_the_tables(tmp_path: Path) -> None:
    written(tmp_path, FULL)
    (tmp_path / "a" / "b").mkdir(parents=True)
    found = find_config(tmp_path / "a" / "b")
    assert found.path == tmp_path / "pyproject.toml"
    gpt2, vit = found.models
    assert found.plan_of(gpt2) == tmp_path / "committed" / "gpt2.json"
    assert (gpt2.file, gpt2.budget, gpt2.strategy, gpt2.optimizer) == (
        str(tmp_path / "examples/gpt2/model.py"), "8GB", None, "AdamW",
    )  # fmt: skip
    assert gpt2.tolerance == found.tolerance == Tolerance(0.03, 0.02, ("segments",))
    assert (vit.file, vit.budget, vit.strategy) == (str(tmp_path / "vit.py:net"), "4000000000", "sqrt")
    assert vit.tolerance == Tolerance(0.03, 0.1, ())


def test_the_nearest_file_that_has_the_table_is_read(tmp_path: Path) -> None:
    written(tmp_path, FULL)
    inner = tmp_path / "inner"
    inner.mkdir()
    written(inner, "[project]\nname = 'x'\n")
    assert find_config(inner).path == tmp_path / "pyproject.toml"
    written(inner, "[tool.ckpt-plan]\n")
    assert find_config(inner).path == inner / "pyproject.toml"
    assert find_config(inner).models == ()


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("budgets = 3", "budgets: the key is unknown. Known here: allow, budget"),
        ("budget = '8 gigs'", "budget: budget '8 gigs' is not understood"),
        ("budget = true", "budget: budget True is not understood"),
        ("strategy = 'best'", "strategy: 'best' is unknown; choose one of budget, sqrt"),
        ("peak-tolerance = '1'", "peak-tolerance: '1' is not a share"),
        ("overhead-tolerance = -0.1", "overhead-tolerance: -0.1 is not a share"),
        ("peak-tolerance = nan", "peak-tolerance: nan is not a share"),
        ("allow = 'peak'", "allow: 'peak' is no list of peak"),
        ("allow = ['speed']", "allow: ['speed'] is no list of peak"),
        ("plans = 3", "plans: 3 is no text"),
        ("models = ['a.py']", "models: is no table"),
        ("models = { net = 3 }", "models.net: is neither a file nor a table"),
        ("models = { net = { budget = '8GB' } }", "models.net: is neither a file nor a table"),
        ("models = { net = { file = 'a.py', speed = 1 } }", "models.net.speed: the key is unknown"),
        ("models = { net = { file = 'a.py', budget = '0' } }", "models.net.budget: budget '0'"),
        ("models = { '../net' = 'a.py' }", "models.../net: the name becomes a file's"),
        ("models = { 'net.profile' = 'a.py' }", "models.net.profile: the name becomes a file's"),
        ("report = { colour = true }", "report.colour: the key is unknown"),
        ("report = { measure = 'yes' }", "report.measure: 'yes' is not of type bool"),
        ("report = { strategy = 'best' }", "report.strategy: 'best' is unknown"),
        ("report = { mechanism = 'both' }", "report.mechanism: 'both' is unknown; choose one of slice, graph, torch"),
        ("report = { frontier = 'yes' }", "report.frontier: 'yes' is not of type bool"),
        ("report = { output = 3 }", "report.output: 3 is no text"),
        ("mechanism = 'torch'", "mechanism: the key is unknown"),
        ("budget = ", "is no valid TOML"),
    ],
)
def test_a_wrong_key_or_value_is_2_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, said: str
) -> None:
    path = written(tmp_path, f"[tool.ckpt-plan]\n{text}\n")
    with pytest.raises(ConfigError) as error:
        find_config(tmp_path)
    assert said in str(error.value)
    assert str(path) in str(error.value)
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["check"])
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert CliRunner().invoke(main, ["check", "--help"]).exit_code == 0


def test_shares_as_people_write_them() -> None:
    assert [parse_share(v) for v in ("1%", " 2.5 % ", 0.03, 0, "0%")] == [0.01, 0.025, 0.03, 0.0, 0.0]


def test_strategies_are_the_solvers() -> None:
    assert get_args(Strategy) == config.STRATEGIES


def test_report_takes_its_defaults_from_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(tmp_path, FULL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("CKPT_PLAN_BUDGET", raising=False)
    seen: list[dict[str, Any]] = []
    command = main.commands["report"]
    monkeypatch.setattr(command, "callback", lambda **options: seen.append(options))
    assert CliRunner().invoke(main, ["report", "net.py", "--strategy", "all"]).exit_code == 0
    assert CliRunner().invoke(main, ["report", "net.py"], env={"CKPT_PLAN_BUDGET": "7GB"}).exit_code == 0
    assert [(s["budget"], s["strategy"]) for s in seen] == [("60%", "all"), ("7GB", "budget")]
    assert all((s["form"], s["measure"], s["optimizer"]) == ("json", True, "AdamW") for s in seen)
    # A path of the table lies beside pyproject.toml, wherever the command runs.
    (tmp_path / "inner").mkdir()
    monkeypatch.chdir(tmp_path / "inner")
    other = ["--mechanism", "slice", "--frontier", "-o", "-"]
    assert CliRunner().invoke(main, ["report", "net.py"]).exit_code == 0
    assert CliRunner().invoke(main, ["report", "net.py", *other]).exit_code == 0
    assert CliRunner().invoke(main, ["report", "net.py"], env={"CKPT_PLAN_MECHANISM": "slice"}).exit_code == 0
    assert [(s["mechanism"], s["frontier"], s["output"]) for s in seen[2:]] == [
        ("torch", False, tmp_path / "made" / "report.json"),
        ("slice", True, Path("-")),
        ("slice", False, tmp_path / "made" / "report.json"),
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["check", "--peak-tolerance", "much"], '"1%"'),
        (["check", "--allow", "everything"], "'segments'"),
        (["check", "--config", "nowhere.toml"], "nowhere.toml"),
        (["check", "--format", "xml"], "'github'"),
        (["check"], "no pyproject.toml here has [tool.ckpt-plan]"),
        (["lock"], "FILE"),
        (["lock", "model.py", "--budget", "8 gigs"], '"8GiB"'),
        (["lock", "nowhere.py", "--budget", "8GB"], "there is no such file"),
        (["diff", "a.json"], "a.json"),
    ],
)
def test_wrong_usage_is_2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], said: str) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, arguments)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert list(tmp_path.iterdir()) == []
