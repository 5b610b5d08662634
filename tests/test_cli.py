"""The command: exit codes, streams, and errors that a user can act on. Planning is replaced by a made-up plan."""

from __future__ import annotations

import json
import random
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy
import plans
import pytest
import torch
from click.testing import CliRunner, Result

import ckpt_planner
from ckpt_planner.cli import main
from ckpt_planner.errors import InfeasibleBudgetError, VerificationError

MODEL = """
import torch
print("a line of the user's own")
def model():
    return torch.nn.Linear(3, 3)
def example_inputs():
    return torch.ones(2, 3)
"""


class Planned:
    """Stands in for `optimize`: notes how it was called, and returns a made-up plan or raises."""

    def __init__(self) -> None:
        self.plan = plans.plan()
        self.plan.measure = lambda: plans.measurement()
        self.plan.verify = lambda: None
        self.error: Exception | None = None
        self.call: SimpleNamespace = SimpleNamespace()

    def __call__(self, model: torch.nn.Module, **options: Any) -> Any:
        self.call = SimpleNamespace(model=model, **options)
        if self.error:
            raise self.error
        return self.plan


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> Planned:
    fake = Planned()
    monkeypatch.setattr(ckpt_planner, "optimize", fake, raising=False)
    return fake


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "net.py"
    path.write_text(MODEL)
    return path


def run(*arguments: object, **options: Any) -> Result:
    result = CliRunner().invoke(main, [str(a) for a in arguments], **options)
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def written(path: Path, text: str) -> Result:
    path.write_text(text)
    return run("report", path, "--budget", "60%")


def test_report_is_on_stdout_and_the_rest_is_not(planned: Planned, file: Path) -> None:
    result = run("report", file, "--budget", "60%")
    assert result.exit_code == 0
    assert "Memory at the peak" in result.stdout
    assert "a line of the user's own" not in result.stdout
    assert "a line of the user's own" in result.stderr
    assert "\x1b" not in result.stdout
    assert planned.call.budget == "60%"
    assert planned.call.strategy == "budget"
    assert planned.call.loss_fn is None
    assert planned.call.optimizer is None


def test_json(planned: Planned, file: Path) -> None:
    result = run("report", file, "--budget", "1GB", "--format", "json")
    assert json.loads(result.stdout)["peak_bytes"] == 54 * plans.MB


def test_output_file(planned: Planned, file: Path, tmp_path: Path) -> None:
    target = tmp_path / "out.json"
    result = run("report", file, "--format", "json", "-o", target)
    assert result.exit_code == 0
    assert result.stdout == ""
    assert f"Wrote {target}" in result.stderr
    assert json.loads(target.read_text())["strategy"] == "budget"
    assert run("report", file, "--format", "json", "-o", "-").stdout == target.read_text()


def test_output_folder_that_does_not_exist_is_found_before_planning(planned: Planned, file: Path) -> None:
    result = run("report", file, "-o", "nowhere/out.txt")
    assert result.exit_code == 2
    assert "nowhere" in result.stderr
    assert vars(planned.call) == {}


def test_options_reach_the_planner(planned: Planned, file: Path) -> None:
    assert run("report", file, "--strategy", "sqrt", "--optimizer", "AdamW", "--device", "meta").exit_code == 0
    assert planned.call.optimizer is torch.optim.AdamW
    assert planned.call.strategy == "sqrt"
    assert planned.call.budget is None
    assert planned.call.model.weight.device.type == "meta"
    assert planned.call.example_args[0].device.type == "meta"


def test_environment_is_below_the_command_line(planned: Planned, file: Path) -> None:
    assert run("report", file, env={"CKPT_PLAN_BUDGET": "7GB"}).exit_code == 0
    assert planned.call.budget == "7GB"
    assert run("report", file, "--budget", "8GB", env={"CKPT_PLAN_BUDGET": "7GB"}).exit_code == 0
    assert planned.call.budget == "8GB"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--budget", "8 gigs"], '"8GiB"'),
        (["--strategy", "best"], "'sqrt'"),
        (["--optimizer", "Adamant"], "AdamW"),
        (["--optimizer", "Optimizer"], "AdamW"),
        (["--device", "nowhere"], "nowhere"),
        (["--format", "xml"], "json"),
        (["--nonsense"], "--nonsense"),
    ],
)
def test_wrong_usage_is_2_and_says_what_is_right(planned: Planned, file: Path, arguments: list[str], said: str) -> None:
    result = run("report", file, *arguments)
    assert result.exit_code == 2
    assert said in result.stderr
    assert result.stdout == ""


def test_budget_that_cannot_be_kept_is_1(planned: Planned, file: Path) -> None:
    planned.error = InfeasibleBudgetError("needs at least 3 GB", budget_bytes=1, minimum_bytes=3)
    result = run("report", file, "--budget", "1GB")
    assert (result.exit_code, result.stdout) == (1, "")
    assert "Error: needs at least 3 GB" in result.stderr


def test_measure_and_verify_are_reported(planned: Planned, file: Path) -> None:
    result = run("report", file, "--measure", "--verify", "--format", "json")
    assert result.exit_code == 0
    data = json.loads(result.stdout)
    assert data["measurement"]["peak_bytes"] == 53 * plans.MB
    assert data["verified"] is True


def test_measured_peak_above_the_budget_is_1_with_the_report(planned: Planned, file: Path) -> None:
    planned.plan.measure = lambda: plans.measurement(peak_bytes=61 * plans.MB)
    result = run("report", file, "--measure")
    assert result.exit_code == 1
    assert "BREAKS" in result.stdout
    assert "above the budget" in result.stderr


def test_a_difference_is_1_with_the_report(planned: Planned, file: Path) -> None:
    def differ() -> None:
        raise VerificationError("the gradient of `weight` differs")

    planned.plan.verify = differ
    result = run("report", file, "--verify", "--format", "json")
    assert result.exit_code == 1
    assert json.loads(result.stdout)["verified"] is False
    assert "the gradient of `weight` differs" in result.stderr


@pytest.mark.parametrize(
    ("value", "args", "kwargs"),
    [
        ("torch.ones(2, 3)", 1, []),
        ("(torch.ones(2, 3), 4)", 2, []),
        ("{'input': torch.ones(2, 3)}", 0, ["input"]),
        ("((torch.ones(2, 3),), {'x': 1})", 1, ["x"]),
        ("lambda: {'input': torch.ones(2, 3)}", 0, ["input"]),
        ("()", 0, []),
    ],
)
def test_kinds_of_inputs(planned: Planned, tmp_path: Path, value: str, args: int, kwargs: list[str]) -> None:
    text = f"import torch\nmodel = torch.nn.Linear(3, 3)\nexample_inputs = {value}\n"
    assert written(tmp_path / "net.py", text).exit_code == 0
    assert len(planned.call.example_args) == args
    assert list(planned.call.example_kwargs) == kwargs


def test_other_name_loss_and_optimizer_of_the_file(planned: Planned, tmp_path: Path) -> None:
    path = tmp_path / "net.py"
    path.write_text(
        MODEL + "class Net(torch.nn.Linear):\n    def __init__(self):\n        super().__init__(3, 1)\n"
        "def loss_fn(output):\n    return output.sum()\n"
        "def optimizer(parameters):\n    return torch.optim.SGD(parameters, lr=1)\n"
    )
    assert run("report", f"{path}:Net").exit_code == 0
    assert type(planned.call.model).__name__ == "Net"
    assert planned.call.loss_fn(torch.ones(2)) == 2
    assert isinstance(planned.call.optimizer, torch.optim.SGD)
    assert run("report", f"{path}:Net", "--optimizer", "none").exit_code == 0
    assert planned.call.optimizer is None


def test_model_in_eval_mode_is_put_in_training_mode(planned: Planned, tmp_path: Path) -> None:
    result = written(tmp_path / "net.py", MODEL.replace("Linear(3, 3)", "Linear(3, 3).eval()"))
    assert planned.call.model.training
    assert "training mode" in result.stderr


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ny = x +\n", "line 2"),
        ("x = 1\ny = nothing\n", "line 2"),
        ("\n\nimport not_a_package_of_anyone\n", "line 3"),
        ("import sys\nsys.exit('no GPU here')\n", "no GPU here"),
        ("def model():\n    raise RuntimeError('sizes differ')\n", "line 2, in model"),
        ("", "`model` is not defined"),
        ("model = 3\n", "type int"),
        ("import torch\nmodel = torch.nn.Linear(3, 3)\n", "`example_inputs` is not defined"),
        ("import torch\nmodel = torch.nn.Linear(3, 3)\nexample_inputs = 'x'\n", "type str"),
        ("import torch\nmodel = torch.nn.Linear(3, 3)\nexample_inputs = ()\nloss_fn = 3\n", "`loss_fn`"),
        ("import torch\nmodel = torch.nn.Linear(3, 3)\nexample_inputs = ()\noptimizer = 'Adam'\n", "`optimizer`"),
    ],
)
def test_errors_of_the_file_have_its_name_and_line(planned: Planned, tmp_path: Path, text: str, said: str) -> None:
    result = written(tmp_path / "net.py", text)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert "net.py" in result.stderr
    for ours in ("userfile.py", "cli.py", "importlib"):
        assert ours not in result.stderr
    if "is not defined" in said:
        assert "def example_inputs():" in result.stderr


def test_a_file_that_is_not_there(planned: Planned, tmp_path: Path) -> None:
    for target in (tmp_path / "nowhere.py", f"{tmp_path / 'nowhere.py'}:model", tmp_path):
        result = run("report", target)
        assert (result.exit_code, result.stdout) == (2, "")
        assert "no such file" in result.stderr
    (tmp_path / "net.txt").write_text(MODEL)
    assert "end in .py" in run("report", tmp_path / "net.txt").stderr


def test_what_the_file_draws_from_any_generator_is_the_same_each_time(planned: Planned, tmp_path: Path) -> None:
    text = """
import random
import numpy
import torch
DRAWN = [random.random(), numpy.random.rand(), torch.rand(()).item()]
def model():
    net = torch.nn.Linear(3, 3)
    net.drawn = DRAWN
    return net
def example_inputs():
    return torch.ones(2, 3)
"""
    drawn = []
    for name in ("one", "two"):
        written(tmp_path / f"{name}.py", text)
        after = [random.random(), numpy.random.rand(), torch.rand(()).item()]
        drawn.append((planned.call.model.drawn, after))
        random.seed(name)
        numpy.random.seed(len(drawn) + 5)
        torch.manual_seed(len(drawn) + 5)
    assert drawn[0] == drawn[1]
    # Planning starts from the seed too, whatever the file drew.
    assert drawn[0][0] == drawn[0][1]


def test_neighbours_of_the_file_can_be_imported(planned: Planned, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_net.py").write_text(MODEL)
    assert written(tmp_path / "torch.py", "from neighbour_of_net import *\n").exit_code == 0
    assert planned.call.model.in_features == 3


def test_version_and_help() -> None:
    assert run("--version").stdout.startswith("ckpt-plan, version ")
    assert "free memory" in run("report", "--help").stdout


def test_the_command_starts_without_torch() -> None:
    code = "import sys, ckpt_planner.cli, ckpt_planner.textreport; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0
