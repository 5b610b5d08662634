"""A captured graph with what was measured of each call, and what was decided for it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from ..decision import Decision
from ..errors import CaptureError
from ..profiling.shadow import untouched
from ..replay.ambient import set_generator_states
from .bind import bind
from .capture import record
from .graphcode import CapturedModule


def planned_graph(
    decision: Decision, model: nn.Module, args: Any, kwargs: Any, states: tuple[torch.Tensor, ...] | None
) -> CapturedModule:
    """The graph of the planned call. Each node of a call has in its `meta`, besides what `capture` gives:

    `seconds` (forward), `output_bytes` (of the memory that it makes and returns), `saved_bytes` (of the memory that it
    makes and that is saved for backward), `recomputed` and `segment` (number in the plan's segments, or None).

    Args:
        decision: what was decided.
        model, args, kwargs: the planned call.
        states: of the random generators when it was planned; None to take what they are.

    Raises:
        CaptureError: the call takes another path than when it was planned.
    """
    with untouched(), torch.enable_grad():
        if states is not None:
            set_generator_states(states)
        captured = record(model, args, kwargs)
    annotate(captured.graph, decision)
    return bind(captured, model)


def annotate(graph: torch.fx.Graph, decision: Decision) -> None:
    """Write what the decision and its profile say of each call into its node's `meta`. Raises `CaptureError`."""
    profile = decision.profile
    inside = [op for op in profile.ops if op.inside]
    saved, segments = {slot.storage for slot in profile.slots}, decision.segment_of
    born: dict[int, list[int]] = {}
    for s, storage in enumerate(profile.storages):
        born.setdefault(storage.birth, []).append(s)
    nodes = [node for node in graph.nodes if "op" in node.meta]
    if sum(node.meta["ops"] for node in nodes) != len(inside):
        raise CaptureError(_another_path(profile.model))
    for node in nodes:
        first, count = node.meta["op"], node.meta["ops"]
        if count == 1 and inside[first].name != node.meta["name"]:
            raise CaptureError(_another_path(profile.model))
        ops = range(first, first + count)
        made = {s for i in ops for s in born.get(i, ())}
        returned = {s for i in ops for s in inside[i].makes}
        segment = next((segments[i] for i in ops if i in segments), None)
        node.meta.update(
            seconds=sum(inside[i].seconds for i in ops),
            output_bytes=sum(profile.storages[s].bytes for s in returned),
            saved_bytes=sum(profile.storages[s].bytes for s in made & saved),
            recomputed=segment is not None,
            segment=segment,
        )


def _another_path(model: str) -> str:
    return (
        f"the planned call of {model} takes another path now than when it was planned (a random choice, a value, an "
        "attribute), so its graph cannot be shown with that plan; plan again"
    )
