"""Module paths for people: many paths, and many alike segments, in one short line each. Free of torch.

>>> of_modules(("h.0.mlp.c_fc", "h.0.mlp.act"))
'h.0.mlp.{c_fc, act}'
>>> of_labels(["h.0.mlp", "h.1.mlp", "h.2.mlp", "h.5.mlp"])
'h.{0…2, 5}.mlp'
"""

from __future__ import annotations

import re
from collections.abc import Sequence

_NUMBER = re.compile(r"(?<![A-Za-z0-9_])\d+(?![A-Za-z0-9_])")
ROOT = "(the model itself)"


def of_modules(modules: Sequence[str]) -> str:
    """One line for the modules that a segment spans, in their order; the path "" is the model itself.

    A shared prefix is written once. Of more than three modules the first and the last are named, with the count.
    """
    names = list(dict.fromkeys(name for name in modules if name))
    if not names:
        return ROOT
    # A module that holds all the others says it all.
    outer = [n for n in names if not any(n.startswith(f"{other}.") for other in names)]
    if len(outer) == 1:
        return outer[0]
    parts = [name.split(".") for name in outer]
    shared = 0
    while shared < min(map(len, parts)) - 1 and len({p[shared] for p in parts}) == 1:
        shared += 1
    prefix = "".join(f"{p}." for p in parts[0][:shared])
    rest = [".".join(p[shared:]) for p in parts]
    if len(rest) <= 3:
        return f"{prefix}{{{', '.join(rest)}}}"
    return f"{prefix}{{{rest[0]} … {rest[-1]}}} ({len(rest)} modules)"


def pattern(label: str) -> str:
    """`label` with every number that is a path component of its own replaced, so that alike labels are equal."""
    return _NUMBER.sub("#", label)


def of_labels(labels: Sequence[str]) -> str:
    """One line for labels that differ at most in their numbers (their `pattern` is the same), in their order."""
    first, last = labels[0], labels[-1]
    numbers = [tuple(map(int, _NUMBER.findall(label))) for label in labels]
    varying = [i for i in range(len(numbers[0])) if len({n[i] for n in numbers}) > 1]
    if not varying:
        return first
    # Where several numbers vary, a list of one of them would not say which goes with which.
    if len(varying) > 1:
        return f"{first} … {last}"
    position, found = varying[0], list(_NUMBER.finditer(first))[varying[0]]
    runs = _runs([n[position] for n in numbers])
    return f"{first[: found.start()]}{{{runs}}}{first[found.end() :]}"


def _runs(values: Sequence[int]) -> str:
    """`values` in order with neighbours joined: "0…2, 5"."""
    runs: list[list[int]] = []
    for value in sorted(set(values)):
        if runs and value == runs[-1][-1] + 1:
            runs[-1].append(value)
        else:
            runs.append([value])
    return ", ".join(f"{run[0]}…{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)
