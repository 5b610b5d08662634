"""The plan: what was decided for a model, what it costs, and the model that follows it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec
import torch
from torch import nn

from .decision import Breakdown, Decision, Segment
from .errors import CkptPlannerError, PlanMismatchError, VerificationError
from .planfile import read_plan, write_plan
from .planned import planned_module
from .profile import Profile
from .profiling.rehearse import outcome, rehearse
from .profiling.signature import input_signature, model_structure
from .runtime import Planned, Runtime
from .solve import SolveStatus

if TYPE_CHECKING:
    from .rewrite.graphcode import CapturedModule


class Measurement(msgspec.Struct, frozen=True):
    """What a real step took, beside what was predicted.

    Attributes:
        peak_bytes, predicted_peak_bytes: of the planned step, the optimizer's step included if one was given.
        step_seconds: forward and backward of the planned step.
        baseline_peak_bytes, baseline_step_seconds: the plain step's; None where it did not fit.
    """

    peak_bytes: int
    predicted_peak_bytes: int
    step_seconds: float
    baseline_peak_bytes: int | None = None
    baseline_step_seconds: float | None = None


class Plan:
    """What was decided for a model. Made by `optimize` or `Plan.load`.

    Example:
        >>> plan = optimize(model, budget="8GB", example_args=(x,))  # doctest: +SKIP
        >>> plan.model(x).sum().backward()  # doctest: +SKIP
    """

    def __init__(self, runtime: Runtime, model: nn.Module | None = None, call: tuple[Any, Any] | None = None) -> None:
        self._runtime = runtime
        self._original = model
        self._call = call
        self._model = planned_module(model, runtime) if model is not None else None

    # -- what was decided -------------------------------------------------------------------------------------------

    @property
    def model(self) -> nn.Module:
        """The module to train: the user's, except that its training calls keep to the plan."""
        if self._model is None:
            raise CkptPlannerError("this plan was loaded from a file; plan.apply(model) gives the module to train")
        return self._model

    @property
    def planned(self) -> bool:
        """Whether a step has been planned yet; if not, the first training call of `plan.model` does it."""
        return self._runtime.first is not None

    @property
    def decision(self) -> Decision:
        """The decision for the first kind of call that was planned."""
        if self._runtime.first is None:
            raise CkptPlannerError(
                "nothing is planned yet: call plan.model once in training mode, or give optimize example_args"
            )
        return self._runtime.first.decision

    @property
    def profile(self) -> Profile:
        """What was measured."""
        return self.decision.profile

    @property
    def peak_bytes(self) -> int:
        """Predicted peak of a whole training step under the plan, bytes."""
        return self.decision.timeline.peak_bytes

    @property
    def baseline_peak_bytes(self) -> int:
        """Predicted peak of the plain step, bytes."""
        return self.decision.plain.peak_bytes

    @property
    def budget_bytes(self) -> int:
        """The budget, bytes of peak."""
        return self.decision.budget_bytes

    @property
    def baseline_step_seconds(self) -> float:
        """Time of the plain step's forward and backward, as profiled."""
        return self.profile.step_seconds

    @property
    def recompute_seconds(self) -> float:
        """Time of everything that runs again, the cost of replaying included."""
        return self.decision.solution.recompute_seconds

    @property
    def step_seconds(self) -> float:
        """Time of the planned step's forward and backward."""
        return self.baseline_step_seconds + self.recompute_seconds

    @property
    def overhead(self) -> float:
        """What the plan costs, as a share of the plain step's time."""
        plain = self.baseline_step_seconds
        return self.recompute_seconds / plain if plain else 0.0

    @property
    def lower_bound_seconds(self) -> float:
        """No plan within the budget recomputes for less."""
        return self.decision.solution.lower_bound_seconds

    @property
    def gap(self) -> float:
        """The share of the recomputation that may be avoidable: 0 is proven best."""
        return self.decision.solution.gap

    @property
    def status(self) -> SolveStatus:
        """How the search ended; its value is a sentence."""
        return self.decision.solution.status

    @property
    def strategy(self) -> str:
        """How the plan was looked for."""
        return self.decision.strategy

    @property
    def mechanism(self) -> str:
        """How it is carried out: "slice" or "torch"."""
        return self.decision.mechanism

    @property
    def mechanism_reason(self) -> str:
        """What that is, and why it was taken; a sentence."""
        if self._runtime.mechanism != self.mechanism:
            return "Forward is followed: this call cannot be captured as a graph that repeats it."
        if self.mechanism == "torch" and not self.segments:
            return "As asked for; nothing is checkpointed, so the model's own forward runs."
        if self.mechanism == "torch":
            return "As asked for: a captured graph runs, with the segments in torch.utils.checkpoint."
        return "The default: forward is followed, and backward runs only what was dropped again."

    @property
    def segments(self) -> tuple[Segment, ...]:
        """The groups of operations that backward runs again."""
        return self.decision.segments

    @property
    def memory(self) -> Breakdown:
        """Where the bytes of the planned step's peak are."""
        return self.decision.memory

    @property
    def baseline_memory(self) -> Breakdown:
        """Where the bytes of the plain step's peak are."""
        return self.decision.baseline_memory

    @property
    def notes(self) -> tuple[str, ...]:
        """What a user should know of how this was planned."""
        notes = list(self.profile.notes)
        if self.profile.loss.startswith("a stand-in"):
            notes.append(f"Planned with {self.profile.loss}.")
        return tuple(notes)

    @property
    def graph(self) -> CapturedModule:
        """The planned call's forward as a `torch.fx.GraphModule`, its nodes annotated; see `planned_graph`.

        Raises:
            CaptureError: the call takes another path than when it was planned.
        """
        model, args, kwargs = self._example()
        planned = self._planned()
        from .rewrite.annotate import planned_graph

        return planned_graph(planned.decision, model, args, kwargs, planned.states)

    def __str__(self) -> str:
        if not self.planned:
            return (
                f"Nothing is planned yet (budget {self._runtime.budget}, strategy {self._runtime.strategy}); "
                "the first training call of plan.model plans."
            )
        from . import report

        return report.text(report.describe(self))

    # -- checking it on the device ----------------------------------------------------------------------------------

    def _example(self) -> tuple[nn.Module, Any, Any]:
        if self._original is None:
            raise CkptPlannerError("this plan was loaded from a file: apply it to a model first, plan.apply(model)")
        if self._call is None:
            raise CkptPlannerError("optimize was given no example_args or example_kwargs, so there is no step to run")
        return self._original, *self._call

    def measure(self) -> Measurement:
        """Take one real step under the plan, and a plain one where it fits; the model is left as it was."""
        model, args, kwargs = self._example()
        planned, r = self._planned(), self._runtime
        profile = planned.decision.profile
        how = {"optimizer": r.optimizer}
        real = rehearse(model, args, kwargs, r.loss_fn, planned.way, **how)
        seconds = rehearse(model, args, kwargs, r.loss_fn, planned.way, timed_only=True).seconds
        try:
            plain = rehearse(model, args, kwargs, r.loss_fn, None, **how)
            plain_seconds = rehearse(model, args, kwargs, r.loss_fn, None, timed_only=True).seconds
        except (torch.OutOfMemoryError, MemoryError):
            return Measurement(real.peak_bytes, self.peak_bytes, seconds)
        del profile
        return Measurement(real.peak_bytes, self.peak_bytes, seconds, plain.peak_bytes, plain_seconds)

    def verify(self) -> None:
        """Compare a planned step with a plain one from the same state: loss, gradients, buffers, random generators.

        On a CPU every value has to be equal bit for bit; on a GPU, whose kernels may add in any order, to within what
        two plain steps differ by.

        Raises:
            VerificationError: names the first tensor that differs.
        """
        model, args, kwargs = self._example()
        planned, loss_fn = self._planned(), self._runtime.loss_fn
        plain = dict(outcome(model, args, kwargs, loss_fn, None))
        found = dict(outcome(model, args, kwargs, loss_fn, planned.way))
        again: dict[str, torch.Tensor] | None = None
        if plain.keys() != found.keys():
            missing = sorted(plain.keys() ^ found.keys())
            raise VerificationError(f"the planned step and the plain one do not give the same values: {missing[0]}")
        for name, value in plain.items():
            if _equal(value, found[name]):
                continue
            if value.device.type != "cpu":
                again = again or dict(outcome(model, args, kwargs, loss_fn, None))
                tolerance = 2 * (again[name].double() - value.double()).abs().max().item()
                if (found[name].double() - value.double()).abs().max().item() <= tolerance:
                    continue
            difference = (found[name].double() - value.double()).abs().max().item()
            raise VerificationError(f"{name} differs between the planned and the plain step, by up to {difference:.3g}")

    def _planned(self) -> Planned:
        if self._runtime.first is None:
            model, args, kwargs = self._example()
            self._runtime.plan(model, args, kwargs)
        assert self._runtime.first is not None
        return self._runtime.first

    # -- files ------------------------------------------------------------------------------------------------------

    def save(self, path: str | Path) -> None:
        """Write the plan, with the profile that it was decided from, as JSON."""
        write_plan(self.decision, path)

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote. `apply` gives the module to train.

        Raises:
            PlanMismatchError: the file is no plan, or one of another version of the format.
        """
        decision = read_plan(path)
        runtime = Runtime(decision.budget_bytes, decision.strategy, mechanism=decision.mechanism)
        runtime.first = Planned(decision)
        return cls(runtime)

    def apply(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The module to train: `model` under this plan.

        Args:
            model: of the structure that the plan was made for, in the same mode.
            args, kwargs: a call's arguments, to check that the plan was made for such a call. Without them the first
                training call checks, and plans anew for another kind of call.

        Raises:
            PlanMismatchError: says what differs.
        """
        profile = self.profile
        if type(model).__name__ != profile.model:
            raise PlanMismatchError(f"the plan is for a {profile.model}, not for a {type(model).__name__}")
        structure = model_structure(model)
        if structure != profile.structure:
            raise PlanMismatchError(
                f"the plan is for a {profile.model} of another structure (names, shapes or types of parameters and "
                f"buffers, modes, what is frozen, or the device): {profile.structure} in the plan, {structure} here. "
                "Plan again."
            )
        if (args or kwargs) and input_signature(args, kwargs) != profile.input_signature:
            raise PlanMismatchError(
                f"the plan is for a call of {profile.input_signature}, not {input_signature(args, kwargs)}"
            )
        self._original = model
        self._call = (args, kwargs) if args or kwargs else self._call
        self._runtime.adopt(model)
        self._model = planned_module(model, self._runtime)
        return self._model


def _equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and bool(((a == b) | ((a != a) & (b != b))).all())
