"""A scratch project under git whose model has a committed plan, and the command run in it."""

from __future__ import annotations

import subprocess
from pathlib import Path

from click.testing import CliRunner, Result

from ckpt_planner.cli import main

MODEL = """\
import torch
from torch import nn

WIDTHS = [256, 256, 256, 256]


class Block(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.norm = nn.LayerNorm(64)
        self.wide = nn.Linear(64, inner)
        self.act = nn.GELU()
        self.narrow = nn.Linear(inner, 64)

    def forward(self, x):
        y = self.act(self.wide(self.norm(x)))
        return x + torch.tanh(self.narrow(y))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Block(inner) for inner in WIDTHS])
        self.head = nn.Linear(64, 1)

    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return self.head(x).square().mean()


def model():
    return Net()


def example_inputs():
    return torch.randn(512, 64)
"""

# The same model: locals renamed, definitions and submodules in another order, a helper, other lines.
REFACTORED = """\
import torch
from torch import nn


def example_inputs():
    return torch.randn(512, 64)


def model():
    return Net()


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 1)
        self.layers = nn.ModuleList(Block(width) for width in WIDTHS)

    def forward(self, tokens):
        for block in self.layers:
            tokens = block(tokens)
        return self.head(tokens).square().mean()


class Block(nn.Module):
    def __init__(self, hidden):
        super().__init__()
        self.act, self.narrow = nn.GELU(), nn.Linear(hidden, 64)
        self.wide, self.norm = nn.Linear(64, hidden), nn.LayerNorm(64)

    def inner(self, state):
        return self.act(self.wide(self.norm(state)))

    def forward(self, state):
        hidden = self.inner(state)
        return state + torch.tanh(self.narrow(hidden))


WIDTHS = [256, 256, 256, 256]
"""

PYPROJECT = """\
[tool.ckpt-plan]
budget = "70%"

[tool.ckpt-plan.models]
net = "model.py"
"""

ROWS = 512  # of the example inputs


class Project:
    """A project in a folder; the commands run in it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = folder / "model.py"
        self.plan = folder / "plans" / "net.json"
        self.profile = folder / "plans" / "net.profile.json"

    def write(self, text: str, file: str = "model.py") -> None:
        (self.folder / file).write_text(text)

    def wider(self, inner: int, layer: int = 1) -> None:
        """Another inner width for one layer."""
        widths = [256] * 4
        widths[layer] = inner
        self.write(MODEL.replace("[256, 256, 256, 256]", str(widths)))

    def git(self, *arguments: str) -> str:
        names = ["-c", "user.name=test", "-c", "user.email=test@example.org", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", *names, *arguments], cwd=self.folder, capture_output=True, text=True, check=True)
        return done.stdout

    def commit(self, message: str) -> None:
        self.git("add", "--all")
        self.git("commit", "--quiet", "--message", message)

    def files(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in (self.folder / "plans").iterdir()}


def ckpt_plan(*arguments: object) -> Result:
    """Run the command in the present folder; an exception that is no exit is raised."""
    result = CliRunner().invoke(main, [str(a) for a in arguments])
    if result.exception and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def make(folder: Path) -> Project:
    """A project with a model and a configuration, under git, without a plan."""
    project = Project(folder)
    folder.mkdir(exist_ok=True)
    project.write(MODEL)
    project.write(PYPROJECT, "pyproject.toml")
    project.git("init", "--quiet")
    return project
