"""Straight-line Python for a group whose calls are all familiar: what its replay does, with nothing looked up."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from .ambient import Autocast, AutocastState, Choices, choices, default_dtype, no_autocast
from .calls import tensors_in
from .familiar import Familiar
from .group import Group, changed
from .noted import COPIED, Call, Ref
from .parts import Several, Taken, compiled, leaves

MOST_MADE = 8  # programs made for one group; a model that needs more goes another way each time

# Takes the noted tensors and versions, the generators' states, where to leave what slots wait for, what sets states.
Program = Callable[[list[Any], dict[int, tuple[torch.Tensor, ...]], dict[Any, list[Any]], Callable[..., None]], None]


class Programs:
    """The program for one group of a plan, made when the group is replayed in the same way for the second time.

    Attributes:
        autocast: the state under which it is to run; it changes it by itself for calls of another.
    """

    __slots__ = ("_calls", "_chosen", "_dtypes", "_expected", "_made", "_program", "autocast")

    def __init__(self) -> None:
        self._calls: list[Call | Familiar] = []
        self._expected: dict[tuple[int, int, int], int] = {}
        self._program: Program | None = None
        self._made = 0
        self._dtypes: set[torch.dtype] = set()  # the default types under which its calls were made
        self._chosen: set[Choices] = set()  # and the settings, of calls that depend on those
        self.autocast = no_autocast()

    def __reduce__(self) -> tuple[Any, ...]:  # what is compiled stays in its process
        return Programs, ()

    def find(self, group: Group) -> Program | None:
        """The program for a group as it was noted in this step; None if there is none yet."""
        if group.calls != self._calls or group.expected != self._expected:
            self._calls, self._expected, self._program = group.calls.copy(), group.expected.copy(), None
        elif self._program is None and self._made < MOST_MADE:
            self._made += 1
            calls = [call for call in self._calls if isinstance(call, Familiar)]
            alike = len({call.autocast for call in calls}) == 1
            self.autocast = calls[0].autocast if alike else no_autocast()
            self._program = _program(calls, self._expected, self.autocast)
            self._dtypes = {call.choices[0] for call in calls}
            self._chosen = {call.choices for call in calls if call.chooses}
        # It sets nothing, so it does where the settings are those of forward.
        if self._dtypes - {default_dtype()} or (self._chosen and self._chosen != {choices()}):
            return None
        return self._program


def _program(calls: list[Familiar], expected: dict[tuple[int, int, int], int], autocast: AutocastState) -> Program:
    last_use: dict[tuple[int, int], int] = {}
    for call in calls:
        for part in leaves(call.parts):
            if type(part) is Ref:
                last_use[part.call, part.output] = call.index
    reshapes = any(call.reshapes for call in calls)
    scope: dict[str, Any] = {
        "other": _other, "set_grad": torch._C._set_grad_enabled, "tensors_in": tensors_in, "same": _same,
        "push": torch._C._autograd._push_saved_tensors_default_hooks,
        "pop": torch._C._autograd._pop_saved_tensors_default_hooks,
    }  # fmt: skip
    lines, taken = [], 0
    for call in calls:
        arguments = _Arguments(call, taken, scope)
        given = [arguments.name(f"a{at}", part) for at, part in enumerate(call.parts)]
        lines += arguments.lines
        made = _made(call, given, arguments.own, scope)
        if call.autocast != autocast:
            scope[f"autocast{call.index}"] = partial(Autocast, call.autocast)
            made = [f"with autocast{call.index}():", *(f"    {line}" for line in made)]
        lines += made
        lines += _left(call, last_use, expected, reshapes)
        taken += 2 * call.sources
        ended = [_name(*ref) for ref, last in last_use.items() if last == call.index]
        if ended:
            lines.append(f"del {', '.join(ended)}")
    return compiled("replay", "taken, states, ready, set_states", lines, scope)


def _name(call: int, output: int) -> str:
    return f"v{call}_{output}"


class _Arguments:
    """What a call is given: `name` says it, and adds what has to run before to `lines`; `own` is to be let go after."""

    def __init__(self, call: Familiar, taken: int, scope: dict[str, Any]) -> None:
        self.lines: list[str] = []
        self.own: list[str] = []
        self._call, self._taken, self._scope = call, taken, scope
        self._variables: dict[Ref, str] = {}

    def name(self, at: str, part: Any) -> str:
        """What stands for an argument in the call, `at` being a name of its own."""
        if type(part) is Several:
            inner = "".join(f"{self.name(f'{at}_{k}', each)}, " for k, each in enumerate(part.parts))
            return f"[{inner}]" if part.kind is list else f"({inner})"
        if type(part) is Taken:
            self._take(at, part)
            return at
        if type(part) is not Ref:
            self._scope[name := f"o{self._call.index}_{at}"] = part
            return name
        if not (self._call.wants_grad and part.needs_grad):
            return _name(part.call, part.output)
        if part not in self._variables:  # one tensor given twice stays one
            self._variables[part] = at
            self.lines.append(f"{at} = {_name(part.call, part.output)}.detach().requires_grad_()")
            self.own.append(at)
        return self._variables[part]

    def _take(self, at: str, part: Taken) -> None:
        place, add = self._taken, self.lines.append
        self._taken += 2
        self.own.append(at)
        add(f"{at} = taken[{place}]")
        other = f"other({at}, taken[{place + 1}], f{self._call.index})"
        add(f"{at} = {other}" if part.copied else f"if {at}._version != taken[{place + 1}]: {at} = {other}")
        if self._call.wants_grad:
            test, free = ("not ", "True") if part.needs_grad else ("", "False")
            add(f"if {test}{at}.requires_grad: {at} = {at}.detach().requires_grad_({free})")


def _made(call: Familiar, given: list[str], own: list[str], scope: dict[str, Any]) -> list[str]:
    """Lines that make the call and leave its result as `r`."""
    scope[f"f{call.index}"] = call.function
    count = len(given) - len(call.keys)
    given[count:] = [f"**{{{key!r}: {value}}}" for key, value in zip(call.keys, given[count:], strict=True)]
    lines = [f"set_states(states[{call.index}])"] if call.random else []
    make = f"r = f{call.index}({', '.join(given)})"
    if not call.wants_grad:
        lines.append(make)
    elif not call.captured:
        lines += ["set_grad(True)", make, "set_grad(False)"]
    else:
        # The graph holds the hooks, and so the list, which holds what holds the graph: until it is cleared.
        lines += ["saved = []", "set_grad(True)", "push(saved.append, same)", f"try: {make}"]
        lines += ["except BaseException:", "    saved.clear()", "    raise", "finally: pop()", "set_grad(False)"]
    return lines + ([f"del {', '.join(own)}"] if own else [])


def _left(
    call: Familiar, last_use: dict[tuple[int, int], int], expected: dict[tuple[int, int, int], int], reshapes: bool
) -> list[str]:
    """Lines that leave what the call made where it is waited for, and let the rest go.

    `reshapes`: a call of the group writes in place, and may change the shape of a result made before.
    """
    lines = []
    for position in call.captured:
        key = (call.index, position, 0)
        if key in expected:
            lines.append(f"s = saved[{position}]")
            lines.append(f"ready[{key}] = [s.detach() if s.requires_grad else s, {expected[key]}]")
    if call.captured:
        lines.append("s = None; saved.clear()")
    waits = {output for at, output, kind in expected if at == call.index and kind == -1}
    used = {output for at, output in last_use if at == call.index}
    # Without gradients, only what is given to a call can come out of it as a variable; what was made again is none.
    plain = not call.wants_grad and not any(type(part) is Taken for part in leaves(call.parts))
    if not call.single and waits | used:
        lines.append("r = tuple(tensors_in(r))")
    for output in sorted(waits | used):
        result = "r" if call.single else f"r[{output}]"
        made = result if plain else f"{result}.detach() if {result}.requires_grad else {result}"
        lines.append(f"{_name(call.index, output)} = {made}")
        if output in waits:
            key = (call.index, output, -1)
            left = f"{_name(call.index, output)}{'.detach()' if reshapes else ''}"
            lines.append(f"ready[{key}] = [{left}, {expected[key]}]")
        if output not in used:
            lines.append(f"del {_name(call.index, output)}")
    return [*lines, "del r"]


def _other(tensor: torch.Tensor, version: int, function: Callable[..., Any]) -> torch.Tensor:
    """In place of a tensor that is not at the version at which it was read: another copy of its copy."""
    if version != COPIED:
        changed(tensor, version, function)
    return tensor.clone()


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
