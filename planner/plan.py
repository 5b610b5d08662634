"""The plan: what was decided for a model, what it costs, and the model that follows it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from .deciding import Planned, captured_again
from .decision import Breakdown, Decision, Segment
from .errors import CkptPlannerError, PlanMismatchError
from .frontier import POINTS, Frontier, FrontierPoint, decision_at
from .mechanism import Graph, Mechanism, Slice
from .planfile import read_plan, write_plan
from .planned import planned_module
from .profile import Profile
from .profiling.signature import input_signature, model_structure
from .runtime import Runtime
from .solve import SolveStatus
from .trial import Measurement, compare, measured

if TYPE_CHECKING:
    from .rewrite.graphcode import CapturedModule


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
        self._captured: Mechanism | None = None  # with its graph, once other budgets were asked for

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
        return self.decision.step_seconds

    @property
    def overhead(self) -> float:
        """What the plan costs, as a share of the plain step's time."""
        return self.decision.overhead

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
        """How it is carried out: "slice", "graph" or "torch"."""
        return self.decision.mechanism

    @property
    def mechanism_reason(self) -> str:
        """What that is, and why it was taken; a sentence."""
        return self.decision.mechanism_reason

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
        return self.decision.notes

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

    # -- other budgets ----------------------------------------------------------------------------------------------

    def frontier(self, points: int = POINTS) -> Frontier:
        """What every budget costs: plans from the smallest peak to the plain step's, with the knee marked.

        Args:
            points: how many budgets are decided; where two have the same plan, fewer points come back.

        The points are of the plan's mechanism. For "torch" the call is captured anew, which takes the plan's model.

        Raises:
            ValueError: fewer than 2 points.
            CkptPlannerError: the mechanism is "torch", and the plan has no model or no example arguments.
            CaptureError, GuardError, UnsupportedModelError: the model takes another path than when it was planned.

        Example:
            >>> curve = plan.frontier()  # doctest: +SKIP
            >>> model = plan.at(curve.points[curve.knee]).model  # doctest: +SKIP
        """
        return self._how().frontier(self.profile, points)

    def at(self, point: FrontierPoint) -> Plan:
        """The plan of one point of `frontier()`, for the same model, call, loss and optimizer as this one.

        Its peak is predicted: no step has been taken under it yet. `measure()` takes one.

        Raises:
            CkptPlannerError: the point is of another mechanism.
        """
        if point.mechanism != self.mechanism:
            raise CkptPlannerError(
                f'the point is of mechanism "{point.mechanism}", and this plan of "{self.mechanism}": take a point of '
                "this plan's own frontier()"
            )
        runtime = self._runtime.under(point.budget_bytes)
        decision = decision_at(self.profile, point)
        # Without the graph that the frontier was decided on, one is captured at the first step.
        runtime.first = Planned(decision, self._captured.rewritten(decision) if self._captured is not None else None)
        if self._original is not None:
            runtime.adopt(self._original)
        return Plan(runtime, self._original, self._call)

    # -- checking it on the device ----------------------------------------------------------------------------------

    def _example(self) -> tuple[nn.Module, Any, Any]:
        if self._original is None:
            raise CkptPlannerError("this plan was loaded from a file: apply it to a model first, plan.apply(model)")
        if self._call is None:
            raise CkptPlannerError("optimize was given no example_args or example_kwargs, so there is no step to run")
        return self._original, *self._call

    def measure(self) -> Measurement:
        """Take real steps under the plan, and plain ones where they fit; the model is left as it was.

        The peaks are those of one step each, the times medians over steps that were run in turn.
        """
        r = self._runtime
        return measured(self._example(), r.loss_fn, r.optimizer, self._planned().way, self.decision)

    def verify(self) -> None:
        """Compare a planned step with a plain one from the same state: loss, gradients, buffers, random generators.

        On a CPU every value has to be equal bit for bit; on a GPU, whose kernels may add in any order, to within what
        two plain steps differ by.

        Raises:
            VerificationError: names the first tensor that differs.
        """
        compare(self._example(), self._runtime.loss_fn, self._planned().way)

    def _how(self) -> Mechanism:
        """The plan's mechanism, ready to decide for other budgets."""
        if self.mechanism != "torch":
            return Graph() if self.mechanism == "graph" else Slice()
        if self._captured is None:
            self._captured = captured_again(self._planned(), *self._example())
        return self._captured

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
    def load(
        cls,
        path: str | Path,
        *,
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        process_group: Any = None,
    ) -> Plan:
        """Read a plan that `save` wrote. `apply` gives the module to train.

        Args:
            path: the file.
            loss_fn, optimizer, process_group: as `optimize` took them; calls of another kind than the plan's are
                planned with them. Without an optimizer, one of torch.optim of the name that the plan was made with.

        Raises:
            PlanMismatchError: the file is no plan, or one of another version of the format.
            CkptPlannerError: the plan counts an optimizer that is no class of torch.optim, and none is given.
        """
        decision = read_plan(path)
        name = decision.profile.optimizer
        if optimizer is None and name:
            optimizer = getattr(torch.optim, name, None)
            if optimizer is None:
                raise CkptPlannerError(
                    f"{path} was planned with the optimizer {name}, which is not in torch.optim: give Plan.load the "
                    "optimizer, or other kinds of calls would be planned without it"
                )
        runtime = Runtime(
            decision.budget_bytes,
            decision.strategy,
            loss_fn,
            optimizer,
            process_group=process_group,
            mechanism=decision.mechanism,
            gradient_buckets=True if decision.profile.bucket_bytes else None,
        )
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
        self._original, self._captured = model, None
        self._call = (args, kwargs) if args or kwargs else self._call
        self._runtime.adopt(model)
        self._model = planned_module(model, self._runtime)
        return self._model
