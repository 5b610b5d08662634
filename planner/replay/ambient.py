"""What a call depends on besides its arguments, as it was in forward and is to be in a replay.

Autocast, the generators, the default type of numbers, which kernels attention may use, and the default device.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._device import DeviceContext, _device_constructors

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]

any_autocast = torch._C._is_any_autocast_enabled
modes_below: Callable[[], int] = torch._C._len_torch_function_stack  # besides the one whose turn it is
default_dtype = torch.get_default_dtype

Choices = tuple[torch.dtype, bool, bool, bool, bool, tuple[int, ...]]


def choices() -> Choices:
    """The default type of numbers, and the kernels of attention that may be chosen, in their order."""
    return (
        torch.get_default_dtype(),
        torch._C._get_flash_sdp_enabled(),
        torch._C._get_mem_efficient_sdp_enabled(),
        torch._C._get_math_sdp_enabled(),
        torch._C._get_cudnn_sdp_enabled(),
        tuple(torch._C._get_sdp_priority_order()),
    )


def foreign_modes() -> list[str]:
    """Names of the function modes at work that may do anything to a call; the default device's does but one thing."""
    return [type(mode).__name__ for mode in _get_current_function_mode_stack() if type(mode) is not DeviceContext]


def as_modes_have_it(function: Callable[..., Any], kwargs: dict[str, Any]) -> dict[str, Any] | None:
    """The options of a call with those that function modes around forward give it; None if only they know which.

    A mode that is around forward need not be around backward, nor in the thread that backward runs in. The default
    device is one, and can be written down.
    """
    if foreign_modes():
        return None
    if function in _device_constructors() and kwargs.get("device") is None:
        return {**kwargs, "device": torch.get_default_device()}
    return kwargs


def choose(wanted: Choices) -> None:
    """Put back what `choices` returned."""
    torch.set_default_dtype(wanted[0])
    torch._C._set_sdp_use_flash(wanted[1])
    torch._C._set_sdp_use_mem_efficient(wanted[2])
    torch._C._set_sdp_use_math(wanted[3])
    torch._C._set_sdp_use_cudnn(wanted[4])
    torch._C._set_sdp_priority_order(list(wanted[5]))


def autocast_state() -> AutocastState:
    """Whether autocast is on, and to which type, on the CPU and on the GPU if there is one."""
    if not any_autocast():
        return no_autocast()
    return _autocast_on()


def _autocast_on() -> AutocastState:
    devices = _autocast_devices()
    for d in devices:
        if torch.is_autocast_enabled(d):
            return tuple((d, torch.is_autocast_enabled(d), torch.get_autocast_dtype(d)) for d in devices)
    return no_autocast()


@functools.cache
def no_autocast() -> AutocastState:
    """The state in which autocast is off; always the same object."""
    return (("cpu", False, torch.bfloat16), ("cuda", False, torch.float16))[: len(_autocast_devices())]


@functools.cache
def _autocast_devices() -> tuple[str, ...]:
    return ("cpu", "cuda") if torch.cuda.is_available() else ("cpu",)


class Autocast:
    """Sets autocast as it was; without its cache, whose entries must not outlive the replay."""

    __slots__ = ("_contexts", "_state")

    def __init__(self, state: AutocastState) -> None:
        self._state = state
        self._contexts: list[torch.autocast] = []

    def __enter__(self) -> None:
        for device, enabled, dtype in self._state:
            if enabled or torch.is_autocast_enabled(device):
                context = torch.autocast(device, dtype=dtype, enabled=enabled, cache_enabled=False)
                context.__enter__()
                self._contexts.append(context)

    def __exit__(self, *error: Any) -> None:
        while self._contexts:
            self._contexts.pop().__exit__(*error)


def generator_states() -> tuple[torch.Tensor, ...]:
    """States of torch's default generators: the CPU's, and the current GPU's once CUDA is in use."""
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return (torch.get_rng_state(), torch.cuda.get_rng_state())
    return (torch.get_rng_state(),)


def set_generator_states(states: tuple[torch.Tensor, ...]) -> None:
    """Put states back that `generator_states` returned."""
    torch.set_rng_state(states[0])
    if len(states) > 1:
        torch.cuda.set_rng_state(states[1])
