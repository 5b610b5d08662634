"""The table `[tool.ckpt-plan]` of pyproject.toml, checked key by key. Free of torch.

Example:

    [tool.ckpt-plan]
    plans = "plans"              # folder of the plan files, beside pyproject.toml
    budget = "8GB"
    peak-tolerance = "1%"
    overhead-tolerance = "2%"
    allow = []

    [tool.ckpt-plan.models]
    gpt2 = "examples/gpt2/model.py"
    vit = { file = "examples/vit/model.py:net", budget = "4GB", optimizer = "AdamW" }

    [tool.ckpt-plan.report]
    format = "json"
    mechanism = "torch"
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from .budget import parse_budget
from .errors import BudgetError, CkptPlannerError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

FILE = "pyproject.toml"
STRATEGIES = ("budget", "sqrt", "all", "none")
MECHANISMS = ("slice", "graph", "torch")
GENERAL = ("budget", "strategy", "optimizer", "device")  # what may stand in every table
ALLOWED = ("peak", "overhead", "budget", "segments", "inputs", "device")

_SHARE = re.compile(r"\s*([0-9]{1,9}(?:\.[0-9]{1,9})?)\s*%\s*", re.ASCII)
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.-]*", re.ASCII)


class ConfigError(CkptPlannerError):
    """The table in pyproject.toml cannot be used; the message names the file and the key."""


class Tolerance(msgspec.Struct, frozen=True):
    """How far a plan may get worse before a check fails.

    Attributes:
        peak: share of the predicted peak; 0.01 is 1 %.
        overhead: in points of the plain step's time; 0.02 lets 10 % grow to 12 %.
        allow: of "peak", "overhead", "budget", "segments", "inputs" and "device": what is reported without failing.
    """

    peak: float = 0.01
    overhead: float = 0.02
    allow: tuple[str, ...] = ()


class ModelConfig(msgspec.Struct, frozen=True):
    """One model of the table.

    Attributes:
        name: its key; its plan file is NAME.json in the folder of plans.
        file: FILE[:NAME] with an absolute path.
        budget, strategy, optimizer, device: as the command line takes them; None where neither the model nor the table
            says so.
        tolerance: its own, or the table's.
    """

    name: str
    file: str
    budget: str | None
    strategy: str | None
    optimizer: str | None
    device: str | None
    tolerance: Tolerance


class Config(msgspec.Struct, frozen=True):
    """The table, with paths made absolute.

    Attributes:
        path: the pyproject.toml that it is from; None where there is none.
        plans: the folder of the plan files.
        models: in the order of the table.
        tolerance: for plans that are no model's of the table.
        general: budget, strategy, optimizer and device for plans that are no model's, where the table has them.
        report: defaults of the options of `ckpt-plan report`, by the names of its parameters.
    """

    path: Path | None
    plans: Path
    models: tuple[ModelConfig, ...]
    tolerance: Tolerance
    general: dict[str, Any]
    report: dict[str, Any]

    def plan_of(self, model: ModelConfig) -> Path:
        """The plan file of a model."""
        return self.plans / f"{model.name}.json"


def parse_share(value: str | float) -> float:
    """A tolerance as people write it: "1%" is 0.01, and so is 0.01.

    Raises:
        ValueError: it is neither, or is below zero.
    """
    if isinstance(value, str) and (match := _SHARE.fullmatch(value)):
        return float(match[1]) / 100
    if isinstance(value, (int, float)) and not isinstance(value, bool) and 0 <= value < float("inf"):
        return float(value)
    raise ValueError(f'{value!r} is not a share such as "1%" or 0.01')


def find_config(start: Path) -> Config:
    """The nearest table at or above a folder; an empty one beside `start` where there is none.

    Raises:
        ConfigError: the file cannot be read, or a key or value is wrong.
    """
    for folder in (start.resolve(), *start.resolve().parents):
        path = folder / FILE
        if path.is_file() and (table := _table(path)) is not None:
            return _Reader(path).config(table)
    return Config(None, start / "plans", (), Tolerance(), {}, {})


def read_config(path: Path) -> Config:
    """The table of one file.

    Raises:
        ConfigError: it has none, cannot be read, or a key or value is wrong.
    """
    table = _table(path)
    if table is None:
        raise ConfigError(f"{path}: there is no table [tool.ckpt-plan].")
    return _Reader(path.resolve()).config(table)


def _table(path: Path) -> Any:
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: is no valid TOML: {error}.") from None
    tool = content.get("tool", {})
    return tool.get("ckpt-plan") if isinstance(tool, dict) else None


class _Reader:
    """Checks one file's table; every error names the key."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.kinds: dict[str, Callable[[str, Any], Any]] = {
            "budget": self._budget,
            "strategy": lambda key, value: self._choice(key, value, STRATEGIES),
            "optimizer": self._text,
            "device": self._text,
            "peak-tolerance": self._share,
            "overhead-tolerance": self._share,
            "allow": self._allow,
        }
        self.report_kinds: dict[str, Callable[[str, Any], Any]] = {
            **{key: self.kinds[key] for key in GENERAL},
            "mechanism": lambda key, value: self._choice(key, value, MECHANISMS),
            "format": self._text,
            "output": self._output,
            **dict.fromkeys(("frontier", "measure", "verify"), self._flag),
        }

    def error(self, key: str, why: str) -> ConfigError:
        return ConfigError(f"{self.path}: [tool.ckpt-plan] {key}: {why}")

    def config(self, table: Any) -> Config:
        if not isinstance(table, dict):
            raise self.error("", "is no table.")
        own = {k: v for k, v in table.items() if k not in ("plans", "models", "report")}
        shared = self._known("", own, self.kinds, ("plans", "models", "report"))
        plans = self._text("plans", table.get("plans", "plans"))
        models = table.get("models", {})
        if not isinstance(models, dict):
            raise self.error("models", 'is no table; write name = "file.py" under [tool.ckpt-plan.models].')
        general = {k: v for k, v in shared.items() if k in GENERAL}
        return Config(
            path=self.path,
            plans=self.path.parent / plans,
            models=tuple(self._model(name, value, shared) for name, value in models.items()),
            tolerance=_tolerance(shared),
            general=general,
            report={**general, **self._report(table.get("report", {}))},
        )

    def _known(
        self,
        prefix: str,
        table: Mapping[str, Any],
        kinds: Mapping[str, Callable[[str, Any], Any]],
        others: tuple[str, ...] = (),
    ) -> dict[str, Any]:
        found = {}
        for key, value in table.items():
            if key not in kinds:
                known = ", ".join(sorted([*kinds, *others]))
                raise self.error(f"{prefix}{key}", f"the key is unknown. Known here: {known}.")
            found[key] = kinds[key](f"{prefix}{key}", value)
        return found

    def _model(self, name: str, value: Any, shared: Mapping[str, Any]) -> ModelConfig:
        prefix = f"models.{name}"
        if not _NAME.fullmatch(name) or name.endswith(".profile"):
            raise self.error(prefix, "the name becomes a file's; use letters, digits, '_', '-' and '.'.")
        table = {"file": value} if isinstance(value, str) else value
        if not isinstance(table, dict) or "file" not in table:
            raise self.error(prefix, 'is neither a file nor a table with the key "file".')
        file = self._text(f"{prefix}.file", table["file"])
        rest = {k: v for k, v in table.items() if k != "file"}
        own = {**shared, **self._known(f"{prefix}.", rest, self.kinds, ("file",))}
        return ModelConfig(
            name=name,
            file=str(self.path.parent / file),
            budget=own.get("budget"),
            strategy=own.get("strategy"),
            optimizer=own.get("optimizer"),
            device=own.get("device"),
            tolerance=_tolerance(own),
        )

    def _report(self, table: Any) -> dict[str, Any]:
        """Defaults of `ckpt-plan report`, checked by the command itself when it takes them."""
        if not isinstance(table, dict):
            raise self.error("report", "is no table.")
        found = self._known("report.", table, self.report_kinds)
        return {"form" if key == "format" else key: value for key, value in found.items()}

    # -- values -----------------------------------------------------------------------------------------------------

    def _text(self, key: str, value: Any) -> str:
        if not isinstance(value, str) or not value:
            raise self.error(key, f"{value!r} is no text.")
        return value

    def _budget(self, key: str, value: Any) -> str:
        try:
            if value is None:
                raise BudgetError("a budget is needed")
            parse_budget(value)
        except BudgetError as error:
            raise self.error(key, str(error)) from None
        return str(value)

    def _choice(self, key: str, value: Any, known: tuple[str, ...]) -> str:
        if value not in known:
            raise self.error(key, f"{value!r} is unknown; choose one of {', '.join(known)}.")
        return str(value)

    def _flag(self, key: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise self.error(key, f"{value!r} is not of type bool.")
        return value

    def _output(self, key: str, value: Any) -> str:
        """A file beside pyproject.toml, as every path of the table; "-" is stdout."""
        text = self._text(key, value)
        return text if text == "-" else str(self.path.parent / text)

    def _share(self, key: str, value: Any) -> float:
        try:
            return parse_share(value)
        except ValueError as error:
            raise self.error(key, f"{error}.") from None

    def _allow(self, key: str, value: Any) -> tuple[str, ...]:
        if not isinstance(value, list) or not all(item in ALLOWED for item in value):
            raise self.error(key, f"{value!r} is no list of {', '.join(ALLOWED)}.")
        return tuple(value)


def _tolerance(values: Mapping[str, Any]) -> Tolerance:
    plain = Tolerance()
    return Tolerance(
        values.get("peak-tolerance", plain.peak),
        values.get("overhead-tolerance", plain.overhead),
        values.get("allow", ()),
    )
