"""Parameters that a forward writes into: a renormalised embedding, a moving average of weights, a mask on them.

A stand-in shares the parameters' memory, so that a model need not fit twice. What its first run overwrites is put back,
and later stand-ins have a copy of their own of those parameters.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn

from ckpt_planner.replay.calls import storage_key, version_of

from .shadow import needs_its_own
from .unseen import flat_bytes

Before = list[tuple[int, torch.Tensor, torch.Tensor, int]]  # storage, tensor, what it held, its version


class Overwritten:
    """What the parameters held before calls that wrote into them."""

    def __init__(self, model: nn.Module) -> None:
        self._watched = {storage_key(p) for p in model.parameters()} - {None}
        self._harmless: set[str] = set()
        self._held: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def before(self, signature: str, tensors: list[torch.Tensor]) -> Before:
        """Before a call: copies, in the host's memory, of the parameters that it is given; once for equal calls."""
        if signature in self._harmless:
            return []
        found: Before = []
        for tensor in tensors:
            key = storage_key(tensor)
            if key in self._watched and key not in self._held and not any(key == k for k, *_ in found):
                flat = flat_bytes(tensor)
                if key is not None and flat is not None:
                    found.append((key, tensor, flat.to("cpu", copy=True), version_of(tensor)))
        return found

    def after(self, signature: str, before: Before) -> None:
        """After the call: hold on to the copies of what it wrote into."""
        wrote = [entry for entry in before if version_of(entry[1]) != entry[3]]
        self._held.update({key: (tensor, held) for key, tensor, held, _ in wrote})
        if before and not wrote:
            self._harmless.add(signature)

    @contextmanager
    def put_back(self, model: nn.Module, copy: nn.Module) -> Iterator[None]:
        """Puts back, at the end, what was overwritten in `copy`, whose parameters are the memory of `model`'s."""
        try:
            yield
        finally:
            with torch.no_grad():
                for tensor, held in self._held.values():
                    flat = flat_bytes(tensor)
                    if flat is not None:
                        flat.copy_(held)
            aliases = dict(copy.named_parameters())
            for name, own in model.named_parameters():
                if name in aliases and storage_key(aliases[name]) in self._held:
                    needs_its_own(own)
