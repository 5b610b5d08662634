"""The fixture `ckpt_plan`: a plan file beside the test, written when asked, and a short failure where it got worse."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

TESTS = """\
import pytest
import torch
from torch import nn

WIDE = 256


def net(width):
    return nn.Sequential(nn.Linear(64, width), nn.GELU(), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, 1))


class TestNets:
    @pytest.mark.parametrize("kind", ["a/b"])
    def test_same(self, ckpt_plan, kind):
        ckpt_plan.check(net(256), torch.ones(256, 64), budget="100%", loss_fn=torch.mean)


def test_wide(ckpt_plan):
    inputs = {"input": torch.ones(256, 64)}
    ckpt_plan.check(net(WIDE), inputs, budget="100MB", strategy="none", loss_fn=torch.mean, optimizer=torch.optim.Adam)


def test_twice(ckpt_plan):
    with pytest.raises(pytest.fail.Exception, match="give each model a name="):
        for _ in range(2):
            ckpt_plan.check(net(8), torch.ones(4, 64), budget="100%", loss_fn=torch.mean, name="small")


def test_eval(ckpt_plan):
    with pytest.raises(pytest.fail.Exception, match="eval mode"):
        ckpt_plan.check(net(8).eval(), torch.ones(4, 64), budget="100%", name="eval")
    with pytest.raises(pytest.fail.Exception, match="budget '8 gigs'"):
        ckpt_plan.check(net(8), torch.ones(4, 64), budget="8 gigs", name="gigs")
    with pytest.raises(pytest.fail.Exception, match="'speed' is unknown"):
        ckpt_plan.check(net(8), torch.ones(4, 64), budget="80%", name="allow", allow=["speed"])
"""


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "test_nets.py", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, env={**os.environ, "COLUMNS": "200"})


def test_a_plan_through_its_life_in_a_test_suite(tmp_path: Path) -> None:
    file, plans = tmp_path / "test_nets.py", tmp_path / "plans" / "test_nets"
    file.write_text(TESTS)

    first = run(tmp_path)
    assert first.returncode == 1
    assert "There is no plan file plans/test_nets/test_wide.json yet" in first.stdout
    assert "pytest --ckpt-plan-update" in first.stdout
    assert not plans.exists()

    asked = run(tmp_path, "--ckpt-plan-update")
    assert asked.returncode == 0, asked.stdout
    assert "ckpt-plan: wrote plans/test_nets/test_wide.json" in asked.stdout
    names = ["TestNets.test_same-a-b", "small", "test_wide"]
    assert sorted(p.name for p in plans.iterdir()) == sorted(
        f"{n}{e}" for n in names for e in (".json", ".profile.json")
    )
    assert json.loads((plans / "test_wide.json").read_text())["model"] == "../../test_nets.py::test_wide"
    before = {p.name: p.read_bytes() for p in plans.iterdir()}

    file.write_text(TESTS.replace("WIDE = 256", "WIDE = 512"))
    worse = run(tmp_path)
    assert worse.returncode == 1
    assert "1 failed, 3 passed" in worse.stdout, worse.stdout
    shown = worse.stdout.partition("FAILURES")[2].partition("short test summary")[0].splitlines()[1:-1]
    assert len([line for line in shown if line.strip() and not line.startswith(("_", "="))]) <= 10
    assert f"+{256 * 256 * 4:,} B saved for backward" in worse.stdout
    assert "To accept it: pytest --ckpt-plan-update test_nets.py::test_wide" in worse.stdout
    assert "Traceback" not in worse.stdout
    assert {p.name: p.read_bytes() for p in plans.iterdir()} == before


def test_the_plugin_imports_nothing_heavy() -> None:
    code = (
        "import sys, ckpt_planner.pytest_plugin; "
        "sys.exit(', '.join({'torch', 'numpy', 'ortools', 'networkx', 'click'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
