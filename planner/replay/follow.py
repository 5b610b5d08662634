"""The forward pass of a planned step: the model's own Python runs, and a light mode follows it.

Nothing is traced and nothing is frozen. Each torch call is compared with the plan by its name; where the plan says so,
the call is noted down (its arguments are this step's own), and what autograd saves is replaced by a handle. From a call
that differs from the plan on, everything is kept, until a few calls in a row are again those of a later place in the
plan. Such a step costs memory, never a wrong gradient: a value is dropped only if this very step has noted the calls
that make it again, wherever in the plan the follower takes itself to be.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from .calls import call_name, is_operation
from .directions import MEETING, Direction, Directions
from .familiar import learn
from .forward_program import MISS, OTHERWISE
from .noting import Noting, Watch
from .protect import writes_by_options, writes_in_place, written_by
from .step import Step

_push_hooks = torch._C._autograd._push_saved_tensors_default_hooks
_pop_hooks = torch._C._autograd._pop_saved_tensors_default_hooks
_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


class Follower(Step, TorchFunctionMode):
    """Follows one forward pass.

    Attributes:
        diverged: the first operation that differed from the plan, as (position, expected, found), or None.
        lost: whether the plan was not met again since.

    Args:
        directions: what to do.
        trusting: the step is the one that was profiled, so what a call does for the first time is as planned.
    """

    def __init__(self, directions: Directions, trusting: bool = False) -> None:
        Step.__init__(self, directions)
        TorchFunctionMode.__init__(self)
        self._directions, self._meeting_points, self._trusting = directions.ops, directions.after, trusting
        self._end = len(directions.ops)
        self.diverged: tuple[int, str, str] | None = None
        self.lost = False
        self._recent: tuple[str, ...] = ()

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if kwargs is None:
            kwargs = {}
        if self.lost:
            return self._search(func, args, kwargs)
        position = self.position
        direction = self._directions[position] if position < self._end else None
        if direction is not None:
            for familiar in direction.familiar:
                if familiar.function is func or familiar.function == func:  # a property's is another object each time
                    result = familiar.again(self, args, kwargs)
                    if result is not MISS:
                        return result
        name = call_name(func)
        if direction is None or direction.name != name:
            self.unrepeated(name, args, kwargs)
            result = func(*args, **kwargs)
            if is_operation(result):
                self.lose(direction.name if direction else "the end of forward", name)
            return result
        if direction.group >= 0:
            return self._note(direction, func, args, kwargs)
        if direction.in_place or (kwargs and writes_by_options(kwargs)):
            self.unrepeated(name, args, kwargs)
        if not direction.slots:
            result = func(*args, **kwargs)
            if type(result) is torch.Tensor or is_operation(result):
                self.position = position + 1
            return result
        self.watched = False
        try:
            result = self._call(direction, func, args, kwargs)
        except BaseException:
            self.unsettled.clear()
            raise
        return self._done(direction, result)

    def _call(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Make the call, and do as planned with what it saves."""
        # A saved-tensor hook of the model's own (its own checkpoint, offloading) is on top: leave it to it.
        if direction.slots and _top_hooks(True) == self.hooks_below:
            self.slots, self.saved = direction.slots, 0
            _push_hooks(self.pack, self.unpack)  # saved_tensors_hooks, without its object
            try:
                return func(*args, **kwargs)
            finally:
                _pop_hooks()
        return func(*args, **kwargs)

    def _done(self, direction: Direction, result: Any, noting: Noting | None = None, as_planned: bool = True) -> Any:
        """After a call of the planned name: go on with the plan, unless it did something else."""
        if not as_planned or (type(result) is not torch.Tensor and not is_operation(result)):
            if noting is not None:
                noting.withdraw()
            self.unsettled.clear()
            self.lose(direction.name, OTHERWISE)
            return result
        if noting is not None:
            if direction.writes:
                noting.account()
            self.bind(direction, noting.index, result, noting.given())
            if (second := noting.second) is not None:
                self.bind(second.direction, second.index, result, second.given())
        if self.unsettled:
            self.settle()
        self.position += 1
        return result

    def _note(self, direction: Direction, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """A call that runs again: note it in full, and make it."""
        noting = Noting(self, direction)
        try:
            noting.note(func, args, kwargs, self._trusting)
        except BaseException:
            noting.withdraw()
            raise
        if not noting.sound:
            noting.withdraw()
            self.unrepeated(direction.name, args, kwargs)
            self.lose(direction.name, "a call of that name on other tensors")
            return func(*args, **kwargs)
        watch = None if noting.known else Watch(noting)
        if direction.in_place or writes_in_place(direction.name, kwargs):
            self.protect(written_by(direction.name, args, kwargs))
        elif direction.writes:  # by a positional option
            self.protect(noting.written)
        covered = self.before_write(noting.written) if direction.writes else []
        self.watched = watch is not None
        try:
            result = self._call(direction, func, args, kwargs)
        except BaseException:
            self.after_write(direction.name, covered)
            noting.withdraw()
            self.unsettled.clear()
            raise
        self.after_write(direction.name, covered)
        position = self.position
        self._done(direction, result, noting, watch is None or watch.as_planned())
        if self.position > position and direction.learns:
            learn(noting, position, args, kwargs, result)
        return result

    def lose(self, expected: str, found: str) -> None:
        """This call differs from the plan: keep everything until the plan is met again."""
        self.diverged = self.diverged or (self.position, expected, found)
        self.lost, self._recent = True, ()

    def _search(self, func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
        """Keep what this call makes; go on with the plan where the last few calls are found in it, further on."""
        name = call_name(func)
        self.unrepeated(name, args, kwargs)
        result = func(*args, **kwargs)
        if is_operation(result):
            self._recent = (*self._recent, name)[-MEETING:]
            later = self._meeting_points(self._recent)
            place = bisect.bisect_left(later, self.position)
            if place < len(later):
                self.position, self.lost = later[place], False
        return result
