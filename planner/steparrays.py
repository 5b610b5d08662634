"""A profile's storages, slots and steps as arrays, for what is added up thousands of times. Free of torch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from .profile import UNSEEN, Profile
from .schedule import EXTERNAL

Ints = NDArray[np.int64]


class StepArrays(NamedTuple):
    """The numbers of one step.

    Attributes:
        made: indices of the storages that are made during the step.
        made_bytes: their sizes.
        stays: whether each of them outlives backward.
        leaves: for every storage, the operation before which the graph lets it go if nothing needs it longer.
        births: differences of live bytes at the start of each operation, as `made` are born.
        slot_ops, slot_storages, slot_steps: of every slot; the operation is len(ops) where no hook sees the slot, the
            step len(steps) where none reads it.
        workspace: bytes of each operation.
        step_peaks, step_live: bytes of each backward step.
        held_bytes: of what outlives backward.
    """

    made: Ints
    made_bytes: Ints
    stays: NDArray[np.bool_]
    leaves: Ints
    births: Ints
    slot_ops: Ints
    slot_storages: Ints
    slot_steps: Ints
    workspace: Ints
    step_peaks: Ints
    step_live: Ints
    held_bytes: int


def step_arrays(profile: Profile, leaves: Sequence[int]) -> StepArrays:
    """The arrays of a profile.

    Args:
        profile: the measured step.
        leaves: as in `StepArrays`.

    Example:
        >>> arrays = step_arrays(profile, [s.death for s in profile.storages])  # doctest: +SKIP
        >>> int(arrays.made_bytes.sum())  # doctest: +SKIP
        1073741824
    """
    n, m, storages = len(profile.ops), len(profile.steps), profile.storages
    made = ints([i for i, s in enumerate(storages) if s.kind not in EXTERNAL])
    made_bytes = ints([storages[i].bytes for i in made])
    stays = np.array([storages[i].death > n for i in made], dtype=np.bool_)
    births = np.zeros(n + 2, dtype=np.int64)
    np.add.at(births, ints([storages[i].birth + 1 for i in made]), made_bytes)
    return StepArrays(
        made=made,
        made_bytes=made_bytes,
        stays=stays,
        leaves=np.minimum(ints(leaves), n + 1),
        births=births,
        slot_ops=ints([n if slot.position == UNSEEN else slot.op for slot in profile.slots]),
        slot_storages=ints([slot.storage for slot in profile.slots]),
        slot_steps=ints([slot.step if slot.step >= 0 else m for slot in profile.slots]),
        workspace=ints([op.workspace_bytes for op in profile.ops]),
        step_peaks=ints([step.peak_bytes for step in profile.steps]),
        step_live=ints([step.live_bytes for step in profile.steps]),
        held_bytes=int(made_bytes[stays].sum()),
    )


def ints(values: Any) -> Ints:
    """Whole numbers as an array, in which sums of bytes do not overflow.

    Example:
        >>> ints([1, 2]).dtype
        dtype('int64')
    """
    return np.array(values, dtype=np.int64)
