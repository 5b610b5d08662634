"""`plan.model`: the user's model with another `__call__`.

The planned module has a class of its own, made from the model's, and shares the model's `__dict__`: parameters,
buffers, submodules, modes, hooks and attributes are the model's, under the same names, whichever of the two they are
set on. Only calling differs.
"""

from __future__ import annotations

import copy
import functools
import sys
from typing import Any

import torch
from torch import nn

from .errors import UnsupportedModelError
from .runtime import Runtime

_CLASSES: dict[type, type[nn.Module]] = {}


def planned_module(model: nn.Module, runtime: Runtime) -> nn.Module:
    """A module that is `model` in everything but that its training calls follow `runtime`'s plans."""
    cls = _planned_class(type(model))
    made: nn.Module = object.__new__(cls)
    object.__setattr__(made, "__dict__", model.__dict__)
    object.__setattr__(made, "_ckpt_runtime", runtime)
    return made


def plain_module(model: nn.Module) -> nn.Module:
    """The original's view of a planned module; any other module as it is."""
    if not hasattr(type(model), "_ckpt_original"):
        return model
    made: nn.Module = object.__new__(type(model)._ckpt_original)  # type: ignore[attr-defined]
    object.__setattr__(made, "__dict__", model.__dict__)
    return made


def _planned_class(original: type[nn.Module]) -> type[nn.Module]:
    made = _CLASSES.get(original)
    if made is None:
        if hasattr(original, "_ckpt_original"):
            raise UnsupportedModelError("this model is planned already; plan the original")
        made = type(
            original.__name__,
            (original,),
            {
                "__slots__": ("_ckpt_runtime",),
                "__module__": original.__module__,
                "__qualname__": original.__qualname__,
                "__doc__": original.__doc__,
                "_ckpt_original": original,
                "__call__": _call,
                "__reduce_ex__": _reduce,
                "__deepcopy__": _deepcopy,
            },
        )
        _CLASSES[original] = made
    return made


def _call(self: Any, *args: Any, **kwargs: Any) -> Any:
    run = Runtime.call if "torch._dynamo" not in sys.modules else _outside_of_what_is_compiled()
    return run(self._ckpt_runtime, plain_module(self), super(type(self), self).__call__, args, kwargs)


@functools.cache
def _outside_of_what_is_compiled() -> Any:
    """Carrying out a plan, for a caller that torch.compile may compile: it would compile the follower, call by call."""
    return torch.compiler.disable(_carry_out)


def _carry_out(runtime: Runtime, *call: Any) -> Any:
    return Runtime.call(runtime, *call)


def _reduce(self: Any, protocol: Any) -> Any:
    return (planned_module, (plain_module(self), self._ckpt_runtime))


def _deepcopy(self: Any, memo: dict[int, Any]) -> Any:
    made = planned_module(copy.deepcopy(plain_module(self), memo), copy.deepcopy(self._ckpt_runtime, memo))
    memo[id(self)] = made
    return made
