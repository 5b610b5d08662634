"""A plan through the life of a pull request: locked, left alone, broken, bettered, accepted, and left behind."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from ci_repo import MODEL, REFACTORED, ROWS, Project, ckpt_plan, make


@pytest.fixture(scope="module")
def locked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A project whose plan is committed."""
    project = make(tmp_path_factory.mktemp("story") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        result = ckpt_plan("lock", "model.py", "--budget", "70%", "-o", "plans/net.json")
    assert result.exit_code == 0, result.output
    assert "Wrote plans/net.json and plans/net.profile.json" in result.stderr
    assert result.stdout == ""
    project.commit("The plan")
    return project.folder


@pytest.fixture
def project(locked: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Project:
    """A copy of it, to work in."""
    shutil.copytree(locked, tmp_path / "project")
    monkeypatch.chdir(tmp_path / "project")
    return Project(tmp_path / "project")


def test_what_is_committed_names_the_segments_and_what_they_cost(project: Project) -> None:
    data = json.loads(project.plan.read_text())
    assert data["model"] == "../model.py"
    assert data["inputs"] == f"(float32[{ROWS},64],)"
    assert data["peak_bytes"] <= data["budget_bytes"] < data["baseline_peak_bytes"]
    assert data["segments"]
    assert all(module.startswith("layers.") for segment in data["segments"] for module in segment["modules"])
    assert project.plan.read_bytes().endswith(b"}\n")
    assert list(data) == sorted(data)


def test_a_configured_model_has_its_place_and_is_not_overwritten(project: Project) -> None:
    before = project.files()
    result = ckpt_plan("lock", "model.py")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "plans/net.json exists already" in result.stderr
    assert "--force" in result.stderr
    assert project.files() == before


def test_nothing_moved(project: Project) -> None:
    result = ckpt_plan("check")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "1 plan: 1 unchanged.")
    assert ckpt_plan("check", "plans/net.json").exit_code == 0
    assert project.git("status", "--porcelain") == ""


def test_a_harmless_refactor_passes_and_moves_nothing(project: Project) -> None:
    project.write(REFACTORED)
    result = ckpt_plan("check")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "1 plan: 1 unchanged.")
    assert ckpt_plan("check", "--update").exit_code == 0
    assert project.git("diff", "--stat", "--", "plans") == ""


def test_a_wider_layer_fails_with_the_modules_path_and_the_bytes(project: Project) -> None:
    before = project.files()
    project.wider(384)
    result = ckpt_plan("check", "--peak-tolerance", "0%", "--overhead-tolerance", "0")
    assert result.exit_code == 1
    assert "plans/net.json: FAILED" in result.stdout
    more = (384 - 256) * ROWS * 4
    assert f"module layers.1.wide: +{more:,} B saved for backward" in result.stdout
    assert "ckpt-plan check --update plans/net.json" in result.stdout
    assert len(result.stdout.split("\n\n")[0].splitlines()) <= 10
    assert project.files() == before


def test_what_is_new_is_marked_as_an_estimate_and_the_rest_keeps_its_times(project: Project) -> None:
    project.wider(288)
    found = json.loads(ckpt_plan("check", "--format", "json", "--allow", "segments").stdout)[0]
    assert set(found["estimated"]) == {
        "layers.1.wide: torch._C._nn.linear",
        "layers.1.act: torch._C._nn.gelu",
        "layers.1.narrow: torch._C._nn.linear",
    }
    assert "is an estimate" in " ".join(found["notes"])
    assert ckpt_plan("check", "--update").exit_code == 0
    committed = json.loads(project.git("show", "HEAD:plans/net.profile.json"))
    now = json.loads(project.profile.read_text())
    known = {op["signature"]: op["ns"] for op in committed["ops"]}
    assert sum(op["signature"] in known for op in now["ops"]) > 20
    assert all(op["ns"] == known[op["signature"]] for op in now["ops"] if op["signature"] in known)
    assert len(now["estimated"]) == 3


def test_a_freed_layer_passes_as_improved(project: Project) -> None:
    project.write(
        MODEL.replace("[Block(inner) for inner in WIDTHS]", "[*map(Block, WIDTHS[:2]), *[nn.Identity()] * 2]")
    )
    result = ckpt_plan("check")
    assert result.exit_code == 0, result.stdout
    assert "plans/net.json: improved; accept it to keep the gain" in result.stdout
    assert result.stdout.splitlines()[-1] == "1 plan: 1 improved."


def test_update_accepts_and_the_next_check_finds_nothing(project: Project) -> None:
    project.wider(320)
    result = ckpt_plan("check", "--update")
    assert result.exit_code == 0, result.stdout
    assert "(the file is rewritten)" in result.stdout
    assert "plans/net.json" in project.git("diff", "--name-only")
    assert ckpt_plan("check").stdout.splitlines()[-1] == "1 plan: 1 unchanged."


def test_what_no_plan_can_keep_is_not_accepted(project: Project) -> None:
    before = project.files()
    project.wider(16384)
    result = ckpt_plan("check", "--update")
    assert result.exit_code == 1
    assert "The budget no longer holds" in result.stdout
    assert "cannot be accepted" in result.stdout
    assert project.files() == before


def test_the_difference_of_two_commits_in_words(project: Project) -> None:
    project.wider(320)
    ckpt_plan("check", "--update")
    for name in ("net.json", "net.profile.json"):
        project.write(project.git("show", f"HEAD:plans/{name}"), name)
    result = ckpt_plan("diff", "net.json", "plans/net.json")
    assert result.exit_code == 0
    assert result.stdout.startswith("plans/net.json takes ")
    assert f"module layers.1.wide: +{64 * ROWS * 4:,} B saved for backward" in result.stdout
    assert ckpt_plan("diff", "net.json", "net.json").stdout == "net.json and net.json are the same plan.\n"
    (project.folder / "net.profile.json").unlink()
    alone = ckpt_plan("diff", "net.json", "plans/net.json")
    assert (alone.exit_code, "module layers.1" in alone.stdout) == (0, False)
    assert "no profile beside it" in alone.stderr


def test_a_plan_file_that_no_model_uses_fails(project: Project) -> None:
    for file in (project.plan, project.profile):
        shutil.copy(file, file.with_name(file.name.replace("net", "old")))
    result = ckpt_plan("check")
    assert result.exit_code == 1
    assert "plans/old.json: FAILED, no model uses it" in result.stdout
    assert "plans/old.profile.json:" not in result.stdout
    (project.folder / "plans" / "old.json").unlink()
    assert "plans/old.profile.json: FAILED" in ckpt_plan("check", "--update").stdout
    assert (project.folder / "plans" / "old.profile.json").exists()


def test_a_plan_file_whose_model_is_gone_fails(project: Project) -> None:
    project.write("[project]\nname = 'x'\n", "pyproject.toml")
    project.model.rename(project.folder / "other.py")
    result = ckpt_plan("check", "plans/net.json")
    assert result.exit_code == 1
    assert "model.py that it was made for is gone" in result.stdout


def test_a_model_without_a_plan_fails_until_it_is_asked_for(project: Project) -> None:
    project.write(MODEL.replace("512, 64", "256, 64"), "second.py")
    config = (project.folder / "pyproject.toml").read_text() + 'second = { file = "second.py", strategy = "all" }\n'
    project.write(config, "pyproject.toml")
    before = project.files()
    result = ckpt_plan("check")
    assert result.exit_code == 1
    assert "There is no plan file plans/second.json yet" in result.stdout
    project.wider(1024)
    result = ckpt_plan("check", "--update-new-only")
    assert result.exit_code == 1, "the first model is checked all the same"
    assert "plans/second.json: new" in result.stdout
    assert {name: data for name, data in project.files().items() if "second" not in name} == before
    assert json.loads((project.folder / "plans" / "second.json").read_text())["strategy"] == "all"


def test_other_settings_than_the_plan_was_made_for_fail_until_accepted(project: Project) -> None:
    project.write((project.folder / "pyproject.toml").read_text().replace("70%", "85%"), "pyproject.toml")
    result = ckpt_plan("check")
    assert result.exit_code == 1
    assert "The budget asked for is 85%, and the plan was made for 70%" in result.stdout
    assert ckpt_plan("check", "--update").exit_code == 0
    assert ckpt_plan("check").exit_code == 0
    assert json.loads(project.plan.read_text())["budget"] == "85%"


def test_what_the_configuration_leaves_open_is_as_in_the_plan_file(project: Project) -> None:
    project.write('[tool.ckpt-plan]\nmodels = { net = "model.py" }\n', "pyproject.toml")
    assert ckpt_plan("check").stdout.splitlines()[-1] == "1 plan: 1 unchanged."
    project.write('[tool.ckpt-plan]\nbudget = "0.7e9"\nmodels = { net = "model.py" }\n', "pyproject.toml")
    assert ckpt_plan("check").exit_code == 2


def test_a_plan_is_not_made_on_another_device_than_asked_for(project: Project) -> None:
    result = ckpt_plan("lock", "model.py", "--budget", "70%", "--device", "cuda:77", "-o", "plans/other.json")
    assert (result.exit_code, result.stdout) == (2, "")
    assert "moving `model` to cuda:77 failed" in result.stderr
    assert not (project.folder / "plans" / "other.json").exists()


def test_other_inputs_fail_unless_allowed(project: Project) -> None:
    project.write(MODEL.replace("512, 64", "448, 64"))
    result = ckpt_plan("check")
    assert result.exit_code == 1
    assert "The example inputs were (float32[512,64],) and are (float32[448,64],)" in result.stdout
    kinds = ("inputs", "segments", "overhead", "peak")
    allowed = ckpt_plan("check", *(word for kind in kinds for word in ("--allow", kind)))
    assert (allowed.exit_code, "(allowed)" in allowed.stdout) == (0, True)


def test_an_optimizer_that_takes_more_memory_is_seen(project: Project) -> None:
    project.write(MODEL + "\n\noptimizer = torch.optim.Adam\n")
    result = ckpt_plan("check")
    found = json.loads(ckpt_plan("check", "--format", "json").stdout)[0]
    assert found["after"] is None or found["after"]["baseline_peak_bytes"] > found["before"]["baseline_peak_bytes"]
    assert found["modules"] == []
    assert result.exit_code == found["exit_code"] == 1
