"""Writes every torch call that passes by into a torch.fx graph, and every value that is read from a tensor."""

from __future__ import annotations

import gc
import keyword
import operator
import sys
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import fx, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn.modules import module as hooks
from torch.overrides import TorchFunctionMode

from ..errors import CaptureError
from ..profiling.describe import calling_line
from ..replay.calls import call_name, is_operation, tensors_in, version_of
from .constants import Constants
from .functions import Apply, Functions
from .graphcode import CallCode, look, set_autocast, twins
from .guards import INCIDENTAL, SHAPES, Guard, check, comparable
from .settings import Settings
from .state import State
from .structure import same_template, take_apart

_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Recorder(TorchFunctionMode):
    """Records one forward of `model`; enter it around the call.

    Args:
        model: a stand-in, whose state is looked at before and after.
        args, kwargs: the call's arguments.

    Attributes:
        graph: the nodes so far.
        guards: what was read from tensors.
        limits: what forward did that the graph does not repeat, in order.
        op: how many operations have passed, as profiles count them.
        looked: names of parameters and buffers whose shapes or types were read.
    """

    def __init__(self, model: nn.Module, args: Any, kwargs: Any) -> None:
        super().__init__()
        self.graph, self.limits = fx.Graph(), dict[str, None]()
        self.guards: list[Guard] = []
        self._model, self._call = model, (args, kwargs)
        self._names = {id(m): name for name, m in model.named_modules()}
        self._path: list[str] = []
        self._handles: list[Any] = []
        self._nodes: dict[int, tuple[weakref.ref[torch.Tensor], fx.Node, bool, int]] = {}
        self.state = State(model)
        self.picture = self.state.picture()
        self.constants = Constants(model, self.state)
        self._begun: list[tuple[Any, torch.Tensor, int]] = []  # what exists before, with its version
        self._inputs, tensors = take_apart(self._call)
        self._looks, self._twins = [look(t) for t in tensors], twins(tensors)
        for i, tensor in enumerate(tensors):
            self._bind(tensor, self.graph.placeholder(f"input_{i}"))
            self._begun.append((i, tensor, version_of(tensor)))
        self._settings = Settings()
        self._functions = Functions(self)
        # Only shapes matter here: what autograd would save is let go, so that this takes the memory of inference.
        self._saving = saved_tensors_hooks(lambda t: None, self._unpack)
        self.op = 0
        self.looked: dict[str, None] = {}

    @property
    def draws(self) -> bool:
        """Whether a call drew from a generator."""
        return self._settings.draws

    @staticmethod
    def _unpack(_: Any) -> torch.Tensor:
        raise CaptureError(
            "the model differentiates inside its own forward (torch.autograd.grad or backward), which a captured graph "
            "cannot hold. Move the inner gradient out of forward, or capture a part of it."
        )

    def __enter__(self) -> Recorder:
        self._handles = [
            hooks.register_module_forward_pre_hook(self._enter_module),
            hooks.register_module_forward_hook(self._leave_module, always_call=True),
        ]
        self._saving.__enter__()  # type: ignore[no-untyped-call]
        self._hooks_below = _top_hooks(True)
        self._functions.__enter__()
        self._settings.__enter__()
        super().__enter__()  # type: ignore[no-untyped-call]
        self._collecting = gc.isenabled()
        gc.disable()  # what a collection runs is not what forward runs
        self._profile = sys.getprofile()
        sys.setprofile(self._frame)
        return self

    def __exit__(self, *error: Any) -> None:
        sys.setprofile(self._profile)
        if self._collecting:
            gc.enable()
        super().__exit__(*error)  # type: ignore[no-untyped-call]
        self._settings.__exit__()
        self._functions.__exit__()
        self._saving.__exit__(*error)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def _frame(self, frame: Any, event: str, _: Any) -> None:
        if event == "call":
            self.state.frame(frame)

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._path.append(self._names.get(id(module), type(module).__name__))

    def _leave_module(self, module: nn.Module, _: Any, __: Any) -> None:
        if self._path:
            self._path.pop()

    # -- one call ---------------------------------------------------------------------------------------------------

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._functions.inside:  # of an autograd.Function, which is one node
            result = func(*args, **kwargs)
            self.op += _counts(call_name(func), result)
            return result
        return self.call(call_name(func), func, args, kwargs)

    def call(
        self,
        name: str,
        func: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        run: Callable[..., Any] | None = None,
    ) -> Any:
        """Make a call, and a node for it; `run` where that is how to make it this time, with calls of its own."""
        with torch._C.DisableTorchFunction():
            self._look_around()
            if _top_hooks(True) != self._hooks_below:
                self.limits["saved-tensor hooks of its own (its own checkpoint, or offloading)"] = None
            given = [*tensors_in(args), *tensors_in(kwargs)]
            node_args, node_kwargs = self._refer(args), self._refer(kwargs)
            if any(map(keyword.iskeyword, kwargs)):
                self.limits["an argument whose name is a keyword of Python"] = None
        first = self.op
        result = (run or func)(*args, **kwargs)
        with torch._C.DisableTorchFunction():
            self._settings.called()
            if _counts(name, result):
                self.op += run is None
                node = self._node(name, func, node_args, node_kwargs)
                node.meta.update(name=name, op=first, ops=self.op - first)
                self._bind_result(result, node)
                for tensor in given:  # an in-place write changes what autograd knows of them
                    self._refresh(tensor)
            else:
                self._read(name, func, node_args, node_kwargs, result, given)
        return result

    def _node(self, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> fx.Node:
        kind = name.rpartition(".")[2]
        if kind in ("__get__", "__set__"):  # a property
            attribute = name.rsplit(".", 2)[1]
            if kind == "__get__":
                node = self.graph.call_function(getattr, (args[0], attribute))
            else:
                node = self.graph.call_function(setattr, (args[0], attribute, args[1]))
        elif _nameable(func):
            node = self.graph.call_function(func, args, kwargs)
        else:
            constant = self.graph.get_attr(self.constants.add(func))
            node = self.graph.call_function(called, (constant, *args), kwargs)
        return self._placed(node)

    def _placed(self, node: fx.Node) -> fx.Node:
        node.meta["module"] = self._path[-1] if self._path else ""
        node.meta["place"] = calling_line()
        return node

    def _read(self, name: str, func: Any, args: Any, kwargs: Any, result: Any, given: list[torch.Tensor]) -> None:
        """A call that gives no tensor: a guard if it reads a value, otherwise a node like any other."""
        is_property = name.endswith(".__get__")
        base = name.rsplit(".", 2)[1] if is_property else name.rpartition(".")[2]
        if base in INCIDENTAL:
            return
        shape = base in SHAPES
        if not comparable(result):
            if not is_property:
                self._node(name, func, args, kwargs)
            return
        if shape and all(self._known_before(t) for t in given):
            nodes = (self._nodes[id(t)][1] for t in given)  # inputs are looked at in any case
            self.looked.update(dict.fromkeys(str(node.target) for node in nodes if node.op == "get_attr"))
            return
        module, place = self._path[-1] if self._path else "", calling_line()
        shown = name.removesuffix(".__get__")
        guard = Guard(shown, operator.attrgetter(base) if is_property else func, result, module, place, shape)
        self.guards.append(guard)
        constant = self.graph.get_attr(self.constants.add(guard, "guard"))
        node = self._placed(self.graph.call_function(check, (constant, *args), kwargs))
        node.meta["guard"] = guard

    def _look_around(self) -> None:
        """Between two calls: what was set there."""
        if (cast := self._settings.autocast()) is not None:
            constant = self.graph.get_attr(self.constants.add(cast[0]))
            self.graph.call_function(set_autocast, (constant, *cast[1:]))
        self.limits.update(dict.fromkeys(self._settings.limits()))

    # -- tensors and nodes ------------------------------------------------------------------------------------------

    def _known_before(self, tensor: torch.Tensor) -> bool:
        found = self._nodes.get(id(tensor))
        return found is not None and found[1].op != "call_function"

    def _bind(self, tensor: torch.Tensor, node: fx.Node) -> None:
        self._nodes[id(tensor)] = (weakref.ref(tensor), node, tensor.requires_grad, version_of(tensor))

    def _refresh(self, tensor: torch.Tensor) -> None:
        found = self._nodes.get(id(tensor))
        if found is not None and found[0]() is tensor:
            self._bind(tensor, found[1])

    def _bind_result(self, result: Any, node: fx.Node) -> None:
        if isinstance(result, torch.Tensor):
            self._bind(result, node)
        elif isinstance(result, (tuple, list, dict)):
            items = result.items() if isinstance(result, dict) else enumerate(result)
            for key, item in items:
                if next(tensors_in(item), None) is not None:
                    got = self.graph.call_function(operator.getitem, (node, key))
                    got.meta.update(module=node.meta["module"], place=node.meta["place"])
                    self._bind_result(item, got)

    def _refer(self, value: Any) -> Any:
        """Arguments with nodes in place of tensors, and `get_attr` nodes in place of what has no literal."""
        if isinstance(value, torch.Tensor):
            return self._node_of(value)
        if isinstance(value, torch.Size):
            return tuple(value)
        if isinstance(value, (tuple, list)):
            items = [self._refer(v) for v in value]
            if type(value) in (tuple, list):
                return type(value)(items)
            return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
        if isinstance(value, dict):
            return {k: self._refer(v) for k, v in value.items()}
        if isinstance(value, slice):
            return slice(self._refer(value.start), self._refer(value.stop), self._refer(value.step))
        if isinstance(value, _LITERAL) or value is Ellipsis:
            return value
        if isinstance(value, torch.Generator):
            self.limits["a random generator of its own"] = None
        if callable(value) and not isinstance(value, type):
            self.limits[f"a Python function given to a call ({getattr(value, '__name__', type(value).__name__)})"] = (
                None
            )
        return self.graph.get_attr(self.constants.add(value))

    def _node_of(self, tensor: torch.Tensor) -> fx.Node:
        found = self._nodes.get(id(tensor))
        if found is not None and found[0]() is tensor:
            _, node, graded, version = found
            if graded != tensor.requires_grad and version == version_of(tensor) and node.op == "call_function":
                raise self._unseen(tensor)
            return node
        name = self.constants.tensor(tensor)
        if name is None:
            raise self._unseen(tensor)
        node = self.graph.get_attr(name)
        self._bind(tensor, node)
        self._begun.append((name, tensor, version_of(tensor)))
        return node

    def _unseen(self, tensor: torch.Tensor) -> CaptureError:
        return CaptureError(
            f"a tensor of shape {tuple(tensor.shape)} used at {calling_line()} in module "
            f"'{self._path[-1] if self._path else ''}' was made by a call that cannot be seen (an extension in C++, "
            "NumPy, a custom Function whose `apply` was kept under another name); a graph would keep this value. "
            "Make it before forward, or by a torch function."
        )

    # -- the end ----------------------------------------------------------------------------------------------------

    def written(self) -> tuple[list[str], list[int]]:
        """Names of buffers and numbers of inputs that forward wrote into, or may have."""
        changed = [key for key, t, version in self._begun if version_of(t) != version]
        small = [name for name, t in self.constants.buffers.items() if t.nbytes <= 1 << 20]
        used = {key for key, _, _ in self._begun}
        names = {k for k in changed if isinstance(k, str)} | {n for n in small if n in used}
        return sorted(names), [k for k in changed if isinstance(k, int)]

    def finish(self, output: Any) -> CallCode:
        """Complete the graph, once forward has returned `output`; how it is called."""
        with torch._C.DisableTorchFunction():
            self._look_around()
            self.state.closures()
            changed = self.state.difference()
            template, tensors = take_apart(output)
            self.graph.output(tuple(self._node_of(t) for t in tensors))
        if changed is not None:
            self.limits[f"a change of Python state ({changed})"] = None
        if self.constants.elsewhere:
            self.limits["a tensor kept where it cannot be found again (a global, an object of a library)"] = None
        if not same_template(self._inputs, take_apart(self._call)[0]):
            self.limits["a change of the call's own arguments"] = None
        code = CallCode(self._inputs, self._looks, template, None)
        code.twins = self._twins
        return code


_LITERAL = (
    str, int, float, complex, bool, bytes, type(None), range, torch.dtype, torch.device, torch.memory_format,
    torch.layout, torch._ops.OpOverload,
)  # fmt: skip


def _counts(name: str, result: Any) -> bool:
    """Whether a call is an operation, as profiles count them."""
    return is_operation(result) and not (result is None and name.endswith(".__get__"))


def _nameable(func: Any) -> bool:
    if isinstance(func, Apply):
        return False
    try:
        name = fx.node._get_qualified_name(func)
        found: Any = torch
        for part in name.split(".")[1:] if name.startswith("torch.") else ():
            found = getattr(found, part)
    except Exception:  # a callable without a name of its own
        return False
    # Generated code says the names of torch's functions; others it is given as they are.
    return found is func or not name.startswith("torch.")


def called(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Calls what has no name in generated code."""
    return function(*args, **kwargs)
