"""A stand-in for the user's model that can be run without leaving a trace on it.

The copy shares the parameters' memory and nothing else: its buffers, its Python attributes, its hooks' bookkeeping and
its gradients are its own.
"""

from __future__ import annotations

import copy
import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy
from torch.utils import _pytree as pytree
from torch.utils.weak import WeakIdKeyDictionary

from ckpt_planner.errors import UnsupportedModelError
from ckpt_planner.replay.ambient import generator_states, set_generator_states
from ckpt_planner.replay.calls import tensors_in

from .closures import rebind_closures
from .warned import warnings_name_the_user

_WRITTEN = WeakIdKeyDictionary()


def shadow(model: nn.Module) -> nn.Module:
    """A copy of `model` whose parameters are the same memory and whose everything else is its own.

    Parameters that its forward is known to write into (`needs_its_own`) are copied as well.

    Raises:
        UnsupportedModelError: the model holds something that cannot be copied, or a parameter that is not made yet.
    """
    memo: dict[int, Any] = {}
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if is_lazy(tensor):
            raise UnsupportedModelError(
                f"{name} of {type(model).__name__} has no shape yet, since its module is lazy: call the model once "
                "before it is planned."
            )
    for parameter in model.parameters():
        memo[id(parameter)] = _alias(parameter)
    for module in model.modules():
        for tensor in tensors_in(vars(module)):
            if not tensor.is_leaf and id(tensor) not in memo:  # left from a forward: weight_norm's weight, a state
                memo[id(tensor)] = tensor.detach().clone().requires_grad_(tensor.requires_grad)
    try:
        made = copy.deepcopy(model, memo)
    except Exception as error:
        raise UnsupportedModelError(
            f"{type(model).__name__} holds something that cannot be copied ({type(error).__name__}: {error}). "
            "Planning runs a copy, so that your model is left as it was; give the "
            "attribute a __deepcopy__, or make it in forward."
        ) from error
    rebind_closures(made, memo)
    return made


def nothing_new(model: nn.Module, copy: nn.Module) -> None:
    """After a forward of the copy: it has the parameters that the model has.

    Raises:
        UnsupportedModelError: its forward has made others, which the planned model would not have from the start.
    """
    names = {name for name, _ in copy.named_parameters()} - {name for name, _ in model.named_parameters()}
    if names:
        raise UnsupportedModelError(
            f"the forward of {type(model).__name__} makes parameters that were not there before: "
            f"{', '.join(sorted(names)[:4])}. Make them when the model is made, or call it once before "
            "it is planned and before an optimizer is made."
        )


def needs_its_own(parameter: nn.Parameter) -> None:
    """From now on, copies of the parameter's model do not share its memory: their forward writes into it."""
    _WRITTEN[parameter] = True


def _alias(parameter: nn.Parameter) -> nn.Parameter:
    data = parameter.detach().clone() if parameter in _WRITTEN else parameter.detach()
    alias = nn.Parameter(data, requires_grad=parameter.requires_grad)
    if type(parameter) is not nn.Parameter and type(parameter) is not torch.Tensor:
        raise UnsupportedModelError(
            f"a parameter is a {type(parameter).__name__}; planning knows plain parameters only. Plan the model before "
            "it is sharded or quantised."
        )
    alias.__dict__.update(getattr(parameter, "__dict__", {}))
    if parameter in _WRITTEN:  # copies of the copy do not share its memory either
        _WRITTEN[alias] = True
    return alias


def copied_inputs(value: Any) -> Any:
    """Inputs with each tensor copied, so that in-place work and gradients stay away from the user's.

    A tensor that is given twice is one copy, given twice.
    """
    copies: dict[int, torch.Tensor] = {}

    def one(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if id(leaf) not in copies:
            made = leaf.detach().clone()
            copies[id(leaf)] = made.requires_grad_() if leaf.requires_grad else made
        return copies[id(leaf)]

    return pytree.tree_map(one, value)


@contextmanager
def untouched() -> Iterator[None]:
    """Puts the random generators of torch, Python and NumPy back as they were; warnings name the user's lines."""
    states, python = generator_states(), random.getstate()
    numpy = sys.modules.get("numpy")
    numbers = numpy.random.get_state() if numpy is not None else None
    try:
        with warnings_name_the_user():
            yield
    finally:
        set_generator_states(states)
        random.setstate(python)
        if numpy is not None:
            numpy.random.set_state(numbers)
