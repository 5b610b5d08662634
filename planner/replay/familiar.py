"""Calls that are made in every step: noted and run again with next to nothing between them and their kernels.

Most calls of a step differ from those of the step before in the numbers in their tensors alone. Such a call is learnt
once it has been noted in full and done as planned. From then on straight-line Python, made for it, looks at each
argument to see that it is the same call again: equal options, results of the same calls of its group in the same
places, tensors of the same kind from outside in the others. Whatever is different is noted in full.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch

from .ambient import modes_below
from .calls import is_plain, lasting
from .forward_program import forward_program
from .noted import Call, Ref, Source
from .parts import Several, Taken, fixed, leaves
from .protect import writes_in_place, written_by

if TYPE_CHECKING:
    from .directions import Direction
    from .noting import Noting

MOST_FAMILIAR = 4  # calls remembered for an operation


class Familiar:
    """A call that was made before.

    Attributes:
        function: what was called.
        parts: for each argument, the positional ones first: a `Ref`, a `Taken`, a `Several`, or the option itself.
        keys: names of the arguments that are not positional.
        index: its place in its group.
        sources: how many tensors it takes from outside its group.
        single: it returns a tensor, not several.
        random: it draws from a generator, as planned.
        writes: it writes into arguments, as planned.
        reshapes: it does, or by its name may change the shape of one.
        choices: settings under which it was made.
        autocast: likewise.
        chooses: it depends on which kernels of attention may be used.
        wants_grad, captured: its replay records gradients, and catches what it saves at these positions.
        again: makes the call if it is this one again, and notes it; see `forward_program`.

    Args:
        direction: of its operation.
        call: as it was noted in full.
        parts, index: see above.
        result: what it returned then.
    """

    __slots__ = (
        "again", "autocast", "captured", "choices", "chooses", "function", "index", "keys", "parts", "random",
        "reshapes", "single", "sources", "wants_grad", "writes",
    )  # fmt: skip

    def __init__(self, direction: Direction, call: Call, parts: list[Any], index: int, result: Any) -> None:
        self.function, self.parts, self.index = call.function, parts, index
        self.keys = tuple(call.kwargs)
        self.sources = sum(type(part) is Taken for part in leaves(parts))
        self.wants_grad, self.random, self.writes = call.wants_grad, direction.random, bool(direction.writes)
        self.reshapes = self.writes or direction.in_place
        self.captured = call.captured if call.wants_grad else ()  # without gradients nothing is saved
        self.choices, self.chooses = call.choices, _chooses(call.function, direction.name)
        self.autocast = call.autocast
        self.single = type(result) is torch.Tensor
        self.again: Callable[..., Any]  # set by `learn`

    def written_out(self, taken: Iterator[Any], states: tuple[torch.Tensor, ...] | None) -> Call:
        """The call as if it had been noted in full; `taken` gives this step's tensors and versions."""
        given = [_as_noted(part, taken) for part in self.parts]
        count = len(given) - len(self.keys)
        call = Call(self.function, tuple(given[:count]), dict(zip(self.keys, given[count:], strict=True)))
        call.grad = call.graded = self.wants_grad
        call.captured, call.autocast, call.states = self.captured, self.autocast, states
        call.choices, call.writes = self.choices, self.writes
        return call


def _as_noted(part: Any, taken: Iterator[Any]) -> Any:
    """An argument as it would have been noted in full. (A recursive closure in its caller's place would be a cycle.)"""
    if type(part) is Taken:
        return part.source(next(taken), next(taken))
    return part.kind([_as_noted(each, taken) for each in part.parts]) if type(part) is Several else part


def learn(noting: Noting, position: int, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> None:
    """Remember a call that was noted in full, and did what was planned, if it is one that can be familiar."""
    direction, call = noting.direction, noting.call
    if (
        len(direction.familiar) >= MOST_FAMILIAR
        or not lasting(call.function)
        or modes_below()  # it was noted with what they add
        or (call.states is not None and not direction.random)
        or kwargs.get("out") is not None
    ):
        return
    found = _Parts(noting)
    parts = [
        found.part(*pair) for pair in zip((*args, *kwargs.values()), (*call.args, *call.kwargs.values()), strict=True)
    ]
    written = set(direction.writes)
    if writes_in_place(direction.name, kwargs):
        ids = [id(tensor) for tensor in noting.tensors]
        by_name = written_by(direction.name, args, kwargs)
        if not all(id(tensor) in ids for tensor in by_name):
            return
        written |= {ids.index(id(tensor)) for tensor in by_name}
    if found.strange or any(_lasts(found.tensors[p], call.wants_grad) for p in direction.writes):
        return
    familiar = Familiar(direction, call, parts, noting.index, result)
    familiar.again = forward_program(familiar, direction, position, call.grad, sorted(written))
    direction.familiar = (*direction.familiar, familiar)


def _lasts(part: Ref | Taken, wants_grad: bool) -> bool:
    """Whether what a replay of a call writes into would be there afterwards, or be a variable."""
    return wants_grad if type(part) is Ref else part.needs_grad or not part.copied  # type: ignore[union-attr]


class _Parts:
    """The parts of a call that was noted in full.

    Attributes:
        tensors: those that stand for tensors, in the order in which they were noted.
        strange: one of the arguments is of a kind that cannot be familiar.
    """

    def __init__(self, noting: Noting) -> None:
        self.tensors: list[Ref | Taken] = []
        self.strange = False
        self._snapshot, self._seen = noting.direction.snapshot, set[int]()

    def part(self, value: Any, noted: Any) -> Any:
        if isinstance(value, torch.Tensor):
            self.tensors.append(found := self._tensor(value, noted))
            return found
        if fixed(noted):
            return noted
        kind = type(noted)
        if kind is type(value) and (kind is list or kind is tuple):
            return Several(kind, [self.part(*pair) for pair in zip(value, noted, strict=True)])
        self.strange = True
        return None

    def _tensor(self, value: torch.Tensor, noted: Ref | Source) -> Ref | Taken:
        if value.is_inference():  # no versions to compare
            self.strange = True
        if type(noted) is Ref:
            return noted
        # One tensor given twice is noted once.
        self.strange |= id(noted) in self._seen or not is_plain(value)
        self._seen.add(id(noted))
        return Taken(type(value), noted.needs_grad, len(self.tensors) in self._snapshot)


def _chooses(function: Callable[..., Any], name: str) -> bool:
    """Whether a call may end in a kernel of attention: by its name, or because it is Python that calls others."""
    return isinstance(function, FunctionType) or "attention" in name or "transformer" in name
