"""What measuring and following cost by themselves on this machine, so that they are not taken for the model's time.

Each figure is the difference between two ways of running a chain of operations too small to take any time themselves,
the least of several rounds, and is measured once in a process. On a GPU the host runs ahead of the device, so that
these costs of the host vanish behind the kernels of any model that fills it; there nothing is subtracted or added.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from ckpt_planner.replay.directions import Direction, Directions
from ckpt_planner.replay.follow import Follower

ROUNDS = 7
CALLS = 64  # in one chain


class Chain(torch.nn.Module):
    """Operations too small to take any time themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.ones(8, device="cpu"))

    def forward(self) -> torch.Tensor:
        """The sum of the chain: one element."""
        return _chain(self.weight).sum()


def plain_seconds() -> tuple[float, float]:
    """What one operation of the chain takes in forward, and its node in backward, with nothing around them."""
    with torch.enable_grad():
        model = Chain()
        forward = _least(model)
        both = _least(lambda: model().backward())
    return forward / CALLS, max(0.0, both - forward) / CALLS


@functools.lru_cache(maxsize=1)
def following_seconds() -> tuple[float, float]:
    """What following costs beyond the kernels, seconds: of any operation, and of one that is run again."""
    with torch.enable_grad():
        weight = torch.ones(8, device="cpu", requires_grad=True)

        def forward(directions: Directions | None) -> torch.Tensor:
            x: torch.Tensor = weight
            follower = Follower(directions) if directions is not None else None
            if follower is None:
                return _chain(x)
            with follower:
                x = _chain(x)
            follower.finish()
            return x

        def step(operations: tuple[Direction, ...] | None) -> Callable[[], None]:
            directions = Directions(operations, 1) if operations is not None else None
            return lambda: forward(directions).sum().backward(inputs=[weight])

        idle = tuple(Direction("Tensor.tanh") for _ in range(CALLS))
        plain, idling = _least(step(None)), _least(step(idle))
        kernels = _least(lambda: _forward_only(weight))
        again = _least(step(_all_again()))
    weight.grad = None
    follow = max(0.0, idling - plain) / CALLS
    return follow, max(0.0, again - idling - kernels) / CALLS


def _forward_only(x: torch.Tensor) -> None:
    with torch.no_grad():
        _chain(x)


def _chain(x: torch.Tensor) -> torch.Tensor:
    for _ in range(CALLS):
        x = x.tanh()
    return x


def _all_again() -> tuple[Direction, ...]:
    """Every call of the chain but the last runs again and fills its own slot."""
    directions = []
    for i in range(CALLS):
        direction = Direction("Tensor.tanh")
        if i < CALLS - 1:
            direction.group, direction.dropped_outputs, direction.fills = 0, (True,), frozenset({0})
            direction.slots = ((0, i, 0, True),)
        directions.append(direction)
    return tuple(directions)


def _least(run: Callable[[], object]) -> float:
    run()
    seconds = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
