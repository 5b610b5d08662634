"""Plan files and their profiles as bytes: made to be committed, compared and merged. Free of torch.

Both are UTF-8 JSON with sorted keys, each item on a line of its own, and a newline at the end. The same contents give
the same bytes. A profile's rows leave out what has its default value.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from .canonical import Fingerprints, digest
from .errors import PlanMismatchError
from .lockfile import PLAN_KIND, PROFILE_KIND, SCHEMA_VERSION, Locked, LockedProfile
from .profile import SCHEMA_VERSION as PROFILE_SCHEMA
from .profile import Op, Profile, Read, Slot, Step, Storage

PROFILE_SUFFIX = ".profile.json"

T = TypeVar("T")


def sealed(locked: Locked) -> Locked:
    """The same contents with their digest."""
    plain = msgspec.structs.replace(locked, digest="")
    return msgspec.structs.replace(plain, digest=digest(msgspec.to_builtins(plain)))


def render_plan(locked: Locked) -> bytes:
    """The plan file's bytes."""
    return _lines(msgspec.to_builtins(locked))


def render_profile(source: LockedProfile) -> bytes:
    """The profile file's bytes."""
    return _lines(profile_data(source))


def _lines(data: Mapping[str, Any]) -> bytes:
    """JSON with sorted keys, and each item of a list or table on a line of its own."""
    parts = []
    for key in sorted(data):
        value = data[key]
        name = b" " + msgspec.json.encode(key) + b": "
        if isinstance(value, (list, tuple)) and value:
            rows = [b"  " + msgspec.json.encode(item, order="sorted") for item in value]
            parts.append(name + b"[\n" + b",\n".join(rows) + b"\n ]")
        elif isinstance(value, dict) and value:
            rows = [b"  " + msgspec.json.encode(k) + b": " + msgspec.json.encode(value[k]) for k in sorted(value)]
            parts.append(name + b"{\n" + b",\n".join(rows) + b"\n }")
        else:
            parts.append(name + msgspec.json.encode(value))
    return b"{\n" + b",\n".join(parts) + b"\n}\n"


# What a row leaves out besides the defaults of its type: most operations have none of it.
_BLANK: dict[str, dict[str, Any]] = {
    "ops": {"place": "", "reads": (), "makes": (), "hides": (), "writes": (), "output": ()}
}

_ROWS: dict[str, type[msgspec.Struct]] = {"ops": Op, "slots": Slot, "steps": Step, "storages": Storage}


def profile_data(source: LockedProfile) -> dict[str, Any]:
    """The profile file's contents as plain data."""
    data: dict[str, Any] = msgspec.to_builtins(source.profile)
    for key, kind in _ROWS.items():
        data[key] = [_brief(row, kind, _BLANK.get(key, {})) for row in data[key]]
    for op in data["ops"]:
        op["reads"] = [_brief(read, Read, {}) for read in op.get("reads", ())]
    data = {**_in_ns(data), "estimated": sorted(source.estimated)}
    data["calls"], data["record"] = source.fingerprints.calls, source.fingerprints.record
    return {**data, "kind": PROFILE_KIND}


def _brief(row: dict[str, Any], kind: type[msgspec.Struct], blank: Mapping[str, Any]) -> dict[str, Any]:
    """A row without the fields that have their default or blank values, times in nanoseconds."""
    defaults = {f.name: f.default for f in msgspec.structs.fields(kind)} | dict(blank)
    return _in_ns({k: v for k, v in row.items() if (tuple(v) if isinstance(v, list) else v) != defaults[k]})


def _in_ns(row: dict[str, Any]) -> dict[str, Any]:
    timed = {k for k in row if k == "seconds" or k.endswith("_seconds")}
    return {k.removesuffix("seconds") + "ns" if k in timed else k: round(v * 1e9) if k in timed else v
            for k, v in row.items()}  # fmt: skip


def _in_seconds(row: dict[str, Any]) -> dict[str, Any]:
    timed = {k for k in row if k == "ns" or k.endswith("_ns")}
    return {k.removesuffix("ns") + "seconds" if k in timed else k: v / 1e9 if k in timed else v for k, v in row.items()}


# -- files ------------------------------------------------------------------------------------------------------------


def profile_path(plan: Path) -> Path:
    """Where the profile of a plan file lies: plans/model.profile.json for plans/model.json."""
    return plan.with_name(plan.name.removesuffix(".json") + PROFILE_SUFFIX)


def read_locked(path: Path) -> tuple[Locked, LockedProfile]:
    """Read a plan file and the profile beside it.

    Raises:
        PlanMismatchError: either is missing, no such file, of another version, or does not belong to the other.
    """
    locked = read_plan_file(path)
    source = read_profile_file(path.parent / locked.profile)
    if digest(profile_data(source)) != locked.profile_digest:
        raise PlanMismatchError(
            f"{path.parent / locked.profile} is not the profile that {path} was decided from: one of the two was "
            f"changed without the other. Bring both from the same commit, or make them anew: {_anew(path, locked)}"
        )
    return locked, source


def _anew(path: Path, locked: Locked) -> str:
    return f"ckpt-plan lock {locked.model} -o {path.name} --force, in {path.parent}"


def read_plan_file(path: Path) -> Locked:
    """Read a plan file alone.

    Raises:
        PlanMismatchError: it is missing, no plan file, of another version, or changed by hand.
    """
    locked = _typed(path, _data(path, PLAN_KIND, SCHEMA_VERSION, "plan file"), Locked, "plan file")
    if sealed(locked).digest != locked.digest:
        raise PlanMismatchError(
            f"{path} was changed by hand or by a merge: its digest is not that of its contents. Bring it back from "
            f"version control, or make it anew: {_anew(path, locked)}"
        )
    return locked


def read_profile_file(path: Path) -> LockedProfile:
    """Read a profile file.

    Raises:
        PlanMismatchError: it is missing, no profile file, or of another version.
    """
    data = _data(path, PROFILE_KIND, PROFILE_SCHEMA, "profile file")
    try:
        for key in _ROWS:
            data[key] = [{**_BLANK.get(key, {}), **_in_seconds(row)} for row in data[key]]
        estimated = msgspec.convert(data.pop("estimated"), tuple[str, ...])
        fingerprints = Fingerprints(str(data.pop("calls")), str(data.pop("record")))
        del data["kind"]
    except (KeyError, TypeError, AttributeError, msgspec.ValidationError) as error:
        raise PlanMismatchError(f"{path} is no profile file of ckpt-planner: {error!r}") from error
    return LockedProfile(_typed(path, _in_seconds(data), Profile, "profile file"), fingerprints, estimated)


def _data(path: Path, kind: str, schema: int, what: str) -> dict[str, Any]:
    try:
        content = path.read_bytes()
    except OSError as error:
        raise PlanMismatchError(f"{path}: the {what} cannot be read: {error.strerror or error}") from error
    try:
        data = msgspec.json.decode(content)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        why = "it holds the marks of an unfinished merge" if b"\n<<<<<<< " in b"\n" + content else str(error)
        raise PlanMismatchError(
            f"{path} is damaged ({why}). Bring it back from version control, or make it anew with ckpt-plan lock "
            "--force."
        ) from error
    if not isinstance(data, dict) or data.get("kind") != kind:
        raise PlanMismatchError(f"{path} is no {what} of ckpt-planner (its `kind` is not {kind!r})")
    found = data.get("schema")
    if found != schema:
        newer = isinstance(found, int) and found > schema
        raise PlanMismatchError(
            f"{path} has {what} format {found}; this version reads {schema}. "
            + ("Upgrade ckpt-planner." if newer else "Make it anew with ckpt-plan lock --force.")
        )
    return data


def _typed(path: Path, data: Any, kind: type[T], what: str) -> T:
    try:
        return msgspec.convert(data, type=kind)
    except msgspec.ValidationError as error:
        raise PlanMismatchError(
            f"{path} is damaged: {error}. Bring the {what} back from version control, or make it anew with "
            "ckpt-plan lock --force."
        ) from error


def write_locked(path: Path, locked: Locked, source: LockedProfile, *, replace: bool) -> None:
    """Write a plan file and the profile beside it.

    Args:
        path: the plan file; its folder is made.
        locked, source: the contents.
        replace: whether files that exist are overwritten.

    Raises:
        PlanMismatchError: a file exists and `replace` is False, or cannot be written.
    """
    files = [(profile_path(path), render_profile(source)), (path, render_plan(locked))]
    for file, _ in files:
        if file.exists() and not replace:
            raise PlanMismatchError(
                f"{file} exists already and is not overwritten. ckpt-plan check says what moved; --force overwrites it."
            )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        for file, content in files:
            _write(file, content, replace)
    except OSError as error:
        raise PlanMismatchError(f"{error.filename or path} cannot be written: {error.strerror or error}") from error


def _write(file: Path, content: bytes, replace: bool) -> None:
    """Writes all or nothing: what stops halfway leaves the old file."""
    if not replace:
        with file.open("xb") as stream:
            stream.write(content)
        return
    part = file.with_name(f".{file.name}.{os.getpid()}.part")
    try:
        part.write_bytes(content)
        part.replace(file)
    finally:
        part.unlink(missing_ok=True)
