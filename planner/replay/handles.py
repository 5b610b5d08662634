"""What autograd holds in place of a tensor that it saves: where it will come from, or the tensor behind a check."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from .calls import is_leaf, version_of

if TYPE_CHECKING:
    from .group import Group


class Handle:
    """What autograd holds in place of a dropped tensor: where it will come from, and how it looks into its storage.

    Args:
        group, key: where it will come from.
        tensor: the saved tensor; None if it is the very result that the key names, and not another look at it.
    """

    __slots__ = ("geometry", "group", "kept", "key")

    def __init__(self, group: Group, key: tuple[int, int, int], tensor: torch.Tensor | None) -> None:
        self.group, self.key = group, key
        self.geometry = (
            None if tensor is None else (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        )
        self.kept: Kept | Overwritten | None = None  # set where the tensor had to stay after all, or was written into

    def look(self, base: torch.Tensor) -> torch.Tensor:
        """The saved tensor as a look into the storage of `base`."""
        if self.geometry is None:
            return base
        dtype, size, stride, start = self.geometry
        offset = int(start)
        if base.dtype == dtype:
            if base.stride() == stride and base.size() == size and base.storage_offset() == offset:
                return base
            return torch.as_strided(base, size, stride, offset)
        _check_room(base, dtype, size, stride, offset)
        view = torch.empty(0, dtype=dtype, device=base.device)
        return view.set_(base.untyped_storage(), offset, size, stride)  # type: ignore[call-overload]


def _check_room(base: torch.Tensor, dtype: torch.dtype, size: torch.Size, stride: tuple[int, ...], offset: int) -> None:
    """`set_` makes a storage larger where it is too small, and what is in it then is anything."""
    last = offset + sum((n - 1) * step for n, step in zip(size, stride, strict=True))
    if size.numel() and (last + 1) * dtype.itemsize > base.untyped_storage().nbytes():
        raise RuntimeError(
            f"a tensor of {base.dtype} and shape {tuple(base.shape)} came out of computing again what was of {dtype} "
            f"and shape {tuple(size)} in forward: something that the call depends on has changed meanwhile. Keep "
            "forward and backward under the same settings, or plan under them."
        )


class Kept:
    """A saved tensor that stays, where a hook stands between autograd and it.

    Autograd does not check versions of what a hook gives back, so it is done here. An output must not be held as the
    variable that it is: its node holds the hook's result, which would hold the variable, which holds its node.
    """

    __slots__ = ("tensor", "version")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor if is_leaf(tensor) else tensor.detach()
        self.version = version_of(tensor)

    def value(self) -> torch.Tensor:
        """The tensor, if nobody wrote into it since it was saved."""
        return checked(self.tensor, self.version)


class Overwritten:
    """In place of a saved tensor that was written into afterwards, by a call that a replay repeats."""

    __slots__ = ("_name",)

    def __init__(self, name: str) -> None:
        self._name = name

    def value(self) -> torch.Tensor:
        """Raises, as autograd does."""
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: "
            f"{self._name} wrote into a tensor after it was saved"
        )


def checked(tensor: torch.Tensor, version: int) -> torch.Tensor:
    """The tensor, if it still is at the version at which it was saved."""
    if version_of(tensor) != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace operation: a saved "
            f"tensor of shape {tuple(tensor.shape)} is at version {version_of(tensor)}; expected version {version} "
            "instead."
        )
    return tensor
