"""Noting one call down for its replay, and noticing when a call of the planned name does other things than planned."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from .ambient import as_modes_have_it, generator_states, modes_below
from .calls import StorageNames, is_plain, mutable, storage_key, tensors_in, version_of
from .directions import Direction
from .noted import Borrowed, Call, Ref, Source

if TYPE_CHECKING:
    from .step import Step

MOST_KNOWN = 32  # kinds of arguments remembered for an operation
_MOST_WATCHED = 1 << 16  # bytes: statistics and counters, which some kernels write without counting it

_ATOMS = frozenset({int, float, bool, str, type(None), torch.dtype, torch.device})

# The tensor, weakly; its group, version, and call and output in the group.
MadeAgain = tuple["weakref.ref[torch.Tensor]", int, int, tuple[int, int]]
Made = dict[int, MadeAgain]  # by id(tensor)


class Accounts(dict[int, int]):
    """Storage -> its version as far as replays account for it. Holds what keeps the storages' names their own."""

    def __init__(self) -> None:
        super().__init__()
        self._names = StorageNames()

    def note(self, tensor: torch.Tensor) -> None:
        """A call that a replay repeats has written into this tensor."""
        if (key := self._names.hold(tensor)) is not None:
            self[key] = version_of(tensor)


class Noting:
    """One call on its way into its group.

    Attributes:
        sound: whether the tensors are such that a replay does what this call does.
        known: whether a call with these options has been seen to draw and write as planned.
        second: the same call on its way into a second group.
    """

    __slots__ = (
        "_made", "_plain", "_seen", "_step", "call", "direction", "group", "index", "known", "second", "sound",
        "tensors",
    )  # fmt: skip

    def __init__(self, step: Step, direction: Direction) -> None:
        self.direction, self.group, self._step = direction, step.group(direction.group), step
        self._made = step.made_inside if direction.inner else step.made
        self.index = len(self.group.calls)
        self.tensors: list[torch.Tensor] = []
        self._seen: dict[int, Ref | Source | Borrowed] = {}
        self._plain: list[Any] = []
        self.sound, self.known = True, False
        self.second = None if direction.second is None else Noting(step, direction.second)

    def note(self, func: Callable[..., Any], args: Any, kwargs: Any, trusting: bool) -> None:
        """Put the call into its groups, if it is sound. `trusting`: the first call seen is the profiled one."""
        self._note(func, args, kwargs, trusting)
        if self.second is not None:
            self.second._note(func, args, kwargs, trusting)
            self.sound &= self.second.sound
        if self.sound and self.direction.writes:
            self.sound = all(self._step.may_write(tensor, self.groups) for tensor in self.written)

    def _note(self, func: Callable[..., Any], args: Any, kwargs: Any, trusting: bool) -> None:
        direction = self.direction
        if modes_below():
            given = as_modes_have_it(func, kwargs)
            self.sound, kwargs = given is not None, given or kwargs
            if not self.sound:
                return
        call = self.call = Call(func, self._flat(args), self._template(kwargs) if kwargs else {})
        call.captured, call.graded, call.writes = direction.captured, direction.graded, bool(direction.writes)
        for p in direction.writes:
            found = self._seen.get(id(self.tensors[p])) if p < len(self.tensors) else None
            if found is None or type(found) is Borrowed or (type(found) is Source and not found.copied):
                self.sound = False
        if not self.sound:
            return
        if trusting and not direction.known:
            self.remember()
        try:
            self.known = tuple(self._plain) in direction.known
        except TypeError:  # not hashable
            self.known = False
        if direction.in_place or call.writes:
            self.group.reshapes = True
        self.group.strange = True
        if direction.random:
            call.states = generator_states()
        self.group.calls.append(call)
        self.group.borrowed += [found for found in self._seen.values() if type(found) is Borrowed]

    @property
    def groups(self) -> set[int]:
        """Numbers of the groups into which the call goes."""
        return {self.direction.group} if self.second is None else {self.direction.group, self.second.direction.group}

    @property
    def written(self) -> list[torch.Tensor]:
        """What the call is planned to write into."""
        return [self.tensors[p] for p in self.direction.writes]

    def _flat(self, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """The template of positional arguments; most are tensors and numbers."""
        found = []
        for value in args:
            if isinstance(value, torch.Tensor):
                found.append(self._stand_in(value))
            elif type(value) in _ATOMS:
                self._plain.append(value)
                found.append(value)
            else:
                found.append(self._template(value))
        return tuple(found)

    def _template(self, value: Any) -> Any:
        """Arguments with `Ref` and `Source` in place of tensors. (A method: a recursive closure would be a cycle.)

        One tensor given twice has one stand-in: functions ask whether arguments are the same object.
        """
        if isinstance(value, torch.Tensor):
            return self._stand_in(value)
        kind = type(value)
        if kind is tuple or kind is list:
            return kind([self._template(v) for v in value])
        if kind is dict:
            self._plain.extend(value)
            return {k: self._template(v) for k, v in value.items()}
        if kind is slice:
            if any(isinstance(v, torch.Tensor) for v in (value.start, value.stop, value.step)) or mutable(value):
                self.sound = False  # its value is read by the call; another could be read on replay
            self._plain.append((slice, value.start, value.stop, value.step))  # a slice is not hashable everywhere
            return value
        if isinstance(value, (tuple, list)) and next(tensors_in(value), None) is not None:
            return tuple([self._template(v) for v in value])  # torch.return_types and such
        if mutable(value):
            self.sound = False  # no call that is planned to run again was given such a thing
        self._plain.append(value)
        return value

    def _stand_in(self, tensor: torch.Tensor) -> Ref | Source | Borrowed:
        position = len(self.tensors)
        self.tensors.append(tensor)
        self._plain.append(torch.Tensor)
        found = self._seen.get(id(tensor))
        if found is not None:
            return found
        if not is_plain(tensor):
            self.sound = False  # such a call is never planned to run again
        made = self._made.get(id(tensor))
        if (
            made is not None
            and made[0]() is tensor
            and made[1] == self.direction.group
            and not (self._step.overwritten and storage_key(tensor) in self._step.overwritten)
        ):
            accounted = self._step.accounted
            if version_of(tensor) != made[2] and accounted.get(storage_key(tensor) or 0) != version_of(tensor):
                self.sound = False  # something that does not run again wrote into it
            found = Ref(*made[3], tensor.requires_grad)
        elif (
            self.direction.borrowed
            and (lent := self.direction.borrowed.get(position)) is not None
            and (handle := self._step.lent(tensor, lent)) is not None
        ):
            found = Borrowed(handle, tensor.requires_grad, lent[-1])
        else:
            found = Source(tensor, position in self.direction.snapshot)
            self._step.takers.note(found)
        self._seen[id(tensor)] = found
        return found

    def given(self) -> set[int | None]:
        """The storages of the tensors that the call takes from outside its group."""
        return {storage_key(t) for t in self.tensors if type(self._seen[id(t)]) is not Ref}

    def remember(self) -> None:
        """These options are known to be harmless from now on."""
        if len(self.direction.known) < MOST_KNOWN:
            with contextlib.suppress(TypeError):  # not hashable
                self.direction.known.add(tuple(self._plain))

    def account(self) -> None:
        """After the call: note the versions of what it wrote into as planned."""
        for tensor in self.written:
            self._step.accounted.note(tensor)

    def withdraw(self) -> None:
        """Take the call out of its groups again, and let go of its tensors."""
        self.group.withdraw(self.index)
        for found in self._seen.values():
            if type(found) is Source:
                self._step.takers.forget(found)
            elif type(found) is Borrowed:
                if found.expected:
                    found.handle.group.expect(found.handle.key, -1)
                if found in self.group.borrowed:
                    self.group.borrowed.remove(found)
        if self.second is not None:
            self.second.withdraw()


class Watch:
    """What a call with options that were not seen before draws and writes. Make it right before the call."""

    __slots__ = ("_contents", "_noting", "_states", "_versions")

    def __init__(self, noting: Noting) -> None:
        self._noting = noting
        self._states = generator_states()
        self._versions, self._contents = [], []
        for p, tensor in enumerate(noting.tensors):
            if p not in noting.direction.writes:
                self._versions.append((tensor, version_of(tensor)))
                if not tensor.requires_grad and tensor.nbytes <= _MOST_WATCHED:
                    self._contents.append((tensor, tensor.detach().clone()))

    def as_planned(self) -> bool:
        """After the call: whether a replay does the same. What it drew is noted for the replay."""
        with torch.no_grad():
            for tensor, version in self._versions:
                if version_of(tensor) != version:
                    return False
            for tensor, content in self._contents:
                if not bool(((tensor == content) | ((tensor != tensor) & (content != content))).all()):
                    return False
        call = self._noting.call
        if call.states is not None or all(map(torch.equal, self._states, generator_states())):
            self._noting.remember()
        else:
            call.states = self._states
            if self._noting.second is not None:
                self._noting.second.call.states = self._states
        return True
