"""Whether autocast still remembers casts of weights that have been changed since.

Autocast casts a weight once and remembers the cast until its outermost context ends. Where that context is open across
an optimizer's step, eager goes on with the old weights; to compute again what it did then would cast the new ones.
"""

from __future__ import annotations

import torch
from torch import nn

from .replay.ambient import any_autocast


class Casts:
    """Watches one planned model. Asked at the beginning of each training call.

    Example:
        >>> Casts().stale(nn.Linear(2, 1))
        False
    """

    def __init__(self) -> None:
        self._probe: torch.Tensor | None = None  # a weight of our own, cast where the model's are
        self._cast: torch.Tensor | None = None  # what autocast remembered of it
        self._versions: list[int] = []  # of the model's parameters then

    def stale(self, model: nn.Module) -> bool:
        """Whether a weight of the model may have a remembered cast that is older than itself."""
        if not (any_autocast() and torch.is_autocast_cache_enabled()):
            self._probe = self._cast = None
            return False
        parameters = list(model.parameters())
        if not parameters:
            return False
        versions = [p._version for p in parameters]
        if self._probe is None or self._probe.device != parameters[0].device:
            self._probe = torch.zeros(1, 1, device=parameters[0].device, requires_grad=True)
        found = self._remembered(self._probe)
        if self._cast is not None and found is not None and found.data_ptr() == self._cast.data_ptr():
            return versions != self._versions
        self._cast, self._versions = found, versions
        return False

    @staticmethod
    def _remembered(probe: torch.Tensor) -> torch.Tensor | None:
        """The cast of the probe, which the product that it is used in saves; None where nothing is cast."""
        with torch.enable_grad():
            node = torch.mm(torch.ones_like(probe, requires_grad=True), probe).grad_fn
        saved = getattr(node, "_saved_mat2", None)
        return saved if saved is not None and saved.dtype != probe.dtype else None
