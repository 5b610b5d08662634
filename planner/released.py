"""When a captured graph lets go of what the model's Python may hold for longer. Free of torch."""

from __future__ import annotations

import msgspec

from .profile import Profile
from .schedule import EXTERNAL


def touched(profile: Profile) -> list[list[int]]:
    """For each storage, the operations that make, read, write or return it, in order."""
    touches: list[list[int]] = [[] for _ in profile.storages]
    for i, op in enumerate(profile.ops):
        for s in {*op.makes, *op.hides, *op.writes, *op.output, *(r.storage for r in op.reads)}:
            touches[s].append(i)
    return touches


def released(profile: Profile) -> list[int]:
    """For each storage, the operation before which a graph lets it go: after its last use.

    What leads to no output is an exception: autograd holds what it has saved there until the last of its results goes.
    """
    ops, storages = profile.ops, profile.storages
    inside, touches = sum(op.inside for op in ops), touched(profile)
    outlives = [s.kind in EXTERNAL or s.kind == "hidden" or s.death > inside for s in storages]
    found = [s.death if outlives[i] else touches[i][-1] + 1 for i, s in enumerate(storages)]
    leads = [s.death > inside for s in storages]  # to an output, as far as is known
    ends = list(found)  # when the last result goes that a storage leads to, by way of what leads to no output
    for op in reversed(ops[:inside]):
        made = {*op.output, *op.writes, *op.makes}
        read = {r.storage for r in op.reads}
        if any(leads[s] for s in made):
            for s in read:
                leads[s] = True
            continue
        end = max((ends[s] for s in made), default=0)
        for s in (read | made | set(op.hides)) - {s for s in read if outlives[s]}:
            ends[s] = max(ends[s], end)
    return [max(pair) for pair in zip(found, ends, strict=True)]


def run_by_graph(profile: Profile) -> Profile:
    """The same step, with its forward run by a captured graph.

    Example:
        >>> run_by_graph(profile).storages[0].death <= profile.storages[0].death  # doctest: +SKIP
        True
    """
    replace, deaths = msgspec.structs.replace, released(profile)
    storages = tuple(replace(s, death=min(s.death, d)) for s, d in zip(profile.storages, deaths, strict=True))
    return replace(profile, storages=storages)
