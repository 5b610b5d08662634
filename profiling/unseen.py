"""Notices that a tensor was written into without any call passing by: collectives, NumPy views, C++ extensions."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ckpt_planner.replay.calls import storage_key, storage_of

_SAMPLES = 1 << 16
_PATTERN = 0x5A


Numbering = Callable[[torch.Tensor], int | None]  # the number of a tensor's storage; None if it is not watched


class Unseen:
    """Compares storages with what the last call that passed by has left.

    Attributes:
        found: numbers of the storages that were written into unseen.
    """

    def __init__(self) -> None:
        self._prints: dict[int, int] = {}
        self.found: set[int] = set()

    def compare(self, tensors: list[torch.Tensor], number: Numbering) -> list[int]:
        """Before a call: the storages that something has written into since the last one."""
        changed = []
        for tensor in tensors:
            s = number(tensor)
            if s is not None:
                print_ = fingerprint(tensor)
                if self._prints.setdefault(s, print_) != print_:
                    self._prints[s] = print_
                    changed.append(s)
        self.found.update(changed)
        return changed

    def note(self, tensors: list[torch.Tensor], number: Numbering, unwritten: bool) -> None:
        """After a call: what it made or wrote into; `unwritten` where that means nothing yet."""
        for tensor in tensors:
            s = number(tensor)
            if s is not None:
                if unwritten:
                    spoil(tensor)
                self._prints[s] = fingerprint(tensor)


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that changes when the tensor's storage does; of large ones, evenly spaced samples are taken."""
    flat = flat_bytes(tensor)
    if flat is None:
        return 0
    with torch.no_grad():
        return int(flat[:: max(1, flat.numel() // _SAMPLES)].sum(dtype=torch.int64))


def spoil(tensor: torch.Tensor) -> None:
    """Fill new memory, whose contents mean nothing yet, so that writing the same as in an earlier run shows."""
    flat = flat_bytes(tensor)
    if flat is not None:
        with torch.no_grad():
            flat.fill_(_PATTERN)


def flat_bytes(tensor: torch.Tensor) -> torch.Tensor | None:
    """A tensor's whole storage as integers, with no version to count; None if there is none."""
    if storage_key(tensor) is None or tensor.device.type == "meta":
        return None
    storage = storage_of(tensor)
    dtype, size = (torch.int32, 4) if storage.nbytes() % 4 == 0 else (torch.uint8, 1)
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // size,), (1,))  # type: ignore[call-overload,no-any-return]
