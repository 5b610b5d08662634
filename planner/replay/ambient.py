"""What a call depends on besides its arguments, as it was in forward and is to be in a replay: autocast, generators."""

from __future__ import annotations

import functools
from typing import Any

import torch

AutocastState = tuple[tuple[str, bool, torch.dtype], ...]

any_autocast = torch._C._is_any_autocast_enabled


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
