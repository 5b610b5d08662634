"""The buckets in which `DistributedDataParallel` averages gradients: a second copy of them, there all the time.

They are made with the wrapper, outside of any step that is measured, so that no meter sees them.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

_BOOKKEEPING = 2 * 4  # bytes a parameter: which ones were used, here and on the device


def bucket_bytes(model: nn.Module) -> int:
    """Bytes of the buckets of what `DistributedDataParallel` has wrapped in `model`; 0 where it has wrapped nothing."""
    return sum(_size(p) for wrapper in _wrappers(model) for p in _averaged(wrapper))


def buckets_to_come(model: nn.Module) -> int:
    """Bytes of the buckets that wrapping `model` in `DistributedDataParallel` would add to those that there are."""
    there = {id(p) for wrapper in _wrappers(model) for p in _averaged(wrapper)}
    return sum(_size(p) for p in _trained(model) if id(p) not in there)


def averaged_parameters(model: nn.Module) -> dict[int, bool]:
    """The `id` of each parameter whose gradient a wrapper in `model` averages; whether it ends up within a bucket."""
    return {id(p): bool(wrapper.gradient_as_bucket_view) for wrapper in _wrappers(model) for p in _averaged(wrapper)}


def _wrappers(model: nn.Module) -> list[Any]:
    if not torch.distributed.is_available():
        return []
    from torch.nn.parallel import DistributedDataParallel

    return [module for module in model.modules() if isinstance(module, DistributedDataParallel)]


def _averaged(wrapper: Any) -> Iterator[nn.Parameter]:
    names = {id(p): name for name, p in wrapper.module.named_parameters()}
    return (p for p in _trained(wrapper.module) if names[id(p)] not in wrapper.parameters_to_ignore)


def _trained(model: nn.Module) -> Iterator[nn.Parameter]:
    """The parameters whose gradients go into a flat bucket: sparse gradients travel by themselves."""
    sparse = {
        id(p) for m in model.modules() if getattr(m, "sparse", False) is True for p in m.parameters(recurse=False)
    }
    return (p for p in model.parameters() if p.requires_grad and id(p) not in sparse)


def _size(parameter: nn.Parameter) -> int:
    return parameter.numel() * parameter.itemsize + _BOOKKEEPING
