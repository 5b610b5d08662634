"""Straight-line Python for a group whose calls are all familiar: what its replay does, with nothing looked up."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from .ambient import Choices, choices, default_dtype
from .calls import tensors_in
from .familiar import Familiar, Taken, compiled
from .group import Group, changed
from .noted import Call, Ref

MOST_MADE = 8  # programs made for one group; a model that needs more goes another way each time

# Takes the noted tensors and versions, the generators' states, where to leave what slots wait for, what sets states.
Program = Callable[[list[Any], dict[int, tuple[torch.Tensor, ...]], dict[Any, list[Any]], Callable[..., None]], None]


class Programs:
    """The program for one group of a plan, made when the group is replayed in the same way for the second time."""

    __slots__ = ("_calls", "_chosen", "_dtypes", "_expected", "_made", "_program")

    def __init__(self) -> None:
        self._calls: list[Call | Familiar] = []
        self._expected: dict[tuple[int, int, int], int] = {}
        self._program: Program | None = None
        self._made = 0
        self._dtypes: set[torch.dtype] = set()  # the default types under which its calls were made
        self._chosen: set[Choices] = set()  # and the settings, of calls that depend on those

    def __reduce__(self) -> tuple[Any, ...]:  # what is compiled stays in its process
        return Programs, ()

    def find(self, group: Group) -> Program | None:
        """The program for a group as it was noted in this step; None if there is none yet."""
        if group.calls != self._calls or group.expected != self._expected:
            self._calls, self._expected, self._program = group.calls.copy(), group.expected.copy(), None
        elif self._program is None and self._made < MOST_MADE:
            self._made += 1
            calls = [call for call in self._calls if isinstance(call, Familiar)]
            self._program = _program(calls, self._expected)
            self._dtypes = {call.choices[0] for call in calls}
            self._chosen = {call.choices for call in calls if call.chooses}
        # It sets nothing, so it does where the settings are those of forward.
        if self._dtypes - {default_dtype()} or (self._chosen and self._chosen != {choices()}):
            return None
        return self._program


def _program(calls: list[Familiar], expected: dict[tuple[int, int, int], int]) -> Program:
    last_use: dict[tuple[int, int], int] = {}
    for call in calls:
        for part in call.parts:
            if type(part) is Ref:
                last_use[part.call, part.output] = call.index
    scope: dict[str, Any] = {
        "changed": changed, "set_grad": torch._C._set_grad_enabled, "tensors_in": tensors_in, "same": _same,
        "push": torch._C._autograd._push_saved_tensors_default_hooks,
        "pop": torch._C._autograd._pop_saved_tensors_default_hooks,
    }  # fmt: skip
    lines, taken = [], 0
    for call in calls:
        lines += _arguments(call, taken, scope)
        lines += _made(call, scope)
        lines += _left(call, last_use, expected)
        taken += 2 * call.sources
        ended = [_name(*ref) for ref, last in last_use.items() if last == call.index]
        if ended:
            lines.append(f"del {', '.join(ended)}")
    return compiled("replay", "taken, states, ready, set_states", lines, scope)


def _name(call: int, output: int) -> str:
    return f"v{call}_{output}"


def _arguments(call: Familiar, taken: int, scope: dict[str, Any]) -> list[str]:
    """Lines that look at what the call takes from outside: `a0`, `a1`, ..."""
    lines = []
    for at, part in enumerate(call.parts):
        if type(part) is Taken:
            lines.append(f"a{at} = taken[{taken}]")
            lines.append(f"if a{at}._version != taken[{taken + 1}]: changed(a{at}, taken[{taken + 1}], f{call.index})")
            if call.wants_grad:
                test, free = ("not ", "True") if part.needs_grad else ("", "False")
                lines.append(f"if {test}a{at}.requires_grad: a{at} = a{at}.detach().requires_grad_({free})")
            taken += 2
        elif type(part) is Ref:
            if call.wants_grad and part.needs_grad:
                first = call.parts.index(part)  # one tensor given twice stays one
                source = f"a{first}" if first < at else f"{_name(part.call, part.output)}.detach().requires_grad_()"
                lines.append(f"a{at} = {source}")
        else:
            scope[f"o{call.index}_{at}"] = part
    return lines


def _made(call: Familiar, scope: dict[str, Any]) -> list[str]:
    """Lines that make the call and leave its result as `r`."""
    scope[f"f{call.index}"] = call.function
    given, own = [], []
    for at, part in enumerate(call.parts):
        if type(part) is Taken or (type(part) is Ref and call.wants_grad and part.needs_grad):
            given.append(f"a{at}")
            own.append(f"a{at}")
        else:
            given.append(_name(part.call, part.output) if type(part) is Ref else f"o{call.index}_{at}")
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


def _left(call: Familiar, last_use: dict[tuple[int, int], int], expected: dict[tuple[int, int, int], int]) -> list[str]:
    """Lines that leave what the call made where it is waited for, and let the rest go."""
    lines = []
    for position in call.captured:
        key = (call.index, position, 0)
        if key in expected:
            lines.append(f"ready[{key}] = [saved[{position}].detach(), {expected[key]}]")
    if call.captured:
        lines.append("saved.clear()")
    waits = {output for at, output, kind in expected if at == call.index and kind == -1}
    used = {output for at, output in last_use if at == call.index}
    if not call.single and waits | used:
        lines.append("r = tuple(tensors_in(r))")
    for output in sorted(waits | used):
        result = "r" if call.single else f"r[{output}]"
        lines.append(f"{_name(call.index, output)} = {result}.detach() if {result}.requires_grad else {result}")
        if output in waits:
            key = (call.index, output, -1)
            lines.append(f"ready[{key}] = [{_name(call.index, output)}, {expected[key]}]")
        if output not in used:
            lines.append(f"del {_name(call.index, output)}")
    return [*lines, "del r"]


def _same(tensor: torch.Tensor) -> torch.Tensor:
    return tensor
