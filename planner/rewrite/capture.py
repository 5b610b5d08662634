"""Records the path that a model takes in eager as a torch.fx graph.

The model's own forward runs once under a `TorchFunctionMode`. No flag says that anything is traced, so the calls are
those of a training step. Each becomes a node, in order: writes without a result and reads of values, too.
"""

from __future__ import annotations

from typing import Any

from torch import nn

from ..errors import CaptureError, CkptPlannerError
from ..profiling.shadow import copied_inputs, nothing_new, shadow, untouched
from .bind import bind
from .graphcode import CallCode, CapturedModule
from .limits import side_effects
from .recorder import Recorder
from .state import Change, State


def capture(model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> CapturedModule:
    """The forward of one call as a `torch.fx.GraphModule`, as eager runs it; the model is left as it was.

    Nodes that are calls have `meta["module"]` (path of the module), `meta["place"]` ("file.py:12") and `meta["op"]`
    (position among the calls). Parameters and buffers are `get_attr` nodes under their names, tensors of the call are
    placeholders. Running the graph gives the same outputs, gradients, buffers and random draws, bit for bit, and the
    output's own types. Values that forward read from tensors are read again and compared, and so is the Python state
    that may steer it.

    Args:
        model: in the mode in which the graph is wanted.
        args, kwargs: the arguments of a call.

    Returns:
        The graph, sharing the model's parameters and buffers; called as the model is. Its `meta["guards"]` lists what
        was read from tensors; `meta["limits"]` says what forward does that no graph repeats.

    Raises:
        CaptureError: forward fails, or makes a tensor by a call that cannot be seen.
        GuardError: on a call of the graph for which the model would take another path.

    Example:
        >>> graph = capture(torch.nn.Linear(2, 1), (torch.zeros(3, 2),))
        >>> [node.op for node in graph.graph.nodes]
        ['placeholder', 'get_attr', 'get_attr', 'call_function', 'output']
        >>> graph(torch.ones(3, 2)).shape
        torch.Size([3, 1])
    """
    return bind(record(model, tuple(args), dict(kwargs or {})), model)


def record(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Captured:
    """The graph of one call, not yet bound to a model. See `capture`."""
    if not isinstance(model, nn.Module):
        raise CaptureError(f"capture takes a torch.nn.Module, not a {type(model).__name__}")
    first = _once(model, args, kwargs, None)
    changes = first.state.changes()
    if not changes:
        return first
    # A first call often settles things (a loss's type, a flag): then later calls are of a path that changes nothing.
    second = _once(model, args, kwargs, changes)
    if second.state.difference() is None and first.calls() == second.calls():
        second.picture, second.changes, second.settled = first.picture, changes, second.picture
        return second
    return first


def _once(model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], changes: list[Change] | None) -> Captured:
    with untouched():
        copy, (args, kwargs) = shadow(model), copied_inputs((args, kwargs))
        if changes:
            State(copy).apply(changes)
        recorder = Recorder(copy, args, kwargs)
        with side_effects(copy) as seen, recorder:
            try:
                output = copy(*args, **kwargs)
            except CkptPlannerError:
                raise
            except Exception as error:
                raise CaptureError(
                    f"the forward of {type(model).__name__} failed while it was captured: {type(error).__name__}: "
                    f"{error}. The same call has to work on the plain model."
                ) from error
        nothing_new(model, copy)
        return Captured(recorder, recorder.finish(output), (*recorder.limits, *seen))


class Captured:
    """A captured graph without the tensors of any model.

    Attributes:
        graph: the nodes.
        code: how it is called.
        constants: what its `get_attr` nodes name.
        guards, limits, undo, undo_inputs, draws: see `CapturedModule`.
        looked: names of parameters and buffers whose shapes or types forward read.
        picture, state: the Python state under which it was captured.
        changes, settled: what the model's first call changes of it, and the picture after that.
    """

    def __init__(self, recorder: Recorder, code: CallCode, limits: tuple[str, ...]) -> None:
        self.graph, self.code, self.constants = recorder.graph, code, recorder.constants
        self.guards, self.limits, self.draws = tuple(recorder.guards), limits, recorder.draws
        self.undo, self.undo_inputs = recorder.written()
        self.looked = tuple(recorder.looked)
        self.picture, self.state = recorder.picture, recorder.state
        self.changes: list[Change] = []
        self.settled = self.picture

    def calls(self) -> list[tuple[str, str]]:
        """Name and arguments of each call, in order."""
        return [(n.name, n.meta.get("name", "")) for n in self.graph.nodes]
