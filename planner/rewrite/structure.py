"""Arguments and results taken apart into tensors and a template, and put together again with their types."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

_ATOMS = (str, bytes, int, float, complex, bool, type(None), torch.dtype, torch.device, type, nn.Module)


class Hole:
    """Stands for tensor number `index`."""

    __slots__ = ("index",)

    def __init__(self, index: int) -> None:
        self.index = index


class Built:
    """A container: `make` puts it together from its items, which may be templates.

    Attributes:
        kind: the container's type.
        context: what else two containers have to agree on (keys, fields).
        items: values or templates.
    """

    __slots__ = ("context", "items", "kind", "make")

    def __init__(self, kind: type, context: Any, items: list[Any], make: Callable[[list[Any]], Any]) -> None:
        self.kind, self.context, self.items, self.make = kind, context, items, make

    def __deepcopy__(self, memo: Any) -> Built:
        return self


class _Shell:
    """Puts an object of any class together: a copy of it without its tensors, whose attributes are then set."""

    def __init__(self, original: Any, names: list[str], keys: list[Any]) -> None:
        self.shell, self.names, self.keys = copy.copy(original), names, keys
        for name in names:
            object.__setattr__(self.shell, name, None)
        for key in keys:
            dict.__setitem__(self.shell, key, None)

    def __call__(self, items: list[Any]) -> Any:
        made = copy.copy(self.shell)
        for name, value in zip(self.names, items, strict=False):
            object.__setattr__(made, name, value)
        for key, value in zip(self.keys, items[len(self.names) :], strict=True):
            dict.__setitem__(made, key, value)
        return made


def take_apart(value: Any) -> tuple[Any, list[torch.Tensor]]:
    """(template, tensors), with a hole in the template for each place of a tensor.

    Example:
        >>> template, tensors = take_apart({"x": torch.ones(1), "n": 3})
        >>> put_together(template, [torch.zeros(1)])
        {'x': tensor([0.]), 'n': 3}
    """
    taker = _Taker()
    return taker.take(value), taker.tensors


class _Taker:
    def __init__(self) -> None:
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, Any] = {}  # objects, by id: one that is met twice is made once
        self._alive: list[Any] = []

    def take(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(value)
            return Hole(len(self.tensors) - 1)
        if isinstance(value, _ATOMS):
            return value
        kind = type(value)
        if kind is tuple or kind is list:
            return Built(kind, len(value), [self.take(v) for v in value], kind)
        if kind is dict:
            keys = list(value)
            return Built(dict, keys, [self.take(v) for v in value.values()], _Keyed(keys))
        if kind in pytree.SUPPORTED_NODES:
            node = pytree.SUPPORTED_NODES[kind]
            children, context = node.flatten_fn(value)
            items = [self.take(v) for v in children]
            return Built(kind, context, items, _Registered(node.unflatten_fn, context))
        if isinstance(value, tuple):
            make: Any = kind._make if hasattr(kind, "_make") else kind
            return Built(kind, len(value), [self.take(v) for v in value], make) if _holds(value) else value
        return self._object(value, kind)

    def _object(self, value: Any, kind: type) -> Any:
        if id(value) in self._seen:
            return self._seen[id(value)]
        self._seen[id(value)] = value  # met again inside itself: as it is
        self._alive.append(value)
        fields = getattr(value, "__dict__", {})
        own = dict(value) if isinstance(value, dict) else {}
        if callable(value) or not (_holds(fields.values()) or _holds(own.values())):
            return value
        names, keys = list(fields), list(own)
        items = [self.take(v) for v in (*fields.values(), *own.values())]
        made = self._seen[id(value)] = Built(kind, (names, keys), items, _Shell(value, names, keys))
        return made


class _Keyed:
    def __init__(self, keys: list[Any]) -> None:
        self.keys = keys

    def __call__(self, items: list[Any]) -> dict[Any, Any]:
        return dict(zip(self.keys, items, strict=True))


class _Registered:
    def __init__(self, unflatten: Any, context: Any) -> None:
        self.unflatten, self.context = unflatten, context

    def __call__(self, items: list[Any]) -> Any:
        return self.unflatten(items, self.context)


def _holds(values: Iterable[Any], depth: int = 6) -> bool:
    """Whether there is a tensor in these values or their attributes."""
    for value in values:
        if isinstance(value, torch.Tensor):
            return True
        if depth == 0 or isinstance(value, _ATOMS) or callable(value):
            continue
        inner = list(value.values()) if isinstance(value, dict) else value if isinstance(value, (tuple, list)) else ()
        if _holds((*inner, *getattr(value, "__dict__", {}).values()), depth - 1):
            return True
    return False


def put_together(template: Any, tensors: Iterable[torch.Tensor]) -> Any:
    """The value that `take_apart` took apart, with these tensors in it."""
    return _put(template, list(tensors), {})


def _put(template: Any, tensors: list[torch.Tensor], made: dict[int, Any]) -> Any:
    if isinstance(template, Hole):
        return tensors[template.index]
    if isinstance(template, Built):
        if id(template) not in made:
            made[id(template)] = template.make([_put(item, tensors, made) for item in template.items])
        return made[id(template)]
    return template


def same_template(a: Any, b: Any) -> bool:
    """Whether two templates are of one structure, with equal values that are no tensors."""
    if isinstance(a, Hole) or isinstance(b, Hole):
        return isinstance(a, Hole) and isinstance(b, Hole) and a.index == b.index
    if isinstance(a, Built) or isinstance(b, Built):
        if not (isinstance(a, Built) and isinstance(b, Built)) or a.kind is not b.kind or len(a.items) != len(b.items):
            return False
        return equal(a.context, b.context) and all(map(same_template, a.items, b.items))
    return equal(a, b)


def equal(a: Any, b: Any) -> bool:
    """Equal, and of one type; NaN equals NaN; arrays by their contents."""
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(equal, a, b))
    try:
        if hasattr(a, "__array__"):
            return a.shape == b.shape and bool(((a == b) | ((a != a) & (b != b))).all())
        return bool(a == b) or (a != a and b != b)
    except Exception:  # a comparison of the user's own
        return False
