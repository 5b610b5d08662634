"""Every error that ckpt-planner raises on purpose, under one base class.

Each carries the exit code that the command line ends with: 1 where the answer is "no" (the budget cannot be kept, a
check failed), 2 where the input was at fault. A message says what was wrong, where, and what to do about it.
"""

from __future__ import annotations


class CkptPlannerError(Exception):
    """Base class of every error of this project."""

    exit_code = 2


class BudgetError(CkptPlannerError, ValueError):
    """A budget that is not a size, a share or a number of bytes."""


class InfeasibleBudgetError(CkptPlannerError):
    """No plan keeps the budget.

    Attributes:
        budget_bytes: the budget that was asked for, in bytes of peak.
        minimum_bytes: the smallest budget that this planner can keep, in bytes of peak.
    """

    exit_code = 1

    def __init__(self, message: str, *, budget_bytes: int, minimum_bytes: int) -> None:
        super().__init__(message)
        self.budget_bytes = budget_bytes
        self.minimum_bytes = minimum_bytes

    def __reduce__(self) -> tuple[object, ...]:
        return (_rebuild_infeasible, (str(self), self.budget_bytes, self.minimum_bytes))


def _rebuild_infeasible(message: str, budget_bytes: int, minimum_bytes: int) -> InfeasibleBudgetError:
    return InfeasibleBudgetError(message, budget_bytes=budget_bytes, minimum_bytes=minimum_bytes)


class CaptureError(CkptPlannerError):
    """The model could not be run once to see what it does: its forward failed, or nothing needs a gradient."""


class GuardError(CkptPlannerError):
    """A captured graph does not hold for this call: the model would take another path.

    Attributes:
        guard: the guard that failed; None where the call or the model's Python state differs. It has the `place`
            (file and line), the `module` and the `expected` value.
    """

    def __init__(self, message: str, *, guard: object = None) -> None:
        super().__init__(message)
        self.guard = guard


class UnsupportedModelError(CkptPlannerError):
    """The model does something that cannot be planned faithfully; the message names the place."""


class PlanMismatchError(CkptPlannerError):
    """A plan was applied to a model or to inputs that it was not made for, or a plan file is not one."""


class VerificationError(CkptPlannerError):
    """A planned step differs from the plain one; the message names the first tensor that does."""

    exit_code = 1
