"""The Python state that may steer a forward: attributes of modules, and globals and closures of what forward runs.

A captured graph has whatever Python decided baked in. So the values that Python may have decided by are noted, and
compared at each call. What cannot be seen (a file, the clock, another thread) is not.
"""

from __future__ import annotations

import argparse
import gc
import sys
import sysconfig
import types
import weakref
from collections import deque
from collections.abc import Collection, Iterable, Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules import module as hooks

from ..replay.calls import is_plain
from .contents import ATOMS, LIBRARIES, content, is_array, kinds, slots_of
from .limits import OF_ALL_MODULES
from .structure import equal
from .unchanged import Unchanged

_OPAQUE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, type, torch.Generator)
_MEMBERS = ("_parameters", "_buffers", "_modules")
_LIBRARY = (str(Path(torch.__file__).parent), str(Path(__file__).parent.parent))
_PYTHON = sysconfig.get_paths()["stdlib"]
_DEPTH = 5  # how far attributes of attributes are followed
_MOST = 100_000  # values watched; beyond, only identities are
_MISSING = object()
_NOT_A_USERS = (*LIBRARIES, *sys.stdlib_module_names)
_SHAPE, _STRIDE = attrgetter("shape"), torch.Tensor.stride

Step = tuple[str, Any]  # ("attribute", name) or ("item", key)


class Change(NamedTuple):
    """An attribute that forward set: the place of its entry in a `State`, its name and its new value."""

    kind: str
    entry: int
    key: Any
    value: Any


class State:
    """What a model's Python state is now; `difference` says what has changed since.

    Args:
        model: the module whose attributes, and those of the objects that it holds, are watched.

    Attributes:
        paths: for each tensor that an attribute holds and that is no parameter or buffer, by id, how to get to it from
            the model.
    """

    def __init__(self, model: nn.Module) -> None:
        self.paths: dict[int, tuple[Step, ...]] = {}
        self._values: list[tuple[dict[Any, Any], Any, Any, str]] = []  # compared by identity, then by value
        self._contents: list[tuple[Any, Any, str]] = []  # lists, dicts and sets: compared by what is in them
        self._sizes: list[tuple[dict[Any, Any], int, str]] = []
        self._seen: set[int] = set()
        self._before: dict[int, Any] = {}
        self._added: dict[int, int] = {}
        self._changes: list[Change] = []
        self._unchanged: Unchanged | None = None
        self._frames: set[tuple[types.CodeType, int]] = set()
        self._globals: set[tuple[int, str]] = set()
        self._closures: list[types.CodeType] = []
        self._tensors: list[torch.Tensor] = []
        self._looks: list[Any] = []
        for kind in OF_ALL_MODULES:
            self._contents.append((every := getattr(hooks, kind), content(every), f"torch's {kind.strip('_')}"))
        classes = {cls: None for m in model.modules() for cls in type(m).__mro__ if _package(cls) not in LIBRARIES}
        for cls in classes:
            self._class(cls, None)
        for name, module in model.named_modules():
            path: tuple[Step, ...] = tuple(("attribute", part) for part in name.split(".")) if name else ()
            self._module(module, name or type(module).__name__, path)

        self._own = len(self._values), len(self._contents), len(self._sizes)

    def with_globals(self, other: State) -> None:
        """Watch what is not the model's in another state, too."""
        values, contents, sizes = other._own
        self._values += other._values[values:]
        self._contents += other._contents[contents:]
        self._sizes += other._sizes[sizes:]
        self._unchanged = None

    def __deepcopy__(self, memo: Any) -> State:
        return self

    def look_at(self, tensors: Iterable[Any]) -> None:
        """Watch shapes and strides of these parameters and buffers, too."""
        self._tensors = [t for t in tensors if isinstance(t, torch.Tensor) and is_plain(t)]
        self._looks = [list(map(_SHAPE, self._tensors)), list(map(_STRIDE, self._tensors))]

    def difference(self) -> str | None:
        """What is not as it was, for a message; None if all is."""
        if self._tensors and [list(map(_SHAPE, self._tensors)), list(map(_STRIDE, self._tensors))] != self._looks:
            return "the shape or the strides of a parameter or buffer are others"
        if not (self._before or self._added):
            if self._unchanged is None:
                self._unchanged = Unchanged(self._values, self._sizes, self._contents)
            if self._unchanged.surely():
                return None
        for index, (container, key, expected, label) in enumerate(self._values):
            found = container.get(key, _MISSING)
            if found is not expected and not (isinstance(expected, ATOMS) and equal(found, expected)):
                if index in self._before and equal(found, self._before[index]):
                    continue  # not settled yet
                return f"{label}, which was {_short(expected)}, is {_short(found)}"
        for index, (container, size, label) in enumerate(self._sizes):
            if len(container) != size and len(container) != size - self._added.get(index, 0):
                return f"{label} has other attributes"
        for value, expected, label in self._contents:
            if content(value) != expected:
                return f"{label} holds other values"
        return None

    def picture(self) -> dict[str, Any]:
        """The watched numbers, strings and flags by their names, such that those of a copy of the model are equal."""
        found = {label: v for _, _, v, label in self._values if isinstance(v, ATOMS)}
        found.update({f"{label} (contents)": kinds(value) for value, _, label in self._contents[: self._own[1]]})
        return found

    # -- what the first call settles --------------------------------------------------------------------------------

    def changes(self) -> list[Change] | None:
        """Which numbers, strings and flags forward has set; None if it changed anything else."""
        found = []
        for index, (container, key, expected, _) in enumerate(self._values[: self._own[0]]):
            now = container.get(key, _MISSING)
            if now is not expected and not (isinstance(expected, ATOMS) and equal(now, expected)):
                if not (isinstance(expected, ATOMS) and isinstance(now, ATOMS) and isinstance(container, dict)):
                    return None
                found.append(Change("value", index, key, now))
        for index, (container, size, _) in enumerate(self._sizes[: self._own[2]]):
            known = {key for c, key, _, _ in self._values if c is container}
            new = [k for k in container if k not in known and k not in _MEMBERS] if len(container) != size else []
            if len(container) != size + len(new) or not all(isinstance(container[key], ATOMS) for key in new):
                return None
            found += [Change("size", index, key, container[key]) for key in new]
        if any(content(value) != expected for value, expected, _ in self._contents):
            return None
        return found

    def apply(self, changes: list[Change]) -> None:
        """Set on this state's model what `changes` says of another one's."""
        for change in changes:
            container = (self._values if change.kind == "value" else self._sizes)[change.entry][0]
            container[change.key] = change.value

    def expect(self, changes: list[Change]) -> None:
        """Hold as well before the model's first call, which makes these changes; `settle` then makes them."""
        for change in changes:
            if change.kind == "value":
                container, key, before, label = self._values[change.entry]
                if not equal(before, change.value):
                    self._before[change.entry] = before
                    self._values[change.entry] = (container, key, change.value, label)
            else:
                container, size, label = self._sizes[change.entry]
                if change.key not in container:
                    self._added[change.entry] = self._added.get(change.entry, 0) + 1
                    self._sizes[change.entry] = (container, size + 1, label)
        self._changes = changes

    def settle(self) -> None:
        """The graph has run in place of the first call: change what that would have changed."""
        if self._before or self._added:
            self.apply(self._changes)
            self._before.clear()
            self._added.clear()

    # -- modules and what they hold ---------------------------------------------------------------------------------

    def _module(self, module: nn.Module, label: str, path: tuple[Step, ...]) -> None:
        self._seen.add(id(module))
        own = module.__dict__
        self._sizes.append((own, len(own), label))
        for key, value in own.items():
            if key in _MEMBERS:
                self._sizes.append((value, len(value), f"{label} ({key})"))
                self._values += [(value, name, member, f"{label}.{name}") for name, member in value.items()]
            else:
                self._watch(own, key, value, f"{label}.{key}", (*path, ("attribute", key)), _DEPTH)

    def _class(self, cls: type, names: Collection[str] | None) -> None:
        """Watch what a class of a user's holds, by identity: of these names, or all that are not special."""
        own = vars(cls)
        for key, value in own.items():
            if key in names if names is not None else not key.startswith("__"):
                self._values.append((own, key, value, f"{cls.__qualname__}.{key}"))  # type: ignore[arg-type]

    def _watch(
        self, container: dict[Any, Any], key: Any, value: Any, label: str, path: tuple[Step, ...], depth: int
    ) -> None:
        self._values.append((container, key, value, label))
        self._into(value, label, path, depth)

    def _into(self, value: Any, label: str, path: tuple[Step, ...], depth: int) -> None:
        """Watch what a value holds."""
        if isinstance(value, torch.Tensor):
            self.paths.setdefault(id(value), path)
            return
        if isinstance(value, types.MethodType):
            value, path = value.__self__, ()
        if depth == 0 or isinstance(value, (*ATOMS, *_OPAQUE)) or id(value) in self._seen:
            return
        if len(self._values) > _MOST:
            return
        if isinstance(value, nn.Module):  # held otherwise than as a submodule
            self._module(value, label, path)
            return
        self._seen.add(id(value))
        if is_array(value) or (names := slots_of(value)):
            self._contents.append((value, content(value), label))
            for name in () if is_array(value) else names:
                self._into(getattr(value, name, None), f"{label}.{name}", (), depth - 1)
            return
        if isinstance(value, (list, dict, set, tuple, deque)):
            if isinstance(value, list) and value and isinstance(value[0], weakref.ref):
                return  # a cache of the library's
            self._contents.append((value, content(value), label))
            items = value.items() if isinstance(value, dict) else enumerate(value) if not isinstance(value, set) else ()
            for key, item in list(items):
                self._into(item, f"{label}[{key!r}]", (*path, ("item", key)), depth - 1)
        own = getattr(value, "__dict__", None)
        if isinstance(own, dict) and _of_a_user(value):
            self._sizes.append((own, len(own), label))
            for key, item in list(own.items()):
                self._watch(own, key, item, f"{label}.{key}", (*path, ("attribute", key)), depth - 1)

    # -- functions that forward runs --------------------------------------------------------------------------------

    def frame(self, frame: types.FrameType) -> None:
        """A Python function begins to run within forward: watch the globals that its code names."""
        code = frame.f_code
        name = code.co_filename
        if (code, id(frame.f_globals)) in self._frames or name.startswith(_LIBRARY):
            return
        if name.startswith((_PYTHON, "<frozen")) and "-packages" not in name:
            return
        self._frames.add((code, id(frame.f_globals)))
        if set(code.co_freevars) - {"__class__"}:
            self._closures.append(code)
        values = frame.f_globals
        for name in _names_in(code):
            value = values.get(name, _MISSING)
            if name.startswith("__") or value is _MISSING:
                continue
            if (id(values), name) in self._globals:
                continue
            self._globals.add((id(values), name))
            label = f"{name} in {Path(code.co_filename).name}"
            if isinstance(value, (*_OPAQUE, nn.Module)):
                self._values.append((values, name, value, label))
                if isinstance(value, type) and _package(value) not in LIBRARIES:
                    self._class(value, set(_names_in(code)))
                elif isinstance(value, types.ModuleType) and value.__name__.partition(".")[0] not in _NOT_A_USERS:
                    own = vars(value)
                    self._values += [(own, n, own[n], f"{value.__name__}.{n}") for n in _names_in(code) if n in own]
            elif isinstance(value, (*ATOMS, list, dict, set, tuple, deque, torch.Tensor)) or _of_a_user(value):
                self._watch(values, name, value, label, (), _DEPTH)

    def closures(self) -> None:
        """Forward has ended: watch what the functions that it ran have closed over."""
        if not self._closures:
            return
        for function in gc.get_referrers(*self._closures):
            if not isinstance(function, types.FunctionType) or function.__closure__ is None:
                continue
            for name, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True):
                try:
                    value = cell.cell_contents
                except ValueError:  # empty
                    continue
                label = f"{name} in {function.__qualname__}"
                if isinstance(value, _OPAQUE):
                    self._contents.append((cell, content(cell), label))
                elif isinstance(value, (*ATOMS, list, dict, set, tuple, deque)) or _of_a_user(value):
                    self._contents.append((cell, content(cell), label))
                    self._into(value, label, (), _DEPTH)
        self._closures.clear()


def _names_in(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):  # a comprehension or an inner function
            yield from _names_in(constant)


def _of_a_user(value: Any) -> bool:
    """Whether an object may hold state that forward is steered by, and not a library's own."""
    if isinstance(value, (types.SimpleNamespace, argparse.Namespace, deque)):
        return True
    if isinstance(value, (*ATOMS, *_OPAQUE, torch.Tensor)):
        return False
    if not hasattr(value, "__dict__"):
        return is_array(value) or bool(slots_of(value))
    return _package(type(value)) not in _NOT_A_USERS


def _package(cls: type) -> str:
    return cls.__module__.partition(".")[0]


def resolve(model: nn.Module, path: tuple[Step, ...]) -> Any:
    """What a path in `State.paths` leads to on this model."""
    value: Any = model
    for kind, key in path:
        value = getattr(value, key) if kind == "attribute" else value[key]
    return value


def _short(value: Any) -> str:
    if value is _MISSING:
        return "gone"
    return repr(value)[:60] if isinstance(value, ATOMS) else f"a {type(value).__name__}"
