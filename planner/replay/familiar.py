"""Calls that are made in every step: noted and run again with next to nothing between them and their kernels.

Most calls of a step differ from those of the step before in the numbers in their tensors alone. Such a call is learnt
once it has been noted in full and done as planned. From then on straight-line Python, made for it, looks at each
argument to see that it is the same call again: equal options, results of the same calls of its group in the same
places, tensors of the same kind from outside in the others. Whatever is different, or writes, is noted in full.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from .ambient import any_autocast, choices, default_dtype, generator_states, modes_below, no_autocast
from .calls import is_plain, lasting, storage_key
from .noted import COPIED, Call, Ref, Source, held
from .protect import writes_in_place

if TYPE_CHECKING:
    from .directions import Direction
    from .noting import Noting

MOST_FAMILIAR = 4  # calls remembered for an operation
_ATOMS = frozenset(
    {int, float, bool, str, type(None), type(...), torch.dtype, torch.device, torch.layout, torch.memory_format}
)


class Familiar:
    """A call that was made before.

    Attributes:
        function: what was called.
        parts: for each argument, the positional ones first: a `Ref`, a `Taken`, or the option itself.
        keys: names of the arguments that are not positional.
        index: its place in its group.
        sources: how many tensors it takes from outside its group.
        single: it returns a tensor, not several.
        random: it draws from a generator, as planned.
        choices: settings under which it was made.
        chooses: it depends on which kernels of attention may be used.
        wants_grad, captured: its replay records gradients, and catches what it saves at these positions.
        note: puts the call into the group if it is this one again. Takes the group, what was made, what was
            overwritten, and the arguments.

    Args:
        direction: of its operation.
        call: as it was noted in full.
        parts, index: see above.
        result: what it returned then.
    """

    __slots__ = (
        "captured", "choices", "chooses", "function", "index", "keys", "note", "parts", "random", "single", "sources",
        "wants_grad",
    )  # fmt: skip

    def __init__(self, direction: Direction, call: Call, parts: list[Any], index: int, result: Any) -> None:
        self.function, self.parts, self.index = call.function, parts, index
        self.keys = tuple(call.kwargs)
        self.sources = sum(type(part) is Taken for part in parts)
        self.wants_grad, self.random = call.wants_grad, direction.random
        self.captured = call.captured if call.wants_grad else ()  # without gradients nothing is saved
        self.choices, self.chooses = call.choices, _chooses(call.function, direction.name)
        self.single = type(result) is torch.Tensor
        self.note: Callable[..., bool] = _noting(self, direction.group, call.grad)

    def written_out(self, taken: Iterator[Any], states: tuple[torch.Tensor, ...] | None) -> Call:
        """The call as if it had been noted in full; `taken` gives this step's tensors and versions."""
        given = [part.source(next(taken), next(taken)) if type(part) is Taken else part for part in self.parts]
        count = len(given) - len(self.keys)
        call = Call(self.function, tuple(given[:count]), dict(zip(self.keys, given[count:], strict=True)))
        call.grad = call.graded = self.wants_grad
        call.captured, call.autocast, call.states = self.captured, no_autocast(), states
        call.choices = self.choices
        return call


class Taken:
    """Stands for an argument that is a tensor from outside the group."""

    __slots__ = ("kind", "needs_grad")

    def __init__(self, kind: type, needs_grad: bool) -> None:
        self.kind, self.needs_grad = kind, needs_grad

    def source(self, tensor: torch.Tensor, version: int) -> Source:
        """The tensor as it would have been noted in full."""
        made = Source.__new__(Source)
        made.tensor, made.version, made.copied, made.needs_grad = tensor, version, version == COPIED, self.needs_grad
        return made


def learn(noting: Noting, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Remember a call that was noted in full, and did what was planned, if it is one that can be familiar."""
    direction, call = noting.direction, noting.call
    if len(direction.familiar) >= MOST_FAMILIAR or not lasting(call.function) or not _repeats(direction, call, kwargs):
        return
    parts: list[Any] = []
    seen: set[int] = set()
    for value, noted in zip((*args, *kwargs.values()), (*call.args, *call.kwargs.values()), strict=True):
        if isinstance(value, torch.Tensor) and value.is_inference():  # no versions to compare
            return
        if type(noted) is Ref:
            parts.append(noted)
        elif type(noted) is Source:
            if id(noted) in seen or not is_plain(value):
                return
            seen.add(id(noted))
            parts.append(Taken(type(value), noted.needs_grad))
        elif _fixed(noted):
            parts.append(noted)
        else:
            return
    direction.familiar = (*direction.familiar, Familiar(direction, call, parts, noting.index, result))


def _repeats(direction: Direction, call: Call, kwargs: dict[str, Any]) -> bool:
    return not (
        modes_below()  # it was noted with what they add
        or direction.snapshot
        or direction.writes
        or (call.states is not None and not direction.random)
        or call.autocast is not no_autocast()
        or writes_in_place(direction.name, kwargs)
    )


def _fixed(value: Any) -> bool:
    """Whether an option is one that `same` can compare, and that nobody can change."""
    kind = type(value)
    if kind in _ATOMS:
        return True
    if kind is slice:
        return all(map(_fixed, (value.start, value.stop, value.step)))
    return (kind is tuple or kind is list or kind is torch.Size) and all(map(_fixed, value))


def same(value: Any, want: Any) -> bool:
    """Whether two options are equal, and of equal types."""
    kind = type(value)
    if kind is not type(want):
        return False
    if kind is tuple or kind is list or kind is torch.Size:
        return len(value) == len(want) and all(map(same, value, want))
    if kind is slice:
        return all(map(same, (value.start, value.stop, value.step), (want.start, want.stop, want.step)))
    if kind is float and not value:
        return not want and math.copysign(1.0, value) == math.copysign(1.0, want)  # the two zeros are equal
    return bool(value == want)


def _chooses(function: Callable[..., Any], name: str) -> bool:
    """Whether a call may end in a kernel of attention: by its name, or because it is Python that calls others."""
    return isinstance(function, FunctionType) or "attention" in name or "transformer" in name


def _noting(familiar: Familiar, number: int, grad: bool) -> Callable[..., bool]:
    """Makes `Familiar.note` for a call in group `number` that was made with gradients on or off."""
    parts = familiar.parts
    names = [f"a{at}" for at in range(len(parts))]
    refs = [(name, part) for name, part in zip(names, parts, strict=True) if type(part) is Ref]
    taken = [(name, part) for name, part in zip(names, parts, strict=True) if type(part) is Taken]
    scope: dict[str, Any] = {
        "me": familiar, "keys": familiar.keys, "same": same, "grad": grad, "is_grad_enabled": torch.is_grad_enabled,
        "any_autocast": any_autocast, "strided": torch.strided, "storage_key": storage_key, "held": held,
        "states": generator_states, "modes_below": modes_below, "choices": choices, "chosen": familiar.choices,
        "default_dtype": default_dtype,
    }  # fmt: skip
    unless = [
        f"len(group.calls) != {familiar.index}", "is_grad_enabled() is not grad", "any_autocast()", "modes_below()",
        "choices() != chosen" if familiar.chooses else "default_dtype() is not chosen[0]",
    ]  # fmt: skip
    lines = [f"if {' or '.join(unless)}: return False"]
    if familiar.keys:
        lines += ["if tuple(kwargs) != keys: return False", "args = (*args, *kwargs.values())"]
    else:
        lines.append("if kwargs: return False")
    lines.append(f"if len(args) != {len(parts)}: return False")
    if names:
        lines.append(f"{', '.join(names)}, = args")
    for name, part in zip(names, parts, strict=True):
        scope[f"want_{name}"] = part.kind if type(part) is Taken else part
        if type(part) is not Ref and type(part) is not Taken:
            lines.append(f"if {name} is not want_{name} and not same({name}, want_{name}): return False")
            continue
        lines.append(f"entry = made.get(id({name}))")
        if type(part) is Ref:
            tests = [
                "entry is None", f"entry[0]() is not {name}", f"entry[1] != {number}",
                f"entry[3] != {(part.call, part.output)}", f"entry[2] != {name}._version",
            ]  # fmt: skip
        else:
            tests = [
                f"type({name}) is not want_{name}", f"{name}.layout is not strided",
                f"(entry is not None and entry[1] == {number} and entry[0]() is {name})",
            ]  # fmt: skip
        if familiar.wants_grad:
            tests.append(f"{name}.requires_grad is not {part.needs_grad}")
        lines.append(f"if {' or '.join(tests)}: return False")
    if refs:
        overwritten = " or ".join(f"storage_key({name}) in overwritten" for name, _ in refs)
        lines.append(f"if overwritten and ({overwritten}): return False")
    if len(taken) > 1:  # one tensor given twice is noted once
        lines.append(f"if len({{{', '.join(f'id({name})' for name, _ in taken)}}}) != {len(taken)}: return False")
    if familiar.random:  # first, since it may raise
        lines.append(f"group.states[{familiar.index}] = states()")
    if taken:
        pairs = ", ".join(f"{name} if {name}.is_leaf else held({name}), {name}._version" for name, _ in taken)
        lines.append(f"group.taken += ({pairs})")
    lines += [f"group.last_use[{(part.call, part.output)}] = {familiar.index}" for _, part in refs]
    lines += ["group.calls.append(me)", "return True"]
    return compiled("note", "group, made, overwritten, args, kwargs", lines, scope)


def compiled(name: str, parameters: str, lines: list[str], scope: dict[str, Any]) -> Callable[..., Any]:
    """A function of these lines, which sees `scope`."""
    body = "\n".join(f"    {line}" for line in lines)
    exec(compile(f"def {name}({parameters}):\n{body}\n", f"<ckpt_planner {name}>", "exec"), scope)
    found: Callable[..., Any] = scope[name]
    return found
