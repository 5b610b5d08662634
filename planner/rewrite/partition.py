"""A captured graph with parts of it in checkpoints."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from ..errors import UnsupportedModelError
from ..regions import Region, Regional
from .guards import check


class Marker:
    """Says whether the results of what runs now are kept within a region."""

    __slots__ = ("on",)

    def __init__(self) -> None:
        self.on = False

    def policy(self, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        """What `create_selective_checkpoint_contexts` asks for each operation of ATen."""
        new = all(r.alias_info is None for r in op._schema.returns) if hasattr(op, "_schema") else False
        return CheckpointPolicy.MUST_SAVE if self.on and new else CheckpointPolicy.PREFER_RECOMPUTE


class Checkpointed:
    """One region: its own graph, run by non-reentrant `checkpoint`.

    Args:
        body: takes the region's inputs, returns a tuple of what is used later.
        random: whether it draws random numbers, so that the generators' states are kept.
        state: how many of the last inputs are buffers that forward changes; running again changes copies of them.
        marker: given where results within the region are kept.
    """

    def __init__(self, body: fx.GraphModule, random: bool, marker: Marker | None, state: int) -> None:
        self.body, self.marker, self.state = body, marker, state
        self._options: dict[str, Any] = {"use_reentrant": False, "preserve_rng_state": random}
        if marker is not None:
            self._options["context_fn"] = partial(create_selective_checkpoint_contexts, marker.policy)

    def __deepcopy__(self, memo: Any) -> Checkpointed:
        return self

    def __call__(self, *inputs: Any) -> Any:
        """Run the region."""
        if self.marker is not None:
            self.marker.on = False
        if not self.state:
            return checkpoint(self.body.forward, *inputs, **self._options)
        return checkpoint(Stateful(self.body.forward, inputs[-self.state :]), *inputs[: -self.state], **self._options)


class Stateful:
    """Runs with a model's buffers the first time, later with copies from before the first."""

    __slots__ = ("_body", "_copies", "_first")

    def __init__(self, body: Callable[..., Any], buffers: Sequence[torch.Tensor]) -> None:
        self._body = body
        self._first: Sequence[torch.Tensor] | None = buffers
        self._copies: list[torch.Tensor] = []

    def __call__(self, *inputs: Any) -> Any:
        """Run the body."""
        if self._first is not None:
            buffers, self._first = self._first, None
            # Here, because under a selective context both runs have to make the same calls.
            self._copies = [buffer.detach().clone() for buffer in buffers]
            return self._body(*inputs, *buffers)
        return self._body(*inputs, *(copied.clone() for copied in self._copies))


def run(region: Checkpointed, *inputs: Any) -> Any:
    """What a region's node calls."""
    return region(*inputs)


def mark(marker: Marker, on: bool) -> None:
    """What stands before and after an operation whose results are kept."""
    marker.on = on


def positions(graph: fx.Graph) -> tuple[set[int], set[int]]:
    """(barriers, whole) of a captured graph, as `Regional` takes them."""
    barriers, whole, passed = set[int](), set[int](), 0
    for node in graph.nodes:
        if "op" in node.meta:
            passed = node.meta["op"] + node.meta["ops"]
            if node.meta["ops"] != 1 or node.meta["name"].endswith(".apply"):
                whole.update(range(node.meta["op"], passed))
                barriers.add(node.meta["op"])
        elif _is_apart(node):
            barriers.add(passed)
    return barriers, whole


def partition(graph: fx.Graph, regions: Sequence[Region], regional: Regional) -> tuple[fx.Graph, dict[str, Any]]:
    """The graph with a node for each region in place of its nodes, and the regions by the names of `get_attr` nodes.

    Raises:
        UnsupportedModelError: a buffer that forward changes is not found in the graph under its name.
    """
    made, values = fx.Graph(), dict[str, Any]()
    names: dict[fx.Node, fx.Node] = {}
    for number, chunk in _chunks(list(graph.nodes), regions):
        if number is None:
            for node in chunk:
                names[node] = made.node_copy(node, lambda n: names[n])
            continue
        for node in [n for n in chunk if n.op == "get_attr"]:
            names[node] = made.node_copy(node, lambda n: names[n])
        inner = [n for n in chunk if n.op != "get_attr"]
        members = set(inner)
        inputs = list(dict.fromkeys(i for n in inner for i in n.all_input_nodes if i not in members))
        named = {regional.profile.storages[s].name for s in regional.state(regions[number])}
        state = [n for n in inputs if n.op == "get_attr" and n.target in named]
        if len(state) != len(named):
            raise UnsupportedModelError(
                f"buffers that forward changes are not found under their names: {', '.join(sorted(named))}. "
                'Use mechanism="slice".'
            )
        inputs = [n for n in inputs if n not in state] + state
        outputs = [n for n in inner if any(user not in members for user in n.users)]
        region = regions[number]
        body, marker = _body(inner, inputs, outputs, region)
        values[f"_region_{number}"] = Checkpointed(body, regional.random(region), marker, len(state))
        holder = made.get_attr(f"_region_{number}")
        call = made.call_function(run, (holder, *(names[i] for i in inputs)))
        call.meta["segment"] = number
        for position, node in enumerate(outputs):
            names[node] = made.call_function(_item, (call, position))
    return made, values


def _is_apart(node: fx.Node) -> bool:
    """Whether a node belongs in no region: a change of autocast, a call that gives no tensor (of a hook)."""
    return node.op == "call_function" and not node.meta.get("ops") and node.target not in (operator.getitem, check)


def _item(values: Any, position: int) -> Any:
    return values[position]


def _chunks(nodes: list[fx.Node], regions: Sequence[Region]) -> list[tuple[int | None, list[fx.Node]]]:
    """The nodes in order, cut where regions begin and end."""
    found: list[tuple[int | None, list[fx.Node]]] = [(None, [])]
    starts = {region.first: number for number, region in enumerate(regions)}
    stop = -1
    for node in nodes:
        op = node.meta["op"] if node.meta.get("ops") else None
        if op is not None or node.op == "output" or _is_apart(node):
            if found[-1][0] is not None and (op is None or op >= stop):
                found.append((None, []))
            if op in starts:
                found.append((starts[op], []))
                stop = regions[starts[op]].stop
        found[-1][1].append(node)
    return found


def _body(
    inner: list[fx.Node], inputs: list[fx.Node], outputs: list[fx.Node], region: Region
) -> tuple[fx.GraphModule, Marker | None]:
    body, marker = fx.Graph(), Marker() if region.kept else None
    names = {node: body.placeholder(f"input_{i}") for i, node in enumerate(inputs)}
    holder = body.get_attr("_marker") if marker is not None else None
    if holder is not None:
        body.call_function(mark, (holder, False))  # an earlier run may have been stopped within what is kept
    for node in inner:
        keep = holder is not None and node.meta.get("op") in region.kept
        if keep:
            body.call_function(mark, (holder, True))
        names[node] = body.node_copy(node, lambda n: names[n])
        if keep:
            body.call_function(mark, (holder, False))
    body.output(tuple(names[node] for node in outputs))
    return fx.GraphModule({"_marker": marker} if marker else {}, body, "Region"), marker
