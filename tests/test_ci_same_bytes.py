"""The same profile and budget give the same plan file, byte for byte, wherever and however it is decided."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from profiles import transformer

from ckpt_planner.canonical import canonical, fingerprints
from ckpt_planner.lockfile import LockedProfile
from ckpt_planner.lockio import render_profile

COMMAND = """
import sys
from ckpt_planner.cli import main
try:
    main(sys.argv[1:])
finally:
    assert "torch" not in sys.modules, "deciding has loaded torch"
"""


@pytest.fixture(scope="module")
def profile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = canonical(transformer(3))
    path = tmp_path_factory.mktemp("profile") / "net.profile.json"
    path.write_bytes(render_profile(LockedProfile(found, fingerprints(found))))
    return path


def decided(profile: Path, folder: Path, cwd: Path, **env: str) -> tuple[bytes, bytes]:
    """Both files, as decided in a process of its own."""
    folder.mkdir()
    (folder.parent / "model.py").touch()
    plan = folder / "net.json"
    target, output, source = (os.path.relpath(path, cwd) for path in (folder.parent / "model.py", plan, profile))
    arguments = ["lock", target, "--budget", "75%", "--profile", source, "-o", output]
    command = [sys.executable, "-c", COMMAND, *arguments]
    done = subprocess.run(command, cwd=cwd, env={**os.environ, **env}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return plan.read_bytes(), (folder / "net.profile.json").read_bytes()


def test_under_other_hash_seeds_locales_folders_and_threads(profile: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "föreign ordner"
    elsewhere.mkdir()
    one = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    two = {"OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"}
    found = {
        decided(profile, tmp_path / "a", tmp_path, PYTHONHASHSEED="0", LC_ALL="C", **one),
        decided(profile, tmp_path / "b", elsewhere, PYTHONHASHSEED="1", LC_ALL="C.UTF-8", PYTHONUTF8="0", **two),
        decided(profile, tmp_path / "c", Path("/"), PYTHONHASHSEED="2", LANG="de_DE.UTF-8", TZ="Asia/Tokyo", **two),
    }
    assert len(found) == 1
    plan, beside = found.pop()
    assert beside == profile.read_bytes()
    assert plan.count(b"\n") > 30
    assert b"\r" not in plan
    assert str(tmp_path).encode() not in plan
