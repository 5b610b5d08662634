"""The code that runs a captured graph under a plan: call after call, with what the plan does at each written out."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import fx

from ..replay.ambient import generator_states
from ..replay.calls import storage_key, tensors_in
from ..replay.directions import HIDDEN, Direction, Directions, in_place
from ..replay.familiar import Familiar
from ..replay.noted import COPIED, held
from ..replay.parts import Several, Taken, compiled
from ..replay.protect import writes_by_options, written_by
from ..rewrite.recorder import called
from .fixed import FixedGroups, Slot
from .saved import Saved, unpack

Forward = Callable[[Any, list[torch.Tensor]], Any]  # takes a `GraphStep` and the call's tensors


def followed(graph: fx.Graph, directions: Directions) -> set[int]:
    """Operations that are followed as when a forward is, because they are within functions that are one call."""
    found: set[int] = set()
    for node in graph.nodes:
        count = node.meta.get("ops", 0)
        inside = range(node.meta["op"], node.meta["op"] + count) if count else ()
        if count > 1 or node.meta.get("name", "").endswith(".apply"):
            found |= {i for i in inside if not directions.ops[i].idle}
    return found


def forward_of(graph: fx.Graph, values: Mapping[str, Any], directions: Directions, fixed: FixedGroups) -> Forward:
    """The code for a graph.

    Args:
        graph: as it was captured.
        values: what its `get_attr` nodes stand for.
        directions, fixed: the plan.
    """
    return _Writer(graph, values, directions, fixed).written()


class _Writer:
    def __init__(self, graph: fx.Graph, values: Mapping[str, Any], directions: Directions, fixed: FixedGroups) -> None:
        self._graph, self._values, self._directions, self._fixed = graph, values, directions, fixed
        self._by_position = {n.meta["op"]: n for n in graph.nodes if n.meta.get("ops") == 1}
        self._readers: dict[tuple[int, int], list[fx.Node]] = {}
        for position, node in self._by_position.items():
            for slot in fixed.slots(position) if position < len(directions.ops) else ():
                if slot is not None and slot.output != HIDDEN:
                    self._readers.setdefault((slot.op, slot.output), []).append(node)
        # What a call may have given another look into its storage, or another storage.
        self._turned = {
            given for node in graph.nodes if _writes(node) for given in node.all_input_nodes if given.op != "get_attr"
        }
        self._filled: dict[int, list[str]] = {}  # results that slots are filled from, by group, as far as made
        self._written = {d.group for d in directions.ops if d.writes}  # groups with calls that write in place
        self._begun: set[int] = set()
        self._constants: set[fx.Node] = set()
        self._lines: list[str] = []
        self._scope: dict[str, Any] = {
            "COPIED": COPIED, "held": held, "states": generator_states, "written_by": written_by,
            "tensors_in": tensors_in, "storage_key": storage_key, "Saved": Saved, "unpack": unpack,
            "push": torch._C._autograd._push_saved_tensors_default_hooks,
            "pop": torch._C._autograd._pop_saved_tensors_default_hooks,
        }  # fmt: skip

    def written(self) -> Forward:
        inputs = [node for node in self._graph.nodes if node.op == "placeholder"]
        self._lines = ["follow, hold, new = step.__torch_function__, step.hold, []", "append = new.append"]
        self._lines += ["def pack(tensor):", "    saved = Saved(tensor)", "    append(saved)", "    return saved"]
        if inputs:
            self._lines.append(f"{', '.join(map(_name, inputs))}, = inputs")
            self._lines.append("del inputs[:]")
        ends = self._ends()
        for node in self._graph.nodes:
            if node.op == "get_attr":
                self._constants.add(node)
                self._scope[f"c_{node.name}"] = self._values[str(node.target)]
            elif node.op == "call_function":
                self._call(node)
            elif node.op == "output":
                self._lines.append(f"return {self._said(node.args[0])}")
            if node.op != "output" and (over := [_name(each) for each in ends.get(node, ())]):
                self._lines.append(f"del {', '.join(over)}")
        return compiled("forward", "step, inputs", self._lines, self._scope)

    def _ends(self) -> dict[fx.Node, list[fx.Node]]:
        """For each node, what nobody reads after it."""
        last: dict[fx.Node, fx.Node] = {}
        for node in self._graph.nodes:
            if node.op in ("placeholder", "call_function"):
                last[node] = node
            for each in node.all_input_nodes:
                if each.op != "get_attr":
                    last[each] = node
        found: dict[fx.Node, list[fx.Node]] = {}
        for node, end in last.items():
            found.setdefault(end, []).append(node)
        return found

    def _call(self, node: fx.Node) -> None:
        count, position = node.meta.get("ops", 0), node.meta.get("op", -1)
        acts = [i for i in range(position, position + count) if not self._directions.ops[i].idle]
        several = count > 1 or node.meta.get("name", "").endswith(".apply")
        if several and any(i in self._fixed.followed for i in acts):
            # Operations within a function are seen only while the step is a mode.
            self._lines += [f"step.position, step.lost = {position}, False", "with step:", f"    {self._plainly(node)}"]
            return
        if several or not count:
            self._lines.append(self._plainly(node))
            return
        direction = self._directions.ops[position]
        if position in self._fixed.followed:
            self._follow(node, position)
        elif direction.group >= 0:
            self._noted(node, position, direction)
        else:
            if _writes(node):
                self._lines.append(self._told("step.unrepeated", node))
            self._hooked(node, position, [])

    def _told(self, function: str, node: fx.Node) -> str:
        """A call of `function` with a call's name and arguments."""
        return f"{function}({node.meta['name']!r}, {self._given(node)})"

    def _given(self, node: fx.Node) -> str:
        """The arguments of a call, as a mode is told of them: a tuple and a dict."""
        given = "".join(f"{self._said(value)}, " for value in _arguments(node))
        options = ", ".join(f"{key!r}: {self._said(value)}" for key, value in node.kwargs.items())
        return f"({given}), {{{options}}}"

    def _plainly(self, node: fx.Node) -> str:
        """A line that makes the call, and nothing else."""
        return f"{_name(node)} = {self._made(node)}"

    def _made(self, node: fx.Node) -> str:
        self._scope[f"f_{node.name}"] = node.target
        arguments = [self._said(value) for value in node.args]
        arguments += [f"{key}={self._said(value)}" for key, value in node.kwargs.items()]
        return f"f_{node.name}({', '.join(arguments)})"

    def _said(self, value: Any) -> str:
        """An argument, as code."""
        if isinstance(value, fx.Node):
            return f"c_{value.name}" if value in self._constants else _name(value)
        if not _has_nodes(value):
            self._scope[name := f"o_{len(self._scope)}"] = value
            return name
        if isinstance(value, dict):
            return f"{{{', '.join(f'{key!r}: {self._said(each)}' for key, each in value.items())}}}"
        if isinstance(value, slice):
            return f"slice({', '.join(self._said(each) for each in (value.start, value.stop, value.step))})"
        inner = "".join(f"{self._said(each)}, " for each in value)
        return f"[{inner}]" if isinstance(value, list) else f"({inner})"

    # -- what the plan does at a call -------------------------------------------------------------------------------

    def _follow(self, node: fx.Node, position: int) -> None:
        """A call that is noted as when a forward is followed."""
        function = node.target
        if function in (getattr, setattr):  # a property, which a mode is told of by its descriptor
            descriptor = getattr(torch.Tensor, str(node.args[1]))
            function = descriptor.__get__ if function is getattr else descriptor.__set__
        elif function is called:
            function = self._values[str(node.all_input_nodes[0].target)]
        self._scope[f"f_{node.name}"] = function
        self._lines.append(f"step.position, step.lost = {position}, False")
        self._lines.append(f"{_name(node)} = follow(f_{node.name}, (), {self._given(node)})")

    def _noted(self, node: fx.Node, position: int, direction: Direction) -> None:
        """A call of a fixed group."""
        number, call = direction.group, direction.familiar[0]
        if number not in self._begun:
            self._begun.add(number)
            self._lines += [f"g{number} = step.begin({number})", f"t{number} = g{number}.taken"]
        if pairs := list(self._pairs(node, call)):
            self._lines.append(f"t{number} += ({', '.join(pairs)},)")
        if call.reshapes or _writes(node):
            self._lines.append(f"step.protect({self._told('written_by', node)})")
        if call.random:
            self._lines.append(f"g{number}.states[{call.index}] = states()")
        fills = [f"r[{output}]" if not call.single else _name(node) for output in sorted(direction.fills)]
        lines = [f"r = tuple(tensors_in({_name(node)}))"] if fills and not call.single else []
        for output, result in zip(sorted(direction.fills), fills, strict=True):
            lines.append(f"n{position}_{output} = {result}._version")
            readers = self._readers.get((position, output), ())
            if number in self._written or not all(self._held(reader, node, position) for reader in readers):
                # A name is given to another storage once its own is gone, which it may be when slots are filled.
                lines.append(f"k{position}_{output} = hold({result})")
            self._filled.setdefault(number, []).append(f"{position}_{output}")
        self._hooked(node, position, [*self._versions(node, direction), *lines])
        if lines and not call.single:
            self._lines.append("del r")

    def _versions(self, node: fx.Node, direction: Direction) -> Iterator[str]:
        """Lines that account for what a call writes into as its replay will."""
        tensors = list(_tensors([*_arguments(node), *node.kwargs.values()]))
        for written in (tensors[p] for p in direction.writes):
            if written in self._constants:  # statistics
                continue
            yield f"k = storage_key({_name(written)})"
            for result in self._filled.get(direction.group, ()):
                yield f"if k == k{result}: n{result} = {_name(written)}._version"

    def _pairs(self, node: fx.Node, call: Familiar) -> Any:
        """What is noted of each tensor from outside the group, and its version."""
        for value, part in zip((*_arguments(node), *node.kwargs.values()), call.parts, strict=True):
            yield from self._taken(value, part)

    def _taken(self, value: Any, part: Any) -> Any:
        if type(part) is Several:
            for each, inner in zip(value, part.parts, strict=True):
                yield from self._taken(each, inner)
        elif type(part) is Taken:
            name = self._said(value)
            if part.copied:
                yield f"{name}.detach().clone(), COPIED"
            elif value in self._constants and self._values[str(value.target)].is_leaf:
                yield f"{name}, {name}._version"
            else:
                yield f"held({name}) if {name}.requires_grad else {name}, {name}._version"

    def _hooked(self, node: fx.Node, position: int, after: list[str]) -> None:
        """Lines that make the call, then `after`, and then let go of what it has saved and a group makes again."""
        made, slots = self._plainly(node), self._fixed.slots(position)
        if not slots:
            self._lines += [made, *after]
            return
        self._lines += ["push(pack, unpack)", f"try: {made}", "finally: pop()", *after]
        self._lines += ["n = len(new)", f"if n < {len(slots)}:", "    for s in new: s.stay()", "else:"]
        self._lines += [f"    {line}" for at, slot in enumerate(slots) for line in self._settled(node, at, slot)]
        self._lines += [f"    if n > {len(slots)}:", f"        for s in new[{len(slots)}:]: s.stay()", "new.clear()"]

    def _settled(self, node: fx.Node, at: int, slot: Slot | None) -> list[str]:
        """Lines that drop a tensor which a call has saved, or have it stay."""
        lines = [f"s = new[{at}]"]
        if slot is None:
            return [*lines, "if s.tensor.requires_grad: s.stay()"]
        if slot.output == HIDDEN:
            return [*lines, f"s.drop(g{slot.group}, {slot.key}, False)"]
        source, result = self._by_position[slot.op], f"{slot.op}_{slot.output}"
        stay = f"else: s.stay(g{slot.group}, {slot.key})"
        # Another version: something that does not run again wrote into it since.
        if not self._held(node, source, slot.op):
            same = f"storage_key(s.tensor) == k{result} and s.version == n{result}"
            return [*lines, f"if {same}: s.drop(g{slot.group}, {slot.key}, False)", stay]
        name = _name(source)
        lines.append(f"if s.version != n{result}: s.stay(g{slot.group}, {slot.key})")
        lines.append(f"elif s.tensor is {name}: s.tensor, s.group, s.key = None, g{slot.group}, {slot.key}")
        lines.append(f"elif storage_key(s.tensor) == storage_key({name}): s.drop(g{slot.group}, {slot.key}, False)")
        return [*lines, stay]

    def _held(self, node: fx.Node, source: fx.Node, op: int) -> bool:
        """Whether the one result of a call is still there, as it was, when another call, or itself, has been made."""
        here = source is node or source in node.all_input_nodes
        return here and self._single(op) and source not in self._turned

    def _single(self, position: int) -> bool:
        return self._directions.ops[position].familiar[0].single


def _arguments(node: fx.Node) -> tuple[Any, ...]:
    """The positional arguments of a call, without what a graph needs beside them."""
    if node.target in (getattr, setattr):
        return (node.args[0], *node.args[2:])
    return node.args[1:] if node.target is called else node.args


def _tensors(values: Iterable[Any]) -> Iterator[fx.Node]:
    """The nodes among arguments, in the order in which a mode finds tensors there."""
    for value in values:
        if isinstance(value, fx.Node):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from _tensors(value)


def _writes(node: fx.Node) -> bool:
    """Whether a call may write into what it is given, by its name or its options."""
    name = node.meta.get("name", "")
    return in_place(name) or writes_by_options(node.kwargs)


def _name(node: fx.Node) -> str:
    return f"v_{node.name}"


def _has_nodes(value: Any) -> bool:
    if isinstance(value, fx.Node):
        return True
    if isinstance(value, (tuple, list)):
        return any(map(_has_nodes, value))
    if isinstance(value, dict):
        return any(map(_has_nodes, value.values()))
    return isinstance(value, slice) and any(map(_has_nodes, (value.start, value.stop, value.step)))
