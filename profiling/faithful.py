"""Finds out, by trying, whether running an operation again gives the same bits.

Each distinct operation (function, shapes, types, options) is run a second time, as a replay would run it, right after
it ran in forward, and the results are compared bit for bit. Nothing is looked up in a list of functions, except those
whose result has no meaning before it is written into.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from ckpt_planner.profile import Replay
from ckpt_planner.replay.ambient import generator_states, set_generator_states
from ckpt_planner.replay.calls import is_plain, mutable, storage_key, tensors_in, transforming
from ckpt_planner.replay.protect import writes_in_place

from .meter import Meter

UNWRITTEN = {"torch.empty", "torch.empty_like", "torch.empty_strided", "Tensor.new_empty", "Tensor.new_empty_strided"}

Verdict = tuple[Replay, str]


class Faithful:
    """Remembers the verdict on each signature."""

    def __init__(self, meter: Meter) -> None:
        self._meter = meter
        self._verdicts: dict[str, Verdict] = {}
        self.marks: dict[str, tuple[int, int]] = {}

    def begin(self, signature: str, name: str, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Before the operation runs: what the trial needs from that moment. None if there will be no trial."""
        if signature in self._verdicts:
            return None
        if any(isinstance(v, torch.Generator) for v in (*args, *kwargs.values())):
            self._verdicts[signature] = ("never", "it draws from a torch.Generator of its own")
            return None
        if "c10d" in name:
            self._verdicts[signature] = ("never", "it is a collective, which other ranks would have to join")
            return None
        if transforming():
            self._verdicts[signature] = (
                "never",
                "it runs within vmap or torch.func",
            )
            return None
        odd = next((t for t in tensors_in((args, kwargs)) if not is_plain(t)), None)
        if odd is not None:
            self._verdicts[signature] = ("never", f"it is given a {type(odd).__name__}")
            return None
        changing = mutable((args, kwargs))
        if changing:
            self._verdicts[signature] = (
                "never",
                f"it is given a {changing}, whose contents may change before backward",
            )
            return None
        if name in UNWRITTEN:
            self._verdicts[signature] = ("plain", "")
            return None
        if writes_in_place(name, kwargs):
            return _copied((args, kwargs))
        return (args, kwargs)

    def end(
        self,
        trial: Any,
        signature: str,
        func: Callable[..., Any],
        args: Any,
        kwargs: Any,
        result: Any,
        states: tuple[torch.Tensor, ...],
        random: bool,
        changed: bool,
    ) -> Verdict:
        """After the operation ran: run it again as a replay would, and compare."""
        verdict = self._verdicts.get(signature)
        if verdict is None:
            verdict = self._verdicts[signature] = self._try(
                trial, signature, func, args, kwargs, result, states, changed
            )
        return verdict

    def _try(
        self, trial: Any, signature: str, func: Any, args: Any, kwargs: Any, result: Any, states: Any, changed: bool
    ) -> Verdict:
        expected = list(tensors_in(result))
        if not all(map(is_plain, expected)):
            return ("never", "it returns a tensor that is not plain")
        given = {storage_key(t) for t in tensors_in((args, kwargs))} - {None}
        if expected and not changed and all(storage_key(t) in given for t in expected):
            return ("plain", "")  # views: nothing is computed
        if trial[0] is args and changed:  # it changes an argument on the way (running statistics): not again
            trial = _copied(trial)
        now = generator_states()
        set_generator_states(states)
        try:
            with torch.no_grad():
                first = self._meter.mark()
                again = func(*trial[0], **trial[1])
                self.marks[signature] = (first, self._meter.mark())
        except Exception as error:  # a replay would fail as well
            return ("never", f"running it again without gradients failed: {error}".splitlines()[0])
        finally:
            set_generator_states(now)
        found = list(tensors_in(again)) if again is not None else list(tensors_in(trial))
        if again is None:
            expected = list(tensors_in((args, kwargs)))
        if _all_same(expected, found):
            return ("plain", "")
        if (
            trial[0] is args
            and torch.is_grad_enabled()
            and self._same_with_gradients(func, args, kwargs, expected, states)
        ):
            return ("grad", "")
        return ("never", "running it again gives other values")

    def _same_with_gradients(
        self, func: Any, args: Any, kwargs: Any, expected: list[torch.Tensor], states: Any
    ) -> bool:
        """Whether the operation gives the same bits where gradients are recorded: some kernels differ in inference."""
        now = generator_states()
        set_generator_states(states)
        try:
            with saved_tensors_hooks(lambda t: None, lambda _: torch.empty(0)):
                return _all_same(expected, list(tensors_in(func(*args, **kwargs))))
        finally:
            set_generator_states(now)


def _all_same(expected: list[torch.Tensor], found: list[torch.Tensor]) -> bool:
    return len(found) == len(expected) and all(map(same_bits, expected, found))


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    """Whether two tensors are equal bit for bit, layout included; NaN equals NaN."""
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided or a.is_meta != b.is_meta:
        return False
    if a.is_meta:  # no bits at all
        return a.stride() == b.stride()
    with torch.no_grad():
        if a.stride() != b.stride():
            return False
        if torch.equal(a, b):
            return True
        return bool(((a == b) | ((a != a) & (b != b))).all())


def _copied(value: Any) -> Any:
    """Arguments with their tensors copied, aliases not kept."""
    if isinstance(value, torch.Tensor):
        with torch.no_grad():
            return value.detach().clone()
    if type(value) in (tuple, list):
        return type(value)(_copied(v) for v in value)
    if type(value) is dict:
        return {k: _copied(v) for k, v in value.items()}
    return value
