"""What deciding looks up of a profile thousands of times, prepared once. Free of torch."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
from numpy.typing import NDArray

from .profile import Profile

EXTERNAL = ("parameter", "buffer", "input", "constant")

Ints = NDArray[np.int64]


class Facts:
    """Facts of one profile.

    Attributes:
        writers: for each storage that is changed in place during forward, the operations that do it, in order.
        undroppable: the storages that every plan keeps, each with the reason.
        reads: for each operation, (storage, producer, whether it looks into the storage or writes into it) of what it
            reads that is made during the step.
        makes: for each operation, the storages that it makes, returns or writes into.
        look_of: for each operation that is a mere look into one storage, and needs nothing else, that storage.
        old: for each operation, what it reads at another version than the last, and cannot have copied before.
        made: indices of the storages that are made during the step, with their sizes, births and deaths.
        slot_storages, slot_steps: of every slot; len(steps) where a slot is never read.
        workspace, step_peaks: bytes of each operation, and of each step.
    """

    def __init__(self, profile: Profile) -> None:
        storages, n = profile.storages, len(profile.ops)
        found: dict[int, list[int]] = defaultdict(list)
        for i, op in enumerate(profile.ops):
            for s in op.writes:
                found[s].append(i)
        self.writers = {s: tuple(w) for s, w in found.items()}
        self.undroppable = self._undroppable(profile)
        inside = [s.kind not in EXTERNAL for s in storages]
        self.makes = [tuple(dict.fromkeys((*op.makes, *op.output, *op.writes))) for op in profile.ops]
        self.reads = [
            tuple(
                dict.fromkeys(
                    (r.storage, r.producer, r.storage in op.output or r.storage in op.writes)
                    for r in op.reads
                    if inside[r.storage]
                )
            )
            for op in profile.ops
        ]
        self.look_of = {
            i: op.output[0]
            for i, op in enumerate(profile.ops)
            if len(op.output) == 1
            and not (op.makes or op.hides or op.writes)
            and {s for s, _, _ in self.reads[i]} == set(op.output)
        }
        self.old = [
            tuple(
                r.storage
                for position, r in enumerate(op.reads)
                if position not in op.snapshot and r.version != len(self.writers.get(r.storage, ()))
            )
            for op in profile.ops
        ]
        made = [s for s, ok in enumerate(inside) if ok]
        self.made, self.sizes = _ints(made), _ints([storages[s].bytes for s in made])
        self.births = _ints([storages[s].birth for s in made])
        self.deaths = np.minimum(_ints([storages[s].death for s in made]), n + 1)
        m = len(profile.steps)
        self.slot_storages = _ints([slot.storage for slot in profile.slots])
        self.slot_steps = _ints([slot.step if slot.step >= 0 else m for slot in profile.slots])
        self.workspace = _ints([op.workspace_bytes for op in profile.ops])
        self.step_peaks = _ints([step.peak_bytes for step in profile.steps])

    def _undroppable(self, profile: Profile) -> dict[int, str]:
        reasons: dict[int, str] = {}
        for s, storage in enumerate(profile.storages):
            if storage.kind in EXTERNAL:
                reasons[s] = "it exists before the step"
                continue
            op = profile.ops[storage.birth]
            for i in (storage.birth, *self.writers.get(s, ())):
                if profile.ops[i].replay == "never":
                    reasons[s] = f"{profile.ops[i].name}: {profile.ops[i].reason}"
                elif not profile.ops[i].inside:
                    reasons[s] = "it is made outside the model's forward"
            if storage.kind == "hidden" and op.random and op.replay == "never":
                reasons[s] = op.reason
        for op in profile.ops:
            for s in op.choices:
                reasons.setdefault(s, f"{op.name}: it holds a choice, which is kept")
            for read in op.reads:
                if read.producer < 0 and profile.storages[read.storage].kind == "value":
                    reasons.setdefault(read.storage, f"{op.name} reads it by a tensor that no call returned")
        for i, slot in enumerate(profile.slots):
            if slot.fixed or (slot.producer < 0 and profile.storages[slot.storage].kind == "value"):
                reasons.setdefault(slot.storage, f"slot {i} holds it as it is")
        return reasons


def facts_of(profile: Profile) -> Facts:
    """The facts of a profile; those that were made last are kept."""
    global _known
    for known, facts in _known:
        if known is profile:
            return facts
    facts = Facts(profile)
    _known = ((profile, facts), *_known[: MOST_KNOWN - 1])  # replaced as a whole: threads may decide side by side
    return facts


MOST_KNOWN = 4
_known: tuple[tuple[Profile, Facts], ...] = ()


def _ints(values: list[int]) -> Ints:
    return np.array(values, dtype=np.int64)
