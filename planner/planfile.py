"""Decisions as files: JSON with the profile that they were decided from. Free of torch."""

from __future__ import annotations

from pathlib import Path

import msgspec

from .decision import Decision
from .errors import PlanMismatchError
from .graphdecision import GraphDecision
from .profile import SCHEMA_VERSION, Profile
from .regional import RegionDecision
from .regions import Region
from .solve import Solution

_KIND = "ckpt-planner plan"


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan as it is saved."""

    schema: int
    kind: str
    strategy: str
    budget_bytes: int
    solution: Solution
    profile: Profile
    mechanism: str = "slice"
    regions: tuple[Region, ...] = ()


def encode_plan(decision: Decision) -> bytes:
    """A decision as JSON: keys sorted, no time stamps, so that a diff shows what changed."""
    d = decision
    regions = d.regions if isinstance(d, RegionDecision) else ()
    file = _File(SCHEMA_VERSION, _KIND, d.strategy, d.budget_bytes, d.solution, d.profile, d.mechanism, regions)
    return msgspec.json.encode(file, order="sorted")


def write_plan(decision: Decision, path: str | Path) -> None:
    """Write a decision as `encode_plan` gives it, indented."""
    Path(path).write_bytes(msgspec.json.format(encode_plan(decision), indent=1) + b"\n")


def read_plan(path: str | Path) -> Decision:
    """Read a decision that `write_plan` wrote.

    Raises:
        PlanMismatchError: the file is no plan, one of another version of the format, or one that was changed by hand
            so that it cannot be carried out.
    """
    return decode_plan(Path(path).read_bytes(), str(path))


def decode_plan(data: bytes, origin: str) -> Decision:
    """The decision that `encode_plan` encoded.

    Args:
        data: the JSON.
        origin: what messages call it.

    Raises:
        PlanMismatchError: as `read_plan`.
    """
    try:
        head = msgspec.json.decode(data)
        if not isinstance(head, dict) or head.get("kind") != _KIND:
            raise PlanMismatchError(f"{origin} is not a plan of ckpt-planner")
        if head.get("schema") != SCHEMA_VERSION:
            raise PlanMismatchError(
                f"{origin} has plan format {head.get('schema')}; this version reads {SCHEMA_VERSION}. Plan again."
            )
        file = msgspec.json.decode(data, type=_File)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PlanMismatchError(f"{origin} is not a plan of ckpt-planner: {error}") from error
    decision = Decision(file.profile, file.solution, file.budget_bytes, file.strategy)
    if file.mechanism == "torch":
        decision = RegionDecision(file.profile, file.solution, file.budget_bytes, file.strategy, regions=file.regions)
    elif file.mechanism == "graph":
        decision = GraphDecision.of(file.profile, decision)
    try:
        _check_storages(file.profile, file.solution)
        _check_regions(file.profile, file.regions)
        _ = decision.timeline
    except (ValueError, IndexError) as error:
        raise PlanMismatchError(f"{origin} cannot be carried out: {error}") from error
    return decision


def _check_storages(profile: Profile, solution: Solution) -> None:
    for storages in (solution.dropped, solution.inner):
        if list(storages) != sorted(set(storages)) or any(not 0 <= s < len(profile.storages) for s in storages):
            raise ValueError("its storages are not in order, stand there twice or are none of the profile's")


def _check_regions(profile: Profile, regions: tuple[Region, ...]) -> None:
    end, inside = 0, sum(op.inside for op in profile.ops)
    for region in regions:
        if not end <= region.first < region.stop <= inside:
            raise ValueError(f"its region of operations {region.first} to {region.stop} overlaps another, or the end")
        for i in range(region.first, region.stop):
            if profile.ops[i].replay == "never" and i not in region.kept:
                raise ValueError(f"operation {i} ({profile.ops[i].name}) would run again, but cannot")
        end = region.stop
