"""A captured graph, bound to the tensors of one model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import fx, nn

from ..errors import GuardError
from .graphcode import CapturedModule
from .state import State
from .structure import equal

if TYPE_CHECKING:
    from .capture import Captured


def bind(
    captured: Captured, model: nn.Module, graph: fx.Graph | None = None, values: Mapping[str, Any] | None = None
) -> CapturedModule:
    """The captured graph on the tensors of `model`.

    Args:
        captured: what `record` returned.
        model: of the structure of the one that was captured.
        graph: what was made of the captured graph, if that is not to be run as it is.
        values: what `get_attr` nodes of `graph` name besides the captured graph's.

    Raises:
        GuardError: the model's Python state is another than that of the model that was captured.
    """
    state = State(model)
    picture = state.picture()
    either = (captured.picture, captured.settled)
    for label in sorted({*picture, *captured.picture}):
        if not any(label in p and label in picture and equal(p[label], picture[label]) for p in either):
            raise GuardError(f"the model's Python state differs from that which was captured: {label}")
    state.expect(captured.changes)
    state.with_globals(captured.state)
    graph = copy.deepcopy(graph if graph is not None else captured.graph)
    graph.set_codegen(captured.code.under(state))
    names = dict.fromkeys(str(node.target) for node in graph.nodes if node.op == "get_attr")
    extra = dict(values or {})
    found = {**captured.constants.found_on(model, [name for name in names if name not in extra]), **extra}
    state.look_at(captured.constants.found_on(model, captured.looked).values())
    module = CapturedModule(found, graph, class_name=f"Captured{type(model).__name__}")
    module.training = model.training
    module.meta.update(
        guards=captured.guards,
        limits=captured.limits,
        undo=captured.undo,
        undo_inputs=captured.undo_inputs,
        draws=captured.draws,
    )
    return module
