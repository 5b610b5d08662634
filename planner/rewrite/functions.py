"""Custom `autograd.Function`s in a capture: each application is one node, because no mode sees it come by."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from .recorder import Recorder


class Apply:
    """Applies a function class."""

    def __init__(self, cls: Any) -> None:
        self.cls = cls

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Apply it."""
        return self.cls.apply(*args, **kwargs)

    def __deepcopy__(self, memo: Any) -> Apply:
        return self


class Functions:
    """While it is entered, the recorder is told of each `Function.apply`.

    Attributes:
        inside: whether one is under way; the calls that it makes are part of it.
    """

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder
        self.inside = False

    def __enter__(self) -> None:
        original = self._original = torch.autograd.Function.__dict__["apply"]

        def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
            bound = original.__get__(None, cls)
            if self.inside or not torch._C._is_torch_function_mode_enabled():
                return bound(*args, **kwargs)  # within another call, of which it is a part
            name = f"{cls.__module__}.{cls.__qualname__}.apply"
            return self._recorder.call(name, Apply(cls), args, kwargs, run=self._within(bound))

        torch.autograd.Function.apply = classmethod(apply)  # type: ignore[method-assign,assignment]

    def _within(self, bound: Any) -> Any:
        def run(*args: Any, **kwargs: Any) -> Any:
            self.inside = True
            try:
                return bound(*args, **kwargs)
            finally:
                self.inside = False

        return run

    def __exit__(self, *error: Any) -> None:
        torch.autograd.Function.apply = self._original  # type: ignore[method-assign]
