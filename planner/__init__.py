"""Plans activation checkpointing for PyTorch under a memory limit in bytes, and keeps it.

Deciding (profile → problem → solution) needs no torch; it is imported when `optimize` or `Plan` is first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .errors import (
    BudgetError,
    CaptureError,
    CkptPlannerError,
    GuardError,
    InfeasibleBudgetError,
    PlanMismatchError,
    UnsupportedModelError,
    VerificationError,
)
from .profile import Profile

if TYPE_CHECKING:
    from .monitor import Monitor, StepRecord
    from .optimize import optimize
    from .plan import Plan
    from .rewrite.capture import capture
    from .trial import Measurement

_LAZY = {
    "optimize": "optimize",
    "Plan": "plan",
    "Measurement": "trial",
    "Monitor": "monitor",
    "StepRecord": "monitor",
    "capture": "rewrite.capture",
}

__version__ = "0.1.0"


def __getattr__(name: str) -> Any:
    module = _LAZY.get(name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from importlib import import_module

    value = getattr(import_module(f".{module}", __name__), name)
    globals()[name] = value
    return value


__all__ = [
    "BudgetError",
    "CaptureError",
    "CkptPlannerError",
    "GuardError",
    "InfeasibleBudgetError",
    "Measurement",
    "Monitor",
    "Plan",
    "PlanMismatchError",
    "Profile",
    "StepRecord",
    "UnsupportedModelError",
    "VerificationError",
    "capture",
    "optimize",
]
