"""What a changed model costs by a committed profile, on the same device and on another one."""

from __future__ import annotations

import random
import re
import sys
from pathlib import Path

import msgspec
import plans
import pytest
import torch
from ci_repo import REFACTORED, ROWS, Project, ckpt_plan, make
from profiles import transformer

from ckpt_planner.canonical import Fingerprints, canonical, fingerprints
from ckpt_planner.costs import priced
from ckpt_planner.errors import InfeasibleBudgetError
from ckpt_planner.lock import subject_of
from ckpt_planner.lockfile import LockedProfile, Settings
from ckpt_planner.lockio import read_locked, write_locked
from ckpt_planner.profile import Profile
from ckpt_planner.regress import figures
from ckpt_planner.relock import decided, relock


def slower(profile: Profile, factor: float) -> Profile:
    """The same step on another machine."""
    replace = msgspec.structs.replace
    return replace(
        profile,
        ops=tuple(replace(op, seconds=factor * op.seconds) for op in profile.ops),
        steps=tuple(replace(step, seconds=factor * step.seconds) for step in profile.steps),
    )


def made_up(layers: int) -> Profile:
    """A transformer whose calls have a signature for each kind of work, as real ones do."""
    profile = transformer(layers)
    ops = tuple(
        msgspec.structs.replace(op, signature=re.sub(r"\d+", "N", f"{op.name}{'x' * len(op.reads)}@{op.module}"))
        for op in profile.ops
    )
    return msgspec.structs.replace(profile, ops=ops)


def locked(profile: Profile) -> LockedProfile:
    return LockedProfile(canonical(profile), fingerprints(profile))


def test_what_the_profile_knows_keeps_its_times_to_the_nanosecond() -> None:
    old = locked(made_up(2))
    fresh = slower(made_up(2), 3.7)
    found = priced(old, fresh, fresh)
    assert found.new == ()
    assert found.source.estimated == ()
    assert found.source.profile.ops == old.profile.ops
    assert found.source.profile.step_seconds == pytest.approx(old.profile.step_seconds, abs=1e-6)


def test_what_is_new_is_scaled_to_the_profiles_machine() -> None:
    old = locked(made_up(2))
    fresh = slower(made_up(3), 3.7)
    other = [i for i, op in enumerate(fresh.ops) if op.module == "h.2.mlp.act"]
    ops = tuple(
        msgspec.structs.replace(op, signature=f"other {op.signature}") if i in other else op
        for i, op in enumerate(fresh.ops)
    )
    fresh = msgspec.structs.replace(fresh, ops=ops)
    found = priced(old, fresh, fresh)
    assert list(found.new) == other
    assert found.scale == pytest.approx(1 / 3.7, rel=1e-4)
    expected = canonical(made_up(3))
    for i in other:
        assert found.source.profile.ops[i].seconds == pytest.approx(expected.ops[i].seconds, rel=1e-3)
    assert found.source.estimated == tuple(sorted({op.signature for op in ops if op.signature.startswith("other")}))
    assert found.source.profile.step_seconds == pytest.approx(expected.step_seconds, rel=1e-3)
    again = priced(found.source, fresh, fresh)
    assert again.new == ()
    assert again.source.estimated == found.source.estimated, "an estimate stays one until the model is locked anew"
    assert again.source.profile.ops == found.source.profile.ops


def test_the_overhead_is_the_reports_and_holds_what_following_costs(tmp_path: Path) -> None:
    followed = msgspec.structs.replace(made_up(2), follow_op_seconds=12.3456789e-6)
    source = locked(followed)
    budget = decided(source.profile, 10**12, "none").plain.peak_bytes * 3 // 4
    decision = decided(source.profile, budget, "budget")
    plan = relock(source, Settings("m.py", str(budget)), budget, profile_name="net.profile.json")
    assert plan.overhead == round(plans.plan_of(decision).overhead, 4)
    assert plan.overhead == pytest.approx((plan.recompute_us + plan.follow_us) / plan.baseline_step_us, abs=1e-3)
    assert plan.follow_us == round(decision.follow_seconds * 1e6) > 0
    assert figures(plan).overhead == plan.overhead
    # The same from the file, whose times are whole nanoseconds.
    write_locked(tmp_path / "net.json", plan, source, replace=False)
    assert relock(read_locked(tmp_path / "net.json")[1], plan.settings, budget, 0, "net.profile.json") == plan
    slow = msgspec.structs.replace(followed, follow_op_seconds=1.0)
    assert priced(source, slow, slow).source.profile.follow_op_seconds == source.profile.follow_op_seconds


def test_without_anything_in_common_times_are_as_measured() -> None:
    old, fresh = locked(made_up(1)), made_up(1)
    ops = tuple(msgspec.structs.replace(op, signature=f"other {op.signature}") for op in fresh.ops)
    fresh = msgspec.structs.replace(fresh, ops=ops)
    found = priced(old, fresh, fresh)
    assert found.scale is None
    assert [op.seconds for op in found.source.profile.ops] == [op.seconds for op in canonical(fresh).ops]


def test_a_margin_is_kept_and_all_of_it_means_the_smallest_peak() -> None:
    profile = canonical(made_up(2))
    plain = decided(profile, 10**12, "none").plain.peak_bytes
    budget = plain * 9 // 10
    wide = decided(profile, budget, "budget")
    tight = decided(profile, budget, "budget", budget // 20)
    smallest = decided(profile, budget, "budget", budget)
    assert smallest.timeline.peak_bytes < tight.timeline.peak_bytes <= budget - budget // 20 < wide.timeline.peak_bytes
    for decision in (wide, tight, smallest):
        target = decision.target_bytes
        plan = relock(locked(profile), Settings("m.py", "9"), budget, 0 if target is None else budget - target)
        assert plan.peak_bytes == decision.timeline.peak_bytes
    with pytest.raises(InfeasibleBudgetError):
        decided(profile, smallest.timeline.peak_bytes - 1, "budget", smallest.timeline.peak_bytes - 1)


@pytest.fixture(scope="module")
def elsewhere(tmp_path_factory: pytest.TempPathFactory) -> Project:
    """A project whose plan was made on a device that is not here: other kernels, other bytes saved by them."""
    project = make(tmp_path_factory.mktemp("elsewhere") / "project")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(project.folder)
        assert ckpt_plan("lock", "model.py", "--budget", "70%", "-o", "plans/net.json").exit_code == 0
    plan, source = read_locked(project.plan)
    hidden = {s for op in source.profile.ops for s in op.hides}
    assert hidden
    storages = tuple(
        msgspec.structs.replace(x, bytes=8 * x.bytes) if s in hidden else x
        for s, x in enumerate(source.profile.storages)
    )
    profile = msgspec.structs.replace(source.profile, storages=storages, device="A GPU")
    source = LockedProfile(profile, Fingerprints(source.fingerprints.calls, "another"))
    budget = plan.budget_bytes * 2
    made = relock(source, Settings("../model.py", str(budget), device="cuda:9"), budget, 0, "net.profile.json")
    write_locked(project.plan, made, source, replace=True)
    project.write(
        f'[tool.ckpt-plan]\nbudget = "{budget}"\ndevice = "cuda:9"\nmodels = {{ net = "model.py" }}\n', "pyproject.toml"
    )
    return project


def test_a_plan_of_another_device_stands_while_the_calls_are_the_same(
    elsewhere: Project, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(elsewhere.folder)
    elsewhere.write(REFACTORED)
    before = elsewhere.files()
    result = ckpt_plan("check", "--update")
    assert (result.exit_code, result.stdout.splitlines()[-1]) == (0, "1 plan: 1 unchanged.")
    assert elsewhere.files() == before


def test_where_the_calls_change_only_that_device_can_tell(elsewhere: Project, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(elsewhere.folder)
    elsewhere.wider(320)
    before = elsewhere.files()
    result = ckpt_plan("check", "--update")
    assert result.exit_code == 1
    assert "the profile is of A GPU" in result.stdout
    assert f"module layers.1.wide: +{64 * ROWS * 4:,} B saved for backward" in result.stdout
    assert "layers.0" not in result.stdout, "what other kernels save is no change of the model"
    assert elsewhere.files() == before
    allowed = ckpt_plan("check", "--allow", "device", "--allow", "segments", "--format", "json")
    assert '"after": {' in allowed.stdout


def test_a_model_that_draws_its_path_takes_the_same_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = """import random
import torch

class Dropped(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(8, 8) for _ in range(12))

    def forward(self, x):
        for layer in self.layers:
            if random.random() < 0.5 and torch.rand(()) < 0.8:
                x = layer(x)
        return self.layers[0](x).sum()

def model():
    return Dropped()

def example_inputs():
    return torch.ones(2, 8)
"""
    Path("model.py").write_text(text)
    assert ckpt_plan("lock", "model.py", "--budget", "100%", "-o", "plan.json").exit_code == 0
    Path("model.py").write_text(
        text.replace("    return Dropped()", "    random.random(), torch.rand(3)\n    return Dropped()")
    )
    random.seed(5)
    torch.manual_seed(5)
    state = random.getstate(), torch.get_rng_state()
    assert ckpt_plan("check", "plan.json").stdout.splitlines()[-1] == "1 plan: 1 unchanged."
    assert random.getstate() == state[0]
    assert torch.equal(torch.get_rng_state(), state[1])


def test_packages_installed_below_a_models_folder_stay_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    packages = tmp_path / ".venv" / "lib" / "site-packages"
    packages.mkdir(parents=True)
    (packages / "package_of_a_venv.py").touch()
    (tmp_path / "neighbour_of_a_model.py").touch()
    monkeypatch.syspath_prepend(str(packages))
    (tmp_path / "model.py").write_text(
        "import torch, package_of_a_venv, neighbour_of_a_model\nmodel = torch.nn.Linear(2, 1)\n"
        "example_inputs = torch.ones(3, 2)\nloss_fn = torch.sum\n"
    )
    with subject_of("model.py"):
        assert "neighbour_of_a_model" in sys.modules
    assert "neighbour_of_a_model" not in sys.modules
    assert sys.modules.pop("package_of_a_venv")


def test_two_models_with_neighbours_of_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    text = (
        "import torch\nfrom parts import WIDTH\n\ndef model():\n    return torch.nn.Linear(WIDTH, 1)\n\n"
        "def example_inputs():\n    return torch.ones(2, WIDTH)\n\ndef loss_fn(output):\n    return output.sum()\n"
    )
    for name, width in (("a", 3), ("b", 5)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "model.py").write_text(text)
        (tmp_path / name / "parts.py").write_text(f"WIDTH = {width}\n")
    config = '[tool.ckpt-plan]\nbudget = "100%"\nmodels = { a = "a/model.py", b = "b/model.py" }\n'
    (tmp_path / "pyproject.toml").write_text(config)
    assert ckpt_plan("check", "--update-new-only").exit_code == 0
    assert [read_locked(Path(f"plans/{n}.json"))[0].inputs for n in "ab"] == ["(float32[2,3],)", "(float32[2,5],)"]
    assert ckpt_plan("check").stdout.splitlines()[-1] == "2 plans: 2 unchanged."
