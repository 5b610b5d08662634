"""Notices that a tensor was written into without any call passing by: collectives, NumPy views, C++ extensions."""

from __future__ import annotations

import torch

from ckpt_planner.replay.calls import storage_key

_SAMPLES = 1 << 16
_PATTERN = 0x5A


def fingerprint(tensor: torch.Tensor) -> int:
    """A number that changes when the tensor's storage does; of large ones, evenly spaced samples are taken."""
    flat = _flat(tensor)
    if flat is None:
        return 0
    with torch.no_grad():
        return int(flat[:: max(1, flat.numel() // _SAMPLES)].sum(dtype=torch.int64))


def spoil(tensor: torch.Tensor) -> None:
    """Fill new memory, whose contents mean nothing yet, so that writing the same as in an earlier run shows."""
    flat = _flat(tensor)
    if flat is not None:
        with torch.no_grad():
            flat.fill_(_PATTERN)


def _flat(tensor: torch.Tensor) -> torch.Tensor | None:
    if storage_key(tensor) is None or tensor.device.type == "meta":
        return None
    storage = tensor.untyped_storage()
    dtype, size = (torch.int32, 4) if storage.nbytes() % 4 == 0 else (torch.uint8, 1)
    flat = torch.empty(0, dtype=dtype, device=tensor.device)
    return flat.set_(storage, 0, (storage.nbytes() // size,), (1,))  # type: ignore[call-overload,no-any-return]
