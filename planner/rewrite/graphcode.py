"""The code of a captured graph: it is called as the model is, and gives what the model gives."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import fx
from torch.fx.graph import CodeGen

from ..errors import GuardError
from ..replay.ambient import autocast_state, generator_states, set_generator_states
from ..replay.calls import plain_layout
from .state import State
from .structure import put_together, same_template, take_apart


class CallCode(CodeGen):  # type: ignore[misc,unused-ignore]
    """Takes a call's arguments apart into placeholders, and puts the output together again.

    Attributes:
        inputs, tensors: the template of the captured call's (args, kwargs), and what its tensors looked like.
        output: the template of the output.
        state: the Python state under which the graph holds; None where that is checked elsewhere.
    """

    def __init__(self, inputs: Any, tensors: list[tuple[Any, ...]], output: Any, state: State | None) -> None:
        super().__init__()
        self.inputs, self.tensors, self.output, self.state = inputs, tensors, output, state
        self.modes = modes()
        self.twins: list[int] = []

    def under(self, state: State) -> CallCode:
        """The same for another model's Python state."""
        made = CallCode(self.inputs, self.tensors, self.output, state)
        made.modes, made.twins = self.modes, self.twins
        return made

    def __deepcopy__(self, memo: Any) -> CallCode:
        return self

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, *, expanded_def: bool = False) -> str:
        """The head of the generated function."""
        names = "".join(f"{name.partition(':')[0].partition('#')[0].strip()}, " for name in free_vars if name != "self")
        head = f"def {self._func_name}(self, *args, **kwargs):\n    "
        return head + (f"{names}= " if names else "") + "self._graph._codegen.flat(args, kwargs)"

    def generate_output(self, output_args: Any, *, descs: Sequence[str] | None = None, repr_fn: Any = repr) -> str:
        """The return statement of the generated function."""
        return f"return self._graph._codegen.process_outputs({(repr_fn or repr)(output_args)})"

    def process_inputs(self, *args: Any) -> Any:
        """The tensors of a call with these positional arguments."""
        return self.flat(args, {})

    def process_outputs(self, outputs: Any) -> Any:
        """The output with the model's own types."""
        if self.state is not None:
            self.state.settle()
        return put_together(self.output, outputs)

    def flat(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
        """The tensors of a call, after checking that it is one of the captured kind.

        Raises:
            GuardError: the call, a mode or the model's Python state differs.
        """
        template, tensors = take_apart((args, kwargs))
        if not same_template(template, self.inputs):
            raise GuardError("the call's arguments differ from those that the graph was captured with")
        if [look(t) for t in tensors] != self.tensors:
            raise GuardError("shapes, types or devices of the call's tensors differ from those captured")
        if twins(tensors) != self.twins:
            raise GuardError("other tensors are given more than once than when the graph was captured")
        if modes() != self.modes:
            raise GuardError("gradients or autocast are switched otherwise than when the graph was captured")
        changed = self.state.difference() if self.state is not None else None
        if changed is not None:
            raise GuardError(f"{changed}: the model may take another path than the captured one")
        return tensors


def look(tensor: torch.Tensor) -> tuple[Any, ...]:
    """What of a tensor may steer a forward without its values being read."""
    strides = tensor.stride() if tensor.layout is torch.strided else ()
    plain = plain_layout(tensor)
    kind = type(tensor), tensor.is_inference()
    return tensor.shape, tensor.dtype, tensor.device, tensor.requires_grad, strides, plain, *kind


def twins(tensors: list[torch.Tensor]) -> list[int]:
    """Where each tensor is met first; nothing if none is met twice."""
    if len(set(map(id, tensors))) == len(tensors):
        return []
    first: dict[int, int] = {}
    return [first.setdefault(id(tensor), i) for i, tensor in enumerate(tensors)]


def modes() -> tuple[Any, ...]:
    """The modes that decide what a call does, other than the model's."""
    cached = torch.is_autocast_cache_enabled()
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast_state(), cached


class CapturedModule(fx.GraphModule):  # type: ignore[misc,unused-ignore]
    """A captured forward. A call whose guards fail raises `GuardError` and leaves generators and buffers as they were.

    `meta["guards"]` lists the values that forward read from tensors, `meta["limits"]` what eager does beyond the graph,
    `meta["undo"]` the names of the tensors that the graph writes into and that exist before the call, `meta["draws"]`
    whether it draws from a generator.
    """

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the graph.

        Raises:
            GuardError: the model would take another path in this call.
        """
        return self.guarded(super().__call__, args, kwargs)

    def within(self, context: AbstractContextManager[Any], args: Any, kwargs: Any) -> Any:
        """Run the graph within a context, which sees the graph's calls and no others."""
        run = super().__call__

        def ran(*args: Any, **kwargs: Any) -> Any:
            with context:
                return run(*args, **kwargs)

        return self.guarded(ran, args, kwargs)

    def guarded(self, run: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Run code that stands for the graph; where it fails, modes are put back, and where a guard does, all is."""
        graded, cast, cached = torch.is_grad_enabled(), autocast_state(), torch.is_autocast_cache_enabled()
        before = Undo(self, args, kwargs) if self.meta["guards"] else None
        try:
            return run(*args, **kwargs)
        except BaseException as error:
            torch.set_grad_enabled(graded)
            torch.set_autocast_cache_enabled(cached)
            for device, enabled, dtype in cast:
                torch.set_autocast_enabled(device, enabled)
                torch.set_autocast_dtype(device, dtype)
            if before is not None and isinstance(error, GuardError):
                before.undo()
                raise error.with_traceback(None) from None  # which holds what the abandoned run has made
            raise


class Undo:
    """Generators' states and written tensors as they are before a run, to be put back."""

    def __init__(self, module: fx.GraphModule, args: Any, kwargs: Any) -> None:
        self._states = generator_states() if module.meta["draws"] else None
        tensors = [operator.attrgetter(name)(module) for name in module.meta["undo"]]
        inputs = take_apart((args, kwargs))[1]
        tensors += [inputs[i] for i in module.meta["undo_inputs"] if i < len(inputs)]
        self._copies = [(t, t.detach().clone()) for t in tensors]

    def undo(self) -> None:
        """Put everything back."""
        if self._states is not None:
            set_generator_states(self._states)
        with torch.no_grad():
            for tensor, copied in self._copies:
                tensor.detach().copy_(copied)


def set_autocast(state: tuple[tuple[str, bool, torch.dtype], ...], cached: bool, clear: bool) -> None:
    """Switch autocast as forward does at this place; `clear` where it lets its cache of cast weights go.

    `cached`: whether it has one.
    """
    torch.set_autocast_cache_enabled(cached)
    for device, enabled, dtype in state:
        torch.set_autocast_enabled(device, enabled)
        torch.set_autocast_dtype(device, dtype)
    if clear:
        torch.clear_autocast_cache()


def autocast_depth() -> int:
    """How many autocast contexts are open."""
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())
