"""Running a forward that is recorded, and saying what went wrong in it."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

from ckpt_planner.errors import CaptureError, CkptPlannerError, UnsupportedModelError


def call(
    model: nn.Module, args: Any, kwargs: Any, where: Callable[[BaseException], str] = lambda error: "its forward"
) -> Any:
    """What `model` returns; what it raises, as an error of this project that says where.

    Raises:
        UnsupportedModelError: the forward does what cannot be recorded.
        CaptureError: it fails otherwise.
    """
    try:
        return model(*args, **kwargs)
    except CkptPlannerError:
        raise
    except Exception as error:
        if "saved tensor hooks" in str(error):
            raise UnsupportedModelError(
                "the model uses a transformation of torch.func that differentiates (grad, vjp, jacrev, hessian) in "
                f"{where(error)}; torch runs none while it is noted what is saved for backward. Move it out of "
                "forward, or plan a part of the model."
            ) from error
        if "fail_on_recompile" in str(error):
            raise UnsupportedModelError(
                f"the model calls something compiled (torch.compile; torch.cond and torch.while_loop compile, too) in "
                f"{where(error)}: its operations are fused and cannot be run again one by one. Call what it was "
                "compiled from, or let Python decide."
            ) from error
        raise CaptureError(
            f"the forward of {type(model).__name__} failed while it was recorded, in {where(error)}: "
            f"{type(error).__name__}: {error}. The same call has to work on the plain model."
        ) from error


def differentiate(loss: torch.Tensor, model: nn.Module) -> None:
    """Backward of a step that is measured.

    Raises:
        CaptureError: it fails.
    """
    try:
        loss.backward()
    except (CkptPlannerError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        raise CaptureError(
            f"the backward of {type(model).__name__} failed while it was measured: {type(error).__name__}: {error} The "
            "same step has to work on the plain model; where it does, the fault is the planner's."
        ) from error


def without_compiling() -> AbstractContextManager[Any]:
    """What is compiled would trace the recording; torch raises instead."""
    if "torch._dynamo" not in sys.modules:
        return nullcontext()
    return torch.compiler.set_stance("fail_on_recompile")  # type: ignore[no-untyped-call,no-any-return]
