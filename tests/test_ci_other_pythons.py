"""The same profile and budget give the same plan file, byte for byte, under every release of Python.

Deciding needs no torch, so an environment for it is small. Interpreters are looked for on PATH and among pyenv's; the
variable CKPT_PLANNER_PYTHONS names others, separated as PATH is.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib import metadata
from pathlib import Path

import pytest
from profiles import layered, transformer

from ckpt_planner.canonical import canonical, fingerprints
from ckpt_planner.lockfile import LockedProfile
from ckpt_planner.lockio import render_profile
from ckpt_planner.profile import Profile

ROOT = Path(__file__).parent.parent
RELEASES = ("3.10", "3.13", "3.14")
THIS = f"{sys.version_info[0]}.{sys.version_info[1]}"
NEEDED = ("numpy", "networkx", "msgspec")  # and the solver, whose release has to be this one's
INSTALL_SECONDS = 45

# What it prints: the plan files of every profile, at several budgets, or the smallest budget that can be kept.
DECIDE = """
import sys
from pathlib import Path
from ckpt_planner.errors import InfeasibleBudgetError
from ckpt_planner.lockfile import Settings
from ckpt_planner.lockio import read_profile_file, render_plan
from ckpt_planner.relock import budget_of, relock
for path in sys.argv[1:]:
    source = read_profile_file(Path(path))
    for budget in ("85%", "65%", "1%"):
        try:
            plan = relock(source, Settings("model.py", budget), budget_of(budget, source.profile))
            sys.stdout.buffer.write(render_plan(plan))
        except InfeasibleBudgetError as error:
            sys.stdout.buffer.write(str(error).encode())
assert "torch" not in sys.modules, "deciding has loaded torch"
print(sys.version.split()[0], file=sys.stderr)
"""


def candidates(release: str) -> list[str]:
    """Paths at which an interpreter of a release may be."""
    named = os.environ.get("CKPT_PLANNER_PYTHONS")
    if named is not None:
        return [path for path in named.split(os.pathsep) if path]
    roots = dict.fromkeys((os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv", Path.home() / ".pyenv"))
    installed = [str(p) for root in roots for p in sorted(Path(root).glob(f"versions/{release}*/bin/python"))]
    on_path = shutil.which(f"python{release}")
    return [*installed, *([on_path] if on_path else [])]


def interpreter(release: str) -> str | None:
    """An interpreter of a release that runs; a shim of pyenv may lead nowhere."""
    ask = "import sys, venv; print('%d.%d' % sys.version_info[:2], sys.implementation.name)"
    for path in candidates(release):
        try:
            done = subprocess.run([path, "-c", ask], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            continue
        if done.returncode == 0 and done.stdout.split() == [release, "cpython"]:
            return path
    return None


def environment(python: str, folder: Path) -> str:
    """An environment of that interpreter with what deciding needs; skips the test where that cannot be had."""
    subprocess.run([python, "-m", "venv", "--without-pip", str(folder)], check=True, capture_output=True)
    made = str(folder / "bin" / "python")
    wanted = [f"ortools=={metadata.version('ortools')}", *NEEDED]
    pip = [sys.executable, "-m", "pip", "--python", made, "--disable-pip-version-check", "--timeout", "5"]
    # Without what they depend on (pandas and the like, of which deciding imports none), for speed.
    install = [*pip, "install", "--retries", "0", "--only-binary", ":all:", "--no-deps", "--no-compile"]
    install += ["--constraint", str(ROOT / "scripts" / "constraints.txt"), *wanted]
    try:
        done = subprocess.run(install, capture_output=True, text=True, timeout=INSTALL_SECONDS)
    except subprocess.TimeoutExpired:
        pytest.skip(f"pip took more than {INSTALL_SECONDS} s to install {', '.join(wanted)} for {python}")
    if done.returncode:
        said = [line for line in done.stderr.splitlines() if line.startswith("ERROR")] or ["it says nothing"]
        pytest.skip(f"pip cannot install {', '.join(wanted)} for {python} (no network?): {said[0]}")
    return made


def decided(python: str, package: Path, profiles: list[Path]) -> bytes:
    """The plan files that an interpreter makes of the profiles."""
    done = subprocess.run(
        [python, "-c", DECIDE, *map(str, profiles)],
        env={**os.environ, "PYTHONPATH": str(package)},
        capture_output=True,
    )
    assert done.returncode == 0, done.stderr.decode()
    return done.stdout


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that holds the package under its import name, for interpreters that it is not installed for."""
    folder = tmp_path_factory.mktemp("package")
    (folder / "ckpt_planner").symlink_to(ROOT / "planner")
    return folder


@pytest.fixture(scope="module")
def profiles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("profiles")

    def saved(name: str, profile: Profile) -> Path:
        path, found = folder / f"{name}.profile.json", canonical(profile)
        path.write_bytes(render_profile(LockedProfile(found, fingerprints(found))))
        return path

    return [saved("blocks", transformer(3)), saved("graph", layered(5, 60)), saved("small", layered(3, 12))]


@pytest.fixture(scope="module")
def expected(package: Path, profiles: list[Path]) -> bytes:
    return decided(sys.executable, package, profiles)


@pytest.mark.parametrize("release", [release for release in RELEASES if release != THIS])
def test_another_release_of_python_gives_the_same_bytes(
    release: str, package: Path, profiles: list[Path], expected: bytes, tmp_path: Path
) -> None:
    python = interpreter(release)
    if python is None:
        pytest.skip(f"no Python {release} on PATH, in pyenv or in CKPT_PLANNER_PYTHONS")
    assert expected.count(b'"kind"') > len(profiles) and expected.count(b"smallest budget") >= len(profiles)
    assert decided(environment(python, tmp_path / "venv"), package, profiles) == expected
