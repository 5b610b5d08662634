"""Watches the training of a planned model: peak, times, and how well both were predicted, step by step."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import TYPE_CHECKING, Any

import msgspec
from torch.optim import Optimizer

from .budget import format_bytes
from .errors import CkptPlannerError
from .plan import Plan
from .profiling.forward import device_of
from .profiling.watch import Watch, make_watch
from .sinks import Sink, open_sinks

if TYPE_CHECKING:
    from typing_extensions import Self

log = logging.getLogger("ckpt_planner")

EVERY_ON_CPU = 100  # steps between two whose peak is measured, where the profiler has to be asked


class StepRecord(msgspec.Struct, frozen=True, kw_only=True):
    """One training step. What was not measured, or has no meaning in this step, is None.

    Attributes:
        step: its number.
        calls: planned calls in it; more than one where gradients are accumulated within the step.
        signature: the kind of call, of the one whose predicted peak is the largest.
        planning: the planner measured and decided within the step; the other figures are then not the step's own.
        step_seconds: of the whole `with monitor.step()`; on a CPU None where the peak was measured, which costs time.
        recompute_seconds, predicted_recompute_seconds: the part of it in which dropped values were computed again.
        overhead: `recompute_seconds` as a share of the rest of the step.
        predicted_overhead: the plan's; a share of the plain step's forward and backward alone.
        peak_bytes: the most bytes live at any moment of the step.
        reserved_bytes: the most that the caching allocator held; None on a CPU.
        predicted_peak_bytes, budget_bytes: the plan's, for that kind of call.
        error: the predicted peak over the measured one, less one.
    """

    step: int
    calls: int
    signature: str | None = None
    planning: bool = False
    step_seconds: float | None = None
    recompute_seconds: float | None = None
    predicted_recompute_seconds: float | None = None
    overhead: float | None = None
    predicted_overhead: float | None = None
    peak_bytes: int | None = None
    reserved_bytes: int | None = None
    predicted_peak_bytes: int | None = None
    budget_bytes: int | None = None
    error: float | None = None


class Monitor:
    """Logs each training step of a planned model, and warns once when one takes more than the budget.

    Args:
        plan: whose `plan.model` is trained. It need not have planned yet.
        to: where records go: the path of a `.csv` file, which is appended to; "tensorboard:FOLDER" (extra
            `tensorboard`); a `SummaryWriter` of your own; a function of a `StepRecord`; or a list of these.
        every: measure the peak in each step of that many; the default is every step on a GPU, and one in 100 on a CPU,
            where a measured step runs under torch's profiler and takes longer.
        start: the number of the first step, for a training that goes on.

    Attributes:
        last: the latest record; None before there is one.

    Raises:
        CkptPlannerError: `to` is none of these, the file is another's, `tensorboard` is not installed, or the plan was
            loaded and not applied to a model.

    Example:
        >>> with Monitor(plan, to="run.csv") as monitor:  # doctest: +SKIP
        ...     for batch in loader:
        ...         with monitor.step():
        ...             optimizer.zero_grad()
        ...             plan.model(**batch).loss.backward()
        ...             optimizer.step()
    """

    def __init__(self, plan: Plan, to: Any = None, *, every: int | None = None, start: int = 0) -> None:
        if every is not None and every < 1:
            raise CkptPlannerError(f"every={every} is no number of steps: give 1 or more")
        self._model, self._runtime = plan.model, plan._runtime
        cpu = device_of(self._model).type == "cpu"
        self._every = every or (EVERY_ON_CPU if cpu else 1)
        self._since = self._every  # steps since the peak was measured
        self._number = start
        self._optimizers: weakref.WeakSet[Optimizer] = weakref.WeakSet()
        if isinstance(self._runtime.optimizer, Optimizer):
            self._optimizers.add(self._runtime.optimizer)
        self._pending: deque[tuple[int, Watch]] = deque()
        self._inside = self._warned = self._closed = False
        self.last: StepRecord | None = None
        self._sinks: list[Sink] = open_sinks(to, StepRecord.__struct_fields__, start)

    @contextmanager
    def step(self) -> Iterator[None]:
        """A context around one training step, from `zero_grad` to `optimizer.step`.

        A step that raises is not logged, and its number goes to the next one.

        Raises:
            CkptPlannerError: the monitor is closed, or is within a step already.
        """
        if self._closed:
            raise CkptPlannerError("this monitor is closed: make another with Monitor(plan, ...)")
        if self._inside:
            raise CkptPlannerError("monitor.step() within monitor.step(): end a step before the next one begins")
        due = self._since >= self._every
        watch = make_watch(self._model, self._optimizers, due)
        self._inside = True
        try:
            with watch:
                self._runtime.watches.append(watch)
                try:
                    yield
                finally:
                    self._runtime.watches.remove(watch)
        finally:
            self._inside = False
        self._since = 1 if watch.peak_bytes is not None else self._since + 1
        self._pending.append((self._number, watch))
        self._number += 1
        self._warn(watch)
        self._log(wait=False)

    def close(self) -> None:
        """Log what is still to be logged, and close what was opened. Further calls do nothing."""
        if self._closed:
            return
        self._closed = True
        try:
            self._log(wait=True)
        finally:
            for sink in self._sinks:
                sink.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _log(self, wait: bool) -> None:
        """Log the steps that are over on the device, too; on a GPU that may be a step or two later."""
        while self._pending and (wait or self._pending[0][1].ready):
            number, watch = self._pending.popleft()
            self.last = record(number, watch)
            for sink in self._sinks:
                sink.write(self.last)

    def _warn(self, watch: Watch) -> None:
        if self._warned or watch.peak_bytes is None or not watch.decisions:
            return
        most = max(watch.decisions, key=lambda d: d.timeline.peak_bytes)
        excess = watch.peak_bytes - most.budget_bytes
        if excess <= 0:
            return
        self._warned = True
        why = ""
        if len(watch.decisions) > 1:
            why = "; gradients of its earlier calls were there already, which a plan for one call does not count"
        elif self._optimizers and not most.profile.optimizer:
            why = "; the plan does not count the optimizer: give it to optimize(..., optimizer=...)"
        log.warning(
            "step %d of %s took %s (%d bytes), %s above the budget of %s; predicted were %s%s. "
            "Further steps above the budget are not reported.",
            self._number - 1,
            most.profile.model,
            format_bytes(watch.peak_bytes),
            watch.peak_bytes,
            format_bytes(excess),
            format_bytes(most.budget_bytes),
            format_bytes(most.timeline.peak_bytes),
            why,
        )


def record(number: int, watch: Watch) -> StepRecord:
    """What a watch saw, beside what was predicted. Waits for the device if it has to."""
    found: dict[str, Any] = {"peak_bytes": watch.peak_bytes, "reserved_bytes": watch.reserved_bytes}
    times = watch.times()
    if times is not None:
        step, again = times
        found["step_seconds"] = step
        if all(d.mechanism != "torch" for d in watch.decisions):  # torch tells nobody of its recomputation
            found["recompute_seconds"] = again
            found["overhead"] = again / (step - again) if step > again else None
    if watch.decisions:
        most = max(watch.decisions, key=lambda d: d.timeline.peak_bytes)
        predicted = most.timeline.peak_bytes
        found["signature"] = most.profile.input_signature
        found["predicted_peak_bytes"], found["budget_bytes"] = predicted, most.budget_bytes
        found["predicted_recompute_seconds"] = sum(d.solution.recompute_seconds for d in watch.decisions)
        found["predicted_overhead"] = most.overhead
        if watch.peak_bytes:
            found["error"] = predicted / watch.peak_bytes - 1
    return StepRecord(step=number, calls=len(watch.decisions), planning=watch.interrupted, **found)
