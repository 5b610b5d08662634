"""Straight-line Python for a familiar call in forward: is it the same again? Then note it, make it, bind its result."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch

from .ambient import any_autocast, autocast_state, choices, default_dtype, generator_states, modes_below, no_autocast
from .calls import is_operation, storage_key, version_of
from .noted import COPIED, Ref, held
from .parts import Several, Taken, compiled, same

if TYPE_CHECKING:
    from .directions import Direction
    from .familiar import Familiar

OTHERWISE = "a call of that name that does something else"
MISS = object()  # returned where it is another call
# Takes the follower and the arguments. Whatever may raise by itself comes before anything is noted.
Again = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]


def forward_program(familiar: Familiar, direction: Direction, position: int, grad: bool, written: list[int]) -> Again:
    """Code for one call.

    Args:
        familiar, direction: the call, and what to do with it.
        position: of its operation in the plan.
        grad: whether it was made with gradients on.
        written: numbers of the tensors that it writes into, by its name or as planned.
    """
    scope: dict[str, Any] = {
        "me": familiar, "f": familiar.function, "keys": familiar.keys, "same": same, "grad": grad, "miss": MISS,
        "is_grad_enabled": torch.is_grad_enabled, "any_autocast": any_autocast, "autocast_state": autocast_state,
        "autocast": familiar.autocast, "strided": torch.strided, "storage_key": storage_key, "held": held,
        "states": generator_states, "modes_below": modes_below, "choices": choices, "chosen": familiar.choices,
        "default_dtype": default_dtype, "direction": direction, "slots": direction.slots, "ref": weakref.ref,
        "otherwise": OTHERWISE, "version_of": version_of,
        "is_operation": is_operation, "Tensor": torch.Tensor, "Parameter": torch.nn.Parameter, "COPIED": COPIED,
        "push": torch._C._autograd._push_saved_tensors_default_hooks,
        "pop": torch._C._autograd._pop_saved_tensors_default_hooks,
        "top": torch._C._autograd._top_saved_tensors_default_hooks,
    }  # fmt: skip
    names = [f"a{at}" for at in range(len(familiar.parts))]
    tensors = list(_tensors(names, familiar.parts))
    taken = [name for name, part in tensors if type(part) is Taken]
    lines = [f"group = step.groups[{direction.group}]", f"if group is None: group = step.group({direction.group})"]
    lines += [f"if {' or '.join(_differs(familiar))}: return miss", "made = step.made"]
    lines += _given(familiar, names)
    looker = _Looker(direction.group, familiar.wants_grad, scope)
    looks = [line for pair in zip(names, familiar.parts, strict=True) for line in looker.lines(*pair)]
    if refs := [name for name, part in tensors if type(part) is Ref]:
        lines.append("overwritten = step.overwritten")
        looks.append(
            f"if overwritten and ({' or '.join(f'storage_key({n}) in overwritten' for n in refs)}): return miss"
        )
    if twice := [f"{a} is {b}" for i, a in enumerate(taken) for b in taken[:i]]:  # it would be noted once
        distinct = f"len({{{', '.join(f'id({name})' for name in taken)}}}) != {len(taken)}"
        looks.append(f"if {' or '.join(twice) if len(taken) < 4 else distinct}: return miss")
    if familiar.random:
        looks.append("drawn = states()")
    lines += ["try:", *(f"    {line}" for line in looks or ["pass"])]
    lines.append("except RuntimeError: return miss")  # an inference tensor, which has no version
    if familiar.random:
        lines.append(f"group.states[{familiar.index}] = drawn")
    if taken:
        copied = [part.copied for _, part in tensors if type(part) is Taken]
        lines.append(f"group.taken += ({', '.join(map(_pair, taken, copied))})")
    lines.append("group.calls.append(me)")
    by_number = [name for name, _ in tensors]
    if written:
        lines.append("group.reshapes = True")
    before = [f"step.protect([{', '.join(by_number[p] for p in written)}])"] if written else []
    if direction.writes:
        before.insert(0, f"covered = step.before_write([{', '.join(by_number[p] for p in direction.writes)}])")
    lines += _call(familiar, direction, before)
    lines += [f"step.accounted.note({by_number[p]})" for p in direction.writes]
    lines += _bind(familiar, direction, taken)
    lines += ["if step.unsettled: step.settle()", f"step.position = {position + 1}", "return r"]
    return compiled("again", "step, args, kwargs", lines, scope)


def _tensors(names: list[str], parts: list[Any]) -> Iterator[tuple[str, Ref | Taken]]:
    for name, part in zip(names, parts, strict=True):
        if type(part) is Several:
            yield from _tensors([f"{name}_{at}" for at in range(len(part.parts))], part.parts)
        elif type(part) is Ref or type(part) is Taken:
            yield name, part


def _differs(familiar: Familiar) -> list[str]:
    """Tests of what a call depends on besides its arguments."""
    return [
        f"len(group.calls) != {familiar.index}", "is_grad_enabled() is not grad", "modes_below()",
        "any_autocast()" if familiar.autocast is no_autocast() else "autocast_state() != autocast",
        "choices() != chosen" if familiar.chooses else "default_dtype() is not chosen[0]",
    ]  # fmt: skip


def _given(familiar: Familiar, names: list[str]) -> list[str]:
    lines = []
    if familiar.keys:
        lines += ["if tuple(kwargs) != keys: return miss", "given = (*args, *kwargs.values())"]
    else:
        lines += ["if kwargs: return miss", "given = args"]
    lines.append(f"if len(given) != {len(names)}: return miss")
    if names:
        lines.append(f"{', '.join(names)}, = given")
    return lines


class _Looker:
    """Writes lines that look whether an argument of a call is as it was."""

    def __init__(self, group: int, wants_grad: bool, scope: dict[str, Any]) -> None:
        self._group, self._wants_grad, self._scope = group, wants_grad, scope

    def lines(self, name: str, part: Any) -> list[str]:
        kind = type(part)
        self._scope[f"want_{name}"] = part.kind if kind is Taken or kind is Several else part
        if kind is Several:
            names = [f"{name}_{at}" for at in range(len(part.parts))]
            found = [f"if type({name}) is not want_{name} or len({name}) != {len(names)}: return miss"]
            found.append(f"{', '.join(names)}, = {name}")
            return found + [line for pair in zip(names, part.parts, strict=True) for line in self.lines(*pair)]
        if kind is Ref:
            tests = [
                "entry is None", f"entry[0]() is not {name}", f"entry[1] != {self._group}",
                f"entry[3] != {(part.call, part.output)}",
                f"(entry[2] != {name}._version and step.accounted.get(storage_key({name})) != {name}._version)",
            ]  # fmt: skip
        elif kind is Taken:
            tests = [
                f"type({name}) is not want_{name}", f"{name}.layout is not strided", f"{name}._version < 0",
                f"(entry is not None and entry[1] == {self._group} and entry[0]() is {name})",
            ]  # fmt: skip
        else:
            return [f"if {name} is not want_{name} and not same({name}, want_{name}): return miss"]
        if self._wants_grad:
            tests.append(f"{name}.requires_grad is not {part.needs_grad}")
        return [f"entry = made.get(id({name}))", f"if {' or '.join(tests)}: return miss"]


def _pair(name: str, copied: bool) -> str:
    if copied:
        return f"{name}.detach().clone(), COPIED"
    return f"held({name}) if {name}.requires_grad and type({name}) is not Parameter else {name}, {name}._version"


def _call(familiar: Familiar, direction: Direction, before: list[str]) -> list[str]:
    """Lines that make the call, with those of `before` before it, and do as planned with what it saves."""
    call = f"r = f(*args{', **kwargs' if familiar.keys else ''})"
    withdraw = f"step.withdraw(group, {familiar.index}, len(group.taken) - {2 * familiar.sources})"
    fails = ["except BaseException:", f"    {withdraw}", "    raise"]
    protected = ["try:", *(f"    {line}" for line in before), *fails] if before else []
    after = ["step.after_write(direction.name, covered)"] if direction.writes else []
    fails[1:1] = [f"    {line}" for line in after]
    lines = ["try:", f"    {call}", *fails]
    if direction.slots:  # a saved-tensor hook of the model's own on top is left to it
        hooked = ["step.slots, step.saved, step.watched = slots, 0, False", "push(step.pack, step.unpack)"]
        hooked += [*lines, "finally: pop()"]
        lines = ["if top(True) == step.hooks_below:", *(f"    {line}" for line in hooked)]
        lines += ["else:", "    try:", f"        {call}", *(f"    {line}" for line in fails)]
    odd = [
        f"    {withdraw}",
        "    step.lose(direction.name, 'a call of that name that does something else')",
        "    return r",
    ]
    return [
        *protected,
        *lines,
        *after,
        f"if {'type(r) is not Tensor and ' if familiar.single else ''}not is_operation(r):",
        *odd,
    ]


def _bind(familiar: Familiar, direction: Direction, taken: list[str]) -> list[str]:
    """Lines that note which results a replay will make again; see `Step.bind`."""
    given = f"{{{', '.join(f'storage_key({name})' for name in taken)}}}" if taken else "()"
    bind = f"step.bind(direction, {familiar.index}, r, {given})"
    kind = "is not" if familiar.single else "is"
    lines = [f"if type(r) {kind} Tensor:", "    group.strange = True"]  # made again with nothing taken for granted
    if not familiar.single:
        return [*lines, bind]
    lines.append(f"    {bind}")
    if not (direction.dropped_outputs and direction.dropped_outputs[0]):
        return [*lines, "else:", "    made.pop(id(r), None)"]
    if taken:
        lines += ["elif (" + " or ".join(f"key == storage_key({name})" for name in taken) + "):"]
        lines += ["    made.pop(id(r), None)"]
        lines.insert(0, "key = storage_key(r)")
    lines += ["else:", f"    made[id(r)] = e = (ref(r), {direction.group}, version_of(r), {(familiar.index, 0)})"]
    return [*lines, "    step.fill(r, 0, e)"] if 0 in direction.fills else lines
