"""Reads a model and its example inputs from a user's Python file.

What goes wrong in that file is told with its own file and line: the user wrote those lines, not ours.
"""

from __future__ import annotations

import importlib.util
import sys
import traceback
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from .errors import CkptPlannerError

if TYPE_CHECKING:
    from torch import nn

T = TypeVar("T")

HOW_TO_DEFINE = """\
The file defines the two as values or as functions without arguments:

    def model():
        return MyModel()

    def example_inputs():            # one of: a tensor; a tuple of arguments; a dict of keyword arguments;
        return torch.randn(8, 256)   # a tuple (arguments, keyword arguments)

and, where they are wanted, `loss_fn` (from the model's output to a scalar) and `optimizer` (a torch.optim class, an
instance, or a function of the parameters)."""


class UserFileError(CkptPlannerError):
    """The user's file cannot be used; the message names its file and line, or what is missing in it."""


class Subject(NamedTuple):
    """What a user's file defines."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    loss_fn: Callable[[Any], Any] | None
    optimizer: Any


def split(target: str) -> tuple[Path, str]:
    """The file and the name in FILE[:NAME]; the name is "model" where none is given."""
    file, colon, name = target.rpartition(":")
    if colon and name.isidentifier() and not Path(target).exists():
        return Path(file), name
    return Path(target), "model"


def load(path: Path, name: str = "model", device: str | None = None) -> Subject:
    """Import a file and take from it what is to be planned.

    Args:
        path: the file.
        name: what the model is called in it.
        device: where the model and the inputs are moved; None leaves them where the file puts them.

    Raises:
        UserFileError: it cannot be imported, a name is missing, or a value is of a kind that cannot be used.
    """
    from torch import nn

    module = _import(path)
    model = _value(module, path, name, nn.Module)
    if not isinstance(model, nn.Module):
        raise UserFileError(f"{path}: `{name}` is {_kind(model)}, not a torch.nn.Module.\n\n{HOW_TO_DEFINE}")
    if device is not None:
        model = _theirs(path, f"moving `{name}` to {device}", lambda: model.to(device))
    args, kwargs = _inputs(path, _value(module, path, "example_inputs"))
    if device is not None:
        args, kwargs = _theirs(path, f"moving the inputs to {device}", lambda: _moved((args, kwargs), device))
    loss_fn = getattr(module, "loss_fn", None)
    if loss_fn is not None and not callable(loss_fn):
        raise UserFileError(f"{path}: `loss_fn` is {_kind(loss_fn)}, not a function of the model's output.")
    return Subject(model, args, kwargs, loss_fn, _optimizer(path, getattr(module, "optimizer", None), model))


def _import(path: Path) -> ModuleType:
    if not path.is_file():
        raise UserFileError(f"{path}: there is no such file.")
    name = path.stem if path.stem not in sys.modules else f"_ckpt_plan_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise UserFileError(f"{path}: not a Python file; its name has to end in .py.")
    module = importlib.util.module_from_spec(spec)
    # As for a script: its neighbours can be imported, and what it defines can be found again (pickle looks here).
    sys.path.insert(0, str(path.parent.resolve()))
    sys.modules[name] = module
    loader = spec.loader
    try:
        _theirs(path, "importing it", lambda: loader.exec_module(module))
    except UserFileError:
        del sys.modules[name]
        raise
    return module


def _value(module: ModuleType, path: Path, name: str, final: type | None = None) -> Any:
    """The value called `name`; a function is called, unless it is an instance of `final` (modules are callable)."""
    if not hasattr(module, name):
        raise UserFileError(f"{path}: `{name}` is not defined.\n\n{HOW_TO_DEFINE}")
    value = getattr(module, name)
    if callable(value) and not (final and isinstance(value, final)):
        return _theirs(path, f"calling `{name}()`", value)
    return value


def call_of(value: Any) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """Arguments and keyword arguments of a call from the one value that people give; None for what is no such value."""
    import torch

    if isinstance(value, torch.Tensor):
        return (value,), {}
    if isinstance(value, Mapping):
        return (), dict(value)
    if isinstance(value, tuple):
        if len(value) == 2 and isinstance(value[0], tuple) and isinstance(value[1], Mapping):
            return value[0], dict(value[1])
        return value, {}
    return None


def _inputs(path: Path, value: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    call = call_of(value)
    if call is not None:
        return call
    raise UserFileError(f"{path}: `example_inputs` is {_kind(value)}, not an accepted kind.\n\n{HOW_TO_DEFINE}")


def _optimizer(path: Path, value: Any, model: nn.Module) -> Any:
    from torch.optim import Optimizer

    if value is None or isinstance(value, Optimizer) or (isinstance(value, type) and issubclass(value, Optimizer)):
        return value
    if callable(value):
        made = _theirs(path, "calling `optimizer(parameters)`", lambda: value(model.parameters()))
        if isinstance(made, Optimizer):
            return made
    raise UserFileError(
        f"{path}: `optimizer` is {_kind(value)}, not a torch.optim class, an instance, or a function of the parameters "
        "that returns one."
    )


def _moved(value: Any, device: str) -> Any:
    """`value` with every tensor in its tuples, lists and dicts on `device`."""
    import torch

    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, dict):
        return {key: _moved(item, device) for key, item in value.items()}
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return type(value)(*(_moved(item, device) for item in value))
    if isinstance(value, (tuple, list)):
        return type(value)(_moved(item, device) for item in value)
    return value


def _theirs(path: Path, doing: str, call: Callable[[], T]) -> T:
    """Run the user's code; what it raises is told from its own lines on.

    Raises:
        UserFileError: it raised, or left by `sys.exit`.
    """
    try:
        return call()
    except (Exception, SystemExit) as error:
        raise UserFileError(f"{path}: {doing} failed.\n\n{_trace(path, error)}") from None


def _trace(path: Path, error: BaseException) -> str:
    """The traceback from the first line of the user's file on, innermost last; the error's own text at the end."""
    frames = traceback.extract_tb(error.__traceback__)
    here = [i for i, frame in enumerate(frames) if _same(frame.filename, path)]
    shown = traceback.format_list(frames[here[0] :]) if here else []
    return "".join([*shown, *traceback.format_exception_only(type(error), error)]).rstrip()


def _same(filename: str, path: Path) -> bool:
    with suppress(OSError):
        return Path(filename).samefile(path)
    return False


def _kind(value: object) -> str:
    return f"of type {type(value).__qualname__}"
