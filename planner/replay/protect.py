"""Writes that no replay repeats: what they overwrite is not what a replay makes, and may be what one is to read."""

from __future__ import annotations

from typing import Any

import torch

from .calls import tensors_in
from .directions import base_name, has_statistics, in_place


def writes_in_place(name: str, kwargs: dict[str, Any]) -> bool:
    """Whether a call writes into an argument, by its name or its options."""
    return in_place(name) or writes_by_options(kwargs)


def writes_by_options(kwargs: dict[str, Any]) -> bool:
    """Whether a call's options say that it writes into an argument."""
    return bool(kwargs) and (
        kwargs.get("inplace") is True or kwargs.get("out") is not None or kwargs.get("max_norm") is not None
    )


def written_by(name: str, args: Any, kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """The tensors that a call which `writes_in_place` writes into."""
    out = kwargs.get("out")
    if out is not None:
        return list(tensors_in(out))
    if kwargs.get("max_norm") is not None:  # an embedding, which renormalises rows of its weight
        return list(tensors_in((*args[1:2], kwargs.get("weight"))))
    if has_statistics(base_name(name)):
        # They come after the input in torch.nn.functional, after weight and bias elsewhere; one may be left out.
        at = slice(1, 3) if name.startswith("torch.nn.functional.") else slice(1, 5)
        statistics = (*args[at], kwargs.get("running_mean"), kwargs.get("running_var"))
        return [tensor for tensor in tensors_in(statistics) if not tensor.requires_grad]
    return list(tensors_in(args[:1] or tuple(kwargs.values())[:1]))
