"""Measures the backward pass in place: which node runs when, how long, and what its gradients take.

The pass runs under a plan that keeps little (so that it fits where the plain step does not) and with everything that
was saved or replayed held on to until it can be let go between two measurements. What is left between the marks is what
backward itself allocates and frees, which no plan changes.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from ckpt_planner.profile import Step
from ckpt_planner.replay.directions import Directions
from ckpt_planner.replay.follow import Follower
from ckpt_planner.replay.group import Group
from ckpt_planner.replay.handles import Handle, Kept

from .meter import Meter
from .running import differentiate


class _Numbered:
    """A saved tensor, or what stands in for it, with its number."""

    __slots__ = ("__weakref__", "number", "packed")

    def __init__(self, number: int, packed: Any) -> None:
        self.number, self.packed = number, packed


class _Holding(Group):
    """A group that lets nothing go by itself."""

    __slots__ = ("handed", "last_read", "read")

    def __init__(self, observer: Callable[[Group, bool], None]) -> None:
        super().__init__(observer)
        self.handed = self.read = 0
        self.last_read = -1

    def fetch(self, handle: Handle) -> torch.Tensor:
        if handle.key not in self.ready:
            self.expected.setdefault(handle.key, 1)
            self.replay()
        base: torch.Tensor = self.ready[handle.key][0]
        return handle.look(base)


class Measurer(Follower):
    """Follows the forward, then measures the backward. Enter `saving` around forward and loss.

    Attributes:
        read_at: for each saved tensor in the order of saving, the last backward step that read it.
        gone: saved tensors whose node was let go before backward, because nothing that is differentiated needs it, and
            how many operations had passed by then.

    Args:
        directions: the plan under which the step runs.
        meter: entered already.
        averaged: see `averaged_parameters`. Their gradients stay, since a wrapper makes anew what it does not find.
    """

    def __init__(self, directions: Directions, meter: Meter, averaged: Mapping[int, bool] | None = None) -> None:
        super().__init__(directions, trusting=True)
        self._meter, self._averaged = meter, averaged or {}
        self._holding: list[_Holding] = []
        self._held: list[Any] = []
        self._number = 0
        self._standing: dict[int, weakref.ref[_Numbered]] = {}
        self._nodes: list[tuple[str, int, int]] = []
        self._brackets: list[tuple[int, int, int]] = []
        self._opened = 0
        self._gradients: list[tuple[int, int, bool]] = []  # step, bytes, whether it was taken away
        self._seen: set[int] = set()
        self.read_at: dict[int, int] = {}
        self.gone: dict[int, int] = {}
        self.saving = saved_tensors_hooks(self._pack_outside, self._unpack_outside)

    def __enter__(self) -> Measurer:
        self.hooks_below = torch._C._autograd._top_saved_tensors_default_hooks(True)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    @property
    def saved_count(self) -> int:
        """How many tensors were saved."""
        return self._number

    # -- forward ----------------------------------------------------------------------------------------------------

    def group(self, number: int) -> Group:
        """A group that lets nothing go by itself."""
        group = self.groups[number]
        if group is None:
            holding = _Holding(self._bracket)
            self._holding.append(holding)
            group = self.groups[number] = holding
        return group

    def _keep(self, packed: Any) -> _Numbered:
        kept = _Numbered(self._number, packed)
        number = self._number
        self._standing[number] = weakref.ref(kept, lambda _: self.gone.setdefault(number, self.position))
        self._number += 1
        if isinstance(packed, Handle):
            packed.group.handed += 1  # type: ignore[attr-defined]
        else:
            self._held.append(packed)
        return kept

    def pack(self, tensor: torch.Tensor) -> Any:
        """What autograd is to hold, with its number."""
        return self._keep(super().pack(tensor))

    def _pack_outside(self, tensor: torch.Tensor) -> _Numbered:
        with torch._C.DisableTorchFunction():  # or what is done here would pass by as the model's
            return self._keep(Kept(tensor))

    def unpack(self, packed: Any) -> torch.Tensor:  # type: ignore[override]
        """The tensor that autograd saved, noting when it is read."""
        return self._unpack_outside(packed)

    def _unpack_outside(self, numbered: _Numbered) -> torch.Tensor:
        step = len(self._nodes) - 1
        self.read_at[numbered.number] = max(step, self.read_at.get(numbered.number, -1))
        packed = numbered.packed
        tensor = Follower.unpack(packed)
        if isinstance(packed, Handle) and packed.kept is None:
            packed.group.read += 1  # type: ignore[attr-defined]
            packed.group.last_read = step  # type: ignore[attr-defined]
        return tensor

    # -- backward ---------------------------------------------------------------------------------------------------

    def backward(self, loss: torch.Tensor, model: nn.Module, inputs: list[torch.Tensor]) -> None:
        """Differentiate `loss` by `model`'s parameters and its inputs, and measure each node.

        Raises:
            CaptureError: backward fails.
        """
        handles = [self._watch(node) for node in _nodes_of(loss)]
        for parameter in (*model.parameters(), *inputs):
            if parameter.requires_grad:
                handles.append(parameter.register_post_accumulate_grad_hook(self._take_gradient))
        self._standing.clear()
        self._start = self._meter.mark()
        differentiate(loss, model)
        self._end = self._meter.mark()
        self._held.clear()
        for group in self._holding:
            group.ready.clear()
        for handle in handles:
            handle.remove()

    def _watch(self, node: Any) -> Any:
        name = node.name().rsplit("::", 1)[-1]
        sequence = node._sequence_nr() if hasattr(node, "_sequence_nr") else -1

        def before(_: Any) -> None:
            self._nodes.append((name, sequence, self._meter.mark()))

        return node.register_prehook(before)

    def _take_gradient(self, parameter: torch.Tensor) -> None:
        gradient = parameter.grad
        stays, within_bucket = id(parameter) in self._averaged, self._averaged.get(id(parameter), False)
        if not stays:
            parameter.grad = None
        if gradient is not None and id(parameter) not in self._seen and not within_bucket:
            self._seen.add(id(parameter))
            size = (
                gradient.untyped_storage().nbytes()
                if gradient.layout is torch.strided
                else gradient.numel() * gradient.itemsize
            )
            self._gradients.append((len(self._nodes) - 1, size, not stays))

    def _bracket(self, group: Group, begins: bool) -> None:
        if begins:
            self._opened = self._meter.mark()
            step = len(self._nodes) - 1
            for other in self._holding:
                if other is not group and other.read == other.handed and other.last_read < step:
                    other.ready.clear()
            return
        self._brackets.append((len(self._nodes) - 1, self._opened, self._meter.mark()))

    def steps(self) -> tuple[tuple[Step, ...], tuple[int, ...], int, int]:
        """(steps, sequence number of each, bytes live at the end, bytes of parameter gradients). After the meter."""
        meter, base = self._meter, self._meter.live(self._start)
        inside: dict[int, list[tuple[int, int]]] = {}
        for step, first, last in self._brackets:
            inside.setdefault(step, []).append((first, last))
        arriving: dict[int, int] = {}
        taken: dict[int, int] = {}
        for step, size, away in self._gradients:
            arriving[step] = arriving.get(step, 0) + size
            taken[step] = taken.get(step, 0) + size * away
        excluded = gradients = 0
        found = []
        for k, (name, _, mark) in enumerate(self._nodes):
            end = self._nodes[k + 1][2] if k + 1 < len(self._nodes) else self._end
            live = meter.live(mark) - base - excluded + gradients
            peak, seconds, at = live, meter.seconds(mark, end), mark
            for first, last in inside.get(k, ()):
                peak = max(peak, meter.peak(at, first) - base - excluded + gradients)
                excluded += meter.live(last) - meter.live(first)
                seconds -= meter.seconds(first, last)
                at = last
            peak = max(peak, meter.peak(at, end) - base - excluded + gradients)
            gradients += taken.get(k, 0)
            found.append(Step(name, -1, max(0.0, seconds), max(0, live), max(0, peak), arriving.get(k, 0)))
        left = meter.live(self._end) - base - excluded + gradients
        return tuple(found), tuple(n[1] for n in self._nodes), max(0, left), sum(arriving.values())


def _nodes_of(loss: torch.Tensor) -> list[Any]:
    """Every node of the graph that leads to `loss`."""
    seen: dict[Any, None] = {}
    stack = [loss.grad_fn]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        seen[node] = None
        stack.extend(function for function, _ in node.next_functions)
    return list(seen)
