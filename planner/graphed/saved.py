"""What autograd holds of a tensor that a call of a captured graph saves: the tensor, until the call has returned."""

from __future__ import annotations

import torch

from ..replay.calls import is_leaf, plain_layout, version_of
from ..replay.group import Group
from ..replay.handles import Handle, checked


class Saved(Handle):
    """A saved tensor; `drop` turns it into a handle, `stay` into one that stays.

    Attributes:
        tensor, version: what was saved, and its version then.
    """

    __slots__ = ("tensor", "version")

    group: Group | None  # type: ignore[assignment]

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor: torch.Tensor | None = tensor
        self.group = self.geometry = None
        try:
            self.version = tensor._version
        except RuntimeError:  # an inference tensor
            self.version = version_of(tensor)

    def drop(self, group: Group, key: tuple[int, int, int], whole: bool) -> None:
        """Let the tensor go; `whole` where it is the very result that the key names, and not another look at it."""
        tensor = self.tensor
        assert tensor is not None
        if not whole:
            if not plain_layout(tensor):
                self.stay(group, key)
                return
            self.geometry = (tensor.dtype, tensor.size(), tensor.stride(), tensor.storage_offset())
        self.tensor, self.group, self.key = None, group, key

    def stay(self, group: Group | None = None, key: tuple[int, int, int] | None = None) -> None:
        """Keep the tensor; not as the variable that it is, or an output would hold the node that holds it.

        Where it was to be dropped, `group` and `key` say what it would have been filled from.
        """
        if group is not None and key is not None and (count := group.expected.pop(key, 0)) > 1:
            group.expected[key] = count - 1
        assert self.tensor is not None
        if not is_leaf(self.tensor):
            self.tensor = self.tensor.detach()


def unpack(saved: Saved) -> torch.Tensor:
    """The tensor that autograd saved."""
    group = saved.group
    if group is not None:
        return group.fetch(saved)
    tensor = saved.tensor
    assert tensor is not None
    return tensor if saved.version >= 0 and tensor._version == saved.version else checked(tensor, saved.version)
