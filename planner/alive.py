"""What the bytes at the peak are, by module and by kind: the plain step at its peak beside the planned one at its own.

The kinds are those of `Breakdown`, and each kind's bytes over all modules add up to it. What belongs to no module, or
to none that the profile knows of, has a row of its own. Free of torch.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable

import msgspec

from . import labels
from .decision import Breakdown, Decision
from .profile import Profile
from .schedule import EXTERNAL

MOST_ROWS = 14
NO_MODULE = "(no module)"
ITSELF = "itself"
KINDS: tuple[str, ...] = Breakdown.__struct_fields__

_Module = tuple[str, ...]
_Bytes = Counter[tuple[_Module | None, str]]


class ModuleBytes(msgspec.Struct, frozen=True):
    """What is alive of some modules at the peak.

    Attributes:
        label: the modules; those whose paths differ only in numbers are one row ("h.{0…11}.mlp").
        modules: how many modules.
        plain_bytes, planned_bytes: at the plain step's peak and at the planned one's.
        plain, planned: the same by kind, for the kinds that there is anything of.
    """

    label: str
    modules: int
    plain_bytes: int
    planned_bytes: int
    plain: dict[str, int]
    planned: dict[str, int]


def alive(decision: Decision, most: int = MOST_ROWS) -> tuple[ModuleBytes, ...]:
    """The modules' bytes at the peak, most first, in at most about `most` rows: large modules are split up first."""
    plain, planned = _attributed(decision.unplanned), _attributed(decision)
    tree = _Tree(plain, planned)
    rows = [tree.row(pattern) for pattern in tree.split(most)]
    rows += [_row(NO_MODULE, 0, plain, planned, {None})] if any(m is None for m, _ in (*plain, *planned)) else []
    return tuple(sorted(rows, key=lambda row: (-max(row.plain_bytes, row.planned_bytes), row.label)))


def _row(label: str, count: int, plain: _Bytes, planned: _Bytes, members: set[_Module | None]) -> ModuleBytes:
    def by_kind(found: _Bytes) -> dict[str, int]:
        sums = {kind: sum(found.get((module, kind), 0) for module in members) for kind in KINDS}
        return {kind: size for kind, size in sums.items() if size}

    before, after = by_kind(plain), by_kind(planned)
    return ModuleBytes(label, count, sum(before.values()), sum(after.values()), before, after)


class _Tree:
    """Modules merged by the pattern of their path, so that a hundred alike layers are one branch."""

    def __init__(self, plain: _Bytes, planned: _Bytes) -> None:
        self.plain, self.planned = plain, planned
        self.total: Counter[_Module] = Counter()
        self.own: dict[_Module, dict[_Module, None]] = defaultdict(dict)
        self.paths: dict[_Module, dict[_Module, None]] = defaultdict(dict)
        self.children: dict[_Module, dict[_Module, None]] = defaultdict(dict)
        sizes: Counter[_Module] = Counter()
        for module, kind in dict.fromkeys((*plain, *planned)):
            if module is not None:
                sizes[module] += plain[module, kind] + planned[module, kind]
        for module, size in sizes.items():
            parts = tuple(labels.pattern(part) for part in module)
            self.own[parts][module] = None
            for depth in range(len(parts) + 1):
                self.total[parts[:depth]] += size
                self.paths[parts[:depth]][module[:depth]] = None
                if depth:
                    self.children[parts[: depth - 1]][parts[:depth]] = None

    def split(self, most: int) -> list[tuple[_Module, bool]]:
        """Patterns that cover all, each with whether it stands without the modules inside it."""
        if not self.total:
            return []
        done: list[tuple[_Module, bool]] = []
        left: list[_Module] = [()]
        while left:
            largest = max(left, key=lambda pattern: self.total[pattern])
            left.remove(largest)
            inside, own = self.children.get(largest, {}), largest in self.own
            if not inside or len(left) + len(done) + len(inside) + own > most:
                done.append((largest, False))
                continue
            left += inside
            done += [(largest, True)] if own else []
        return done

    def row(self, chosen: tuple[_Module, bool]) -> ModuleBytes:
        """The bytes of one of `split`'s patterns."""
        pattern, alone = chosen
        members: set[_Module | None] = set()
        stack = [pattern]
        while stack:
            at = stack.pop()
            members.update(self.own.get(at, ()))
            stack += () if alone else self.children.get(at, ())
        paths = [".".join(path) for path in self.paths[pattern]]
        label = _label(paths) if pattern else labels.ROOT
        label += f" ({ITSELF})" if alone and pattern else ""
        return _row(label, len(paths), self.plain, self.planned, members)


def _label(paths: list[str]) -> str:
    label = labels.of_labels(paths)
    # Of modules that differ in several numbers it names the first and the last, which says too little here.
    return label if label in paths or "{" in label else labels.pattern(paths[0]).replace("#", "*")


def _attributed(decision: Decision) -> _Bytes:
    """Bytes of each module and kind at the peak of the decision's step; what is known of no module goes to None."""
    found: _Bytes = Counter()
    profile, timeline, memory = decision.profile, decision.timeline, decision.memory
    n, m, peak = len(profile.ops), len(profile.steps), timeline.peak_bytes
    for s in profile.storages:
        kind = {"parameter": "parameters", "buffer": "buffers"}.get(s.kind)
        if kind:
            found[_parts(s.name.rpartition(".")[0]), kind] += s.bytes
    if peak == timeline.optimizer_bytes:
        at, runs = n + m, None
        live: Iterable[int] = (i for i, s in enumerate(profile.storages) if s.death > n)
    elif peak in timeline.backward:
        step = timeline.backward.index(peak)
        at, runs = n + step, _step_module(profile, step)
        until = decision.needed_until
        live = (i for i, s in enumerate(profile.storages) if s.death > n or until.get(i, -1) >= step)
    else:
        at = timeline.forward.index(peak) if peak in timeline.forward else 0
        runs = _parts(profile.ops[at].module) if at < n else None
        until, gone = decision.needed_until, decision.let_go
        live = (i for i, s in enumerate(profile.storages) if s.birth < at and (gone[i] > at or until.get(i, -1) >= 0))
    for i in live:
        storage = profile.storages[i]
        if storage.kind not in EXTERNAL:
            found[_parts(profile.ops[storage.birth].module), "activations"] += storage.bytes
    for step in range(min(max(at - n, 0), m)):
        if profile.steps[step].gradient_bytes:
            found[_step_module(profile, step), "gradients"] += profile.steps[step].gradient_bytes
    found[runs, "workspace"] += memory.workspace
    return _completed(found, memory)


def _completed(found: _Bytes, memory: Breakdown) -> _Bytes:
    """`found` with what is missing to each kind's bytes under None; a kind of which too much was found is only there.

    A profile's parameters are those that an operation reads, and generator states belong to no module.
    """
    for kind in KINDS:
        known = sum(size for (_, of), size in found.items() if of == kind)
        size = getattr(memory, kind)
        if known > size:
            for key in [key for key in found if key[1] == kind]:
                del found[key]
            known = 0
        found[None, kind] += size - known
    return Counter({key: size for key, size in found.items() if size})


def _step_module(profile: Profile, step: int) -> _Module | None:
    """Whose backward a step is; a parameter's gradient is added right after the step that computed it."""
    for at in range(step, -1, -1):
        if profile.steps[at].op >= 0:
            return _parts(profile.ops[profile.steps[at].op].module)
    return None


def _parts(path: str) -> _Module:
    return tuple(path.split(".")) if path else ()
