"""Model families with random weights and small configurations, sized so that activations outweigh parameters.

Each is a function that returns a `Family`: a model in train mode, its call, and its loss. `small` gives a version for
tests, which plans in a few seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import nn


class Family(NamedTuple):
    """A model and one training call of it; `loss_fn` is None where the output has a loss."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], torch.Tensor] | None


VOCABULARY = 512
CLASSES = 10
FAMILIES: dict[str, Callable[[bool], Family]] = {}


def family(make: Callable[[bool], Family]) -> Callable[[bool], Family]:
    """Register a family under the name of its function."""
    FAMILIES[make.__name__] = make
    return make


def build(name: str, small: bool = False, seed: int = 0) -> Family:
    """The family of that name, the same one each time; torch's generator is left seeded with `seed`."""
    torch.manual_seed(seed)
    made = FAMILIES[name](small)
    made.model.train()
    torch.manual_seed(seed)
    return made


def sizes(small: bool) -> dict[str, int]:
    """Batch, length of a sequence, width, heads and layers."""
    if small:
        return {"batch": 4, "length": 48, "width": 32, "heads": 2, "layers": 3}
    return {"batch": 8, "length": 128, "width": 96, "heads": 4, "layers": 6}


def tokens(batch: int, length: int) -> torch.Tensor:
    return torch.randint(5, VOCABULARY, (batch, length))


def images(small: bool, side: int) -> torch.Tensor:
    return torch.randn(4 if small else 8, 3, side // 2 if small else side, side // 2 if small else side)


def labels(batch: int) -> torch.Tensor:
    return torch.randint(CLASSES, (batch,))


def encoder(small: bool) -> dict[str, Any]:
    s = sizes(small)
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": s["width"],
        "num_hidden_layers": s["layers"],
        "num_attention_heads": s["heads"],
        "intermediate_size": 4 * s["width"],
        "max_position_embeddings": 2 * s["length"],
    }


def masked(small: bool, model: nn.Module) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    mask = torch.ones_like(ids)
    mask[0, -s["length"] // 4 :] = 0  # padding, as real batches have it
    targets = ids.masked_fill(torch.rand(ids.shape) > 0.3, -100)
    return Family(model, (), {"input_ids": ids, "attention_mask": mask, "labels": targets}, None)


def causal(small: bool, model: nn.Module) -> Family:
    s = sizes(small)
    ids = tokens(s["batch"], s["length"])
    return Family(model, (), {"input_ids": ids, "labels": ids}, None)


# -- text -----------------------------------------------------------------------------------------------------------
