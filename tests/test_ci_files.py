"""Plan files that are damaged, foreign, of another version, changed or in the way: a clear error, exit code 2."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest
from ci_repo import ckpt_plan
from profiles import transformer

from ckpt_planner.canonical import canonical, fingerprints
from ckpt_planner.errors import PlanMismatchError
from ckpt_planner.lockfile import Locked, LockedProfile, Settings
from ckpt_planner.lockio import read_locked, render_plan, render_profile, write_locked
from ckpt_planner.profile import Profile
from ckpt_planner.relock import budget_of, relock


@pytest.fixture(scope="module")
def source() -> LockedProfile:
    profile = canonical(transformer(2))
    return LockedProfile(profile, fingerprints(profile), ("mul:act",))


@pytest.fixture(scope="module")
def locked(source: LockedProfile) -> Locked:
    budget = budget_of("80%", source.profile)
    return relock(source, Settings("../model.py", "80%"), budget, 0, "net.profile.json")


@pytest.fixture
def plan(tmp_path: Path, source: LockedProfile, locked: Locked, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A plan file and its profile, in the present folder."""
    monkeypatch.chdir(tmp_path)
    path = Path("plans/net.json")
    write_locked(path, locked, source, replace=False)
    return path


def test_what_is_written_is_read_again(plan: Path, source: LockedProfile) -> None:
    locked, found = read_locked(plan)
    assert found == source
    assert render_plan(locked) == plan.read_bytes()
    assert render_profile(found) == plan.with_name("net.profile.json").read_bytes()
    assert locked.settings == Settings("../model.py", "80%")


def test_an_item_a_line_and_whole_numbers(plan: Path) -> None:
    lines = plan.read_text().splitlines()
    segments = json.loads(plan.read_text())["segments"]
    assert len(segments) > 2
    for segment in segments:
        assert any(json.loads(line.rstrip(",")) == segment for line in lines if line.startswith("  {"))
    rows = [
        json.loads(x.rstrip(",")) for x in plan.with_name("net.profile.json").read_text().splitlines() if x[:3] == "  {"
    ]
    times = [v for row in rows for k, v in row.items() if k.endswith("ns") and not isinstance(v, str)]
    assert len(times) > 50
    assert all(isinstance(t, int) for t in times)


def damaged(path: Path, how: str) -> str:
    """Damages a file; returns what the error has to say."""
    data, content = json.loads(path.read_text()), path.read_bytes()
    kind = "profile file" if "profile" in path.name else "plan file"
    if how == "truncated":
        path.write_bytes(content[: len(content) // 2])
        return "damaged"
    if how == "corrupted":
        path.write_bytes(content.replace(b'"', b"\xff", 3))
        return "damaged"
    if how == "empty":
        path.write_bytes(b"")
        return "damaged"
    if how == "unmerged":
        path.write_bytes(b"<<<<<<< HEAD\n" + content)
        return "unfinished merge"
    if how == "foreign":
        path.write_text('{"name": "a package", "version": "1.0"}')
        return f"is no {kind} of ckpt-planner"
    if how == "a list":
        path.write_text("[1, 2]")
        return f"is no {kind} of ckpt-planner"
    if how == "future":
        path.write_text(json.dumps({**data, "schema": 99}))
        return "Upgrade ckpt-planner"
    if how == "past":
        path.write_text(json.dumps({**data, "schema": 0}))
        return "Make it anew"
    if how == "other types":
        key = "ops" if "profile" in path.name else "segments"
        path.write_text(json.dumps({**data, key: [{"bytes_freed": "many"}]}))
        return "damaged"
    if how == "a key is missing":
        del data["device"]
        path.write_text(json.dumps(data))
        return "damaged"
    if how == "by hand":
        key = "parameter_bytes" if "profile" in path.name else "budget_bytes"
        path.write_text(json.dumps({**data, key: data[key] + 1}))
        return "changed"
    assert how == "gone"
    path.unlink()
    return "cannot be read"


KINDS = (
    "truncated", "corrupted", "empty", "unmerged", "foreign", "a list", "future", "past", "other types",
    "a key is missing", "by hand", "gone",
)  # fmt: skip


@pytest.mark.parametrize("file", ["net.json", "net.profile.json"])
@pytest.mark.parametrize("how", KINDS)
def test_a_file_that_cannot_be_used_is_2_and_is_named(plan: Path, how: str, file: str) -> None:
    said = damaged(plan.with_name(file), how)
    with pytest.raises(PlanMismatchError, match="net") as error:
        read_locked(plan)
    assert error.value.exit_code == 2
    assert said in str(error.value)
    assert file in str(error.value)


def test_the_commands_say_so_too(plan: Path) -> None:
    said = damaged(plan, "future")
    result = ckpt_plan("check", plan)
    assert result.exit_code == 2
    assert "plans/net.json: ERROR" in result.stdout
    assert said in result.stdout
    result = ckpt_plan("diff", plan, plan)
    assert (result.exit_code, result.stdout) == (2, "")
    assert said in result.stderr
    assert ckpt_plan("check", "plans/nowhere.json").exit_code == 2
    assert ckpt_plan("check").exit_code == 2


def test_nothing_is_overwritten_without_being_asked(plan: Path, source: LockedProfile) -> None:
    before = {path: path.read_bytes() for path in plan.parent.iterdir()}
    Path("other.profile.json").write_bytes(render_profile(source))
    again = ("lock", "model.py", "--profile", "other.profile.json", "--budget", "90%")
    for leftover in ("net.json", "net.profile.json"):
        result = ckpt_plan(*again, "-o", plan)
        assert result.exit_code == 2
        assert "--force" in result.stderr
        assert all(path.read_bytes() == content for path, content in before.items() if path.exists())
        plan.with_name(leftover).unlink()
        if leftover == "net.json":
            assert "net.profile.json exists already" in ckpt_plan(*again, "-o", plan).stderr
            plan.write_bytes(before[plan])
    assert ckpt_plan(*again, "-o", plan, "--force").exit_code == 0
    assert json.loads(plan.read_text())["budget"] == "90%"
    assert sorted(path.name for path in plan.parent.iterdir()) == ["net.json", "net.profile.json"]


def test_an_old_file_stays_whole_where_writing_fails(plan: Path, source: LockedProfile) -> None:
    locked, _ = read_locked(plan)
    blocked = Path("blocked")
    blocked.write_text("a file, not a folder")
    with pytest.raises(PlanMismatchError, match="cannot be written"):
        write_locked(blocked / "net.json", locked, source, replace=True)
    assert read_locked(plan)[0] == locked


def test_deciding_again_for_another_budget_needs_no_model(plan: Path) -> None:
    result = ckpt_plan(
        "lock", "gone.py:net", "--profile", "plans/net.profile.json", "--budget", "90%", "-o", "b/x.json"
    )
    assert result.exit_code == 0, result.output
    assert json.loads(Path("b/x.json").read_text())["model"] == "../gone.py:net"
    no_budget = ckpt_plan("lock", "gone.py", "--profile", "plans/net.profile.json", "-o", "c/x.json")
    assert (no_budget.exit_code, "a budget is needed" in no_budget.stderr) == (2, True)
    tight = ckpt_plan("lock", "gone.py", "--profile", "plans/net.profile.json", "-o", "c/x.json", "--budget", "1MB")
    assert (tight.exit_code, "cannot be done in" in tight.stderr) == (1, True)
    assert not Path("c").exists()


def test_the_canonical_form_forgets_the_order_of_registration() -> None:
    profile = transformer(2)
    order = list(range(len(profile.storages)))[::-1]
    number = {old: new for new, old in enumerate(order)}

    def of(storages: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(number[s] for s in storages)

    ops = tuple(
        msgspec.structs.replace(
            op,
            place="elsewhere.py:7",
            reads=tuple(msgspec.structs.replace(r, storage=number[r.storage]) for r in op.reads),
            makes=of(op.makes), hides=of(op.hides), writes=of(op.writes), output=of(op.output), choices=of(op.choices),
        )
        for op in profile.ops
    )  # fmt: skip
    shuffled: Profile = msgspec.structs.replace(
        profile,
        storages=tuple(profile.storages[s] for s in order),
        ops=ops,
        slots=tuple(msgspec.structs.replace(x, storage=number[x.storage]) for x in profile.slots),
    )
    assert shuffled != profile
    assert canonical(shuffled) == canonical(profile) == canonical(canonical(profile))
    assert fingerprints(shuffled) == fingerprints(profile)


def test_a_fingerprint_tells_steps_apart(source: LockedProfile) -> None:
    profile = source.profile
    longer = list(profile.storages)
    held = next(i for i, s in enumerate(longer) if s.kind == "value" and s.death < len(profile.ops))
    longer[held] = msgspec.structs.replace(longer[held], death=longer[held].death + 1)
    hidden = next(i for i, s in enumerate(longer) if s.kind == "hidden")
    larger = list(profile.storages)
    larger[hidden] = msgspec.structs.replace(larger[hidden], bytes=larger[hidden].bytes + 4)
    slower = tuple(msgspec.structs.replace(op, seconds=2 * op.seconds, workspace_bytes=0) for op in profile.ops)
    replace, own = msgspec.structs.replace, fingerprints(profile)
    assert fingerprints(replace(profile, storages=tuple(longer))).calls != own.calls
    other_kernels = fingerprints(replace(profile, storages=tuple(larger)))
    assert (other_kernels.calls, other_kernels.record != own.record) == (own.calls, True)
    assert fingerprints(replace(profile, ops=slower)) == own
