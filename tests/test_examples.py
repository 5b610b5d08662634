"""Each example is a file that the command can use: a model, inputs that fit it, and a loss that reaches its weights."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ckpt_planner import userfile

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*/model.py"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.parent.name)
def test_example_runs(path: Path) -> None:
    subject = userfile.load(path)
    assert subject.model.training
    with torch.no_grad():
        output = subject.model(*subject.args, **subject.kwargs)
    loss = output.loss if subject.loss_fn is None else subject.loss_fn(output)
    assert loss.shape == ()
    assert loss.isfinite()


def test_there_are_five() -> None:
    assert {path.parent.name for path in EXAMPLES} == {"bert", "gpt2", "resnet", "unet", "vit"}
