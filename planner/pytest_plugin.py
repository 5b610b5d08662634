"""A pytest plugin: a test that keeps a plan file beside it and fails where the plan got worse.

    def test_plan(ckpt_plan):
        ckpt_plan.check(model(), inputs(), budget="8GB")

The plan file is plans/TEST_FILE/TEST.json beside the test's file; `pytest --ckpt-plan-update` writes it and accepts
what moved. Nothing heavy is imported before a test asks for the fixture.
"""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from .regress import Check

OPTION = "--ckpt-plan-update"
_WRITTEN = pytest.StashKey[list[str]]()


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds --ckpt-plan-update."""
    parser.getgroup("ckpt-plan").addoption(
        OPTION, action="store_true", help="write the plan files of tests that use ckpt_plan, and accept what moved"
    )


def pytest_configure(config: pytest.Config) -> None:
    """Makes room for the names of files written."""
    config.stash[_WRITTEN] = []


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    """Names the plan files that were written."""
    for path in config.stash[_WRITTEN]:
        terminalreporter.write_line(f"ckpt-plan: wrote {path}")


@pytest.fixture
def ckpt_plan(request: pytest.FixtureRequest) -> PlanChecker:
    """Checks models against the plan files beside this test."""
    return PlanChecker(request)


class PlanChecker:
    """What the fixture `ckpt_plan` gives."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        self._request = request
        self._taken: set[Path] = set()

    def path(self, name: str | None = None) -> Path:
        """The plan file of this test, or of the name given."""
        node = self._request.node
        owner = f"{node.cls.__name__}." if node.cls is not None else ""
        stem = re.sub(r"[^A-Za-z0-9_.-]+", "-", name or f"{owner}{node.name}").strip("-")
        return Path(node.path).parent / "plans" / Path(node.path).stem / f"{stem}.json"

    def check(
        self,
        model: Any,
        inputs: Any,
        *,
        budget: str | int,
        strategy: str = "budget",
        loss_fn: Any = None,
        optimizer: Any = None,
        name: str | None = None,
        peak_tolerance: str | float | None = None,
        overhead_tolerance: str | float | None = None,
        allow: Sequence[str] = (),
    ) -> Check:
        """Fail the test where the model's plan is worse than the one that is committed, or where none is.

        Args:
            model: a torch.nn.Module in training mode.
            inputs: a tensor, a tuple of arguments, a dict of keyword arguments, or (arguments tuple, keywords dict).
            budget, strategy, loss_fn, optimizer: as `optimize` takes them; the budget is needed.
            name: of the plan file, where a test checks several models.
            peak_tolerance, overhead_tolerance: as in [tool.ckpt-plan]: "1%", or 0.01.
            allow: what is reported without failing: "peak", "overhead", "budget", "segments", "inputs", "device".

        Returns:
            What was found, for further assertions.
        """
        __tracebackhide__ = True
        from .checkreport import lines
        from .errors import CkptPlannerError

        plan = self.path(name)
        if plan in self._taken:
            pytest.fail(f"this test has checked {plan.name} already: give each model a name=", pytrace=False)
        self._taken.add(plan)
        found, refused = None, ""
        try:
            tolerance = _tolerance(peak_tolerance, overhead_tolerance, allow)
            found = self._found(plan, model, inputs, str(budget), strategy, loss_fn, optimizer, tolerance)
        except CkptPlannerError as error:
            refused = str(error)
        if found is None:  # outside the handler: the failure is one message, not two exceptions
            pytest.fail(f"{plan}: {refused}", pytrace=False)
        if found.updated:
            self._request.config.stash[_WRITTEN].append(found.plan)
        if found.exit_code:
            pytest.fail("\n".join(lines(found)), pytrace=False)
        return found

    def _found(
        self,
        plan: Path,
        model: Any,
        inputs: Any,
        budget: str,
        strategy: str,
        loss_fn: Any,
        optimizer: Any,
        tolerance: Any,
    ) -> Check:
        import msgspec

        from . import ci
        from .budget import parse_budget
        from .lockfile import Settings
        from .lockio import read_locked
        from .seeding import seeded
        from .userfile import Subject

        update = bool(self._request.config.getoption(OPTION))
        node = self._request.node
        parse_budget(budget)
        file = Path(os.path.relpath(node.path, plan.parent)).as_posix()
        kind = None if optimizer is None else getattr(optimizer, "__name__", type(optimizer).__name__)
        settings = Settings(f"{file}::{node.nodeid.partition('::')[2]}", budget, strategy, kind)
        subject = Subject(model, *_call(model, inputs, strategy), loss_fn, optimizer)
        if not plan.exists():
            if not update:
                return ci.missing(settings, plan, f"pytest {OPTION}")
            with seeded():
                return ci.made(subject, settings, plan)
        locked, committed = read_locked(plan)
        with seeded():
            found = ci.settled(subject, settings, plan, locked, committed, tolerance, update=update)
        accept = f"pytest {OPTION} {node.nodeid}" if found.after is not None and not update else ""
        return msgspec.structs.replace(found, accept=accept)


def _call(model: Any, inputs: Any, strategy: str) -> tuple[tuple[Any, ...], dict[str, Any]]:
    from torch import nn

    from .config import STRATEGIES
    from .errors import CkptPlannerError
    from .userfile import call_of

    call = call_of(inputs)
    if not isinstance(model, nn.Module):
        raise CkptPlannerError(f"a plan is for a torch.nn.Module, not for a {type(model).__name__}")
    if not model.training:
        raise CkptPlannerError("the model is in eval mode, and a plan is for training: call model.train() first")
    if call is None:
        raise CkptPlannerError(
            f"inputs is of type {type(inputs).__name__}; give a tensor, a tuple of arguments, a dict of keyword "
            "arguments, or (arguments tuple, keywords dict)"
        )
    if strategy not in STRATEGIES:
        raise CkptPlannerError(f"strategy {strategy!r} is unknown; choose one of {', '.join(STRATEGIES)}")
    return call


def _tolerance(peak: str | float | None, overhead: str | float | None, allow: Sequence[str]) -> Any:
    from .config import ALLOWED, ConfigError, Tolerance, parse_share

    plain = Tolerance()
    unknown = [item for item in allow if item not in ALLOWED]
    if unknown:
        raise ConfigError(f"allow: {unknown[0]!r} is unknown; choose of {', '.join(ALLOWED)}")
    try:
        return Tolerance(
            plain.peak if peak is None else parse_share(peak),
            plain.overhead if overhead is None else parse_share(overhead),
            tuple(allow),
        )
    except ValueError as error:
        raise ConfigError(f"a tolerance: {error}") from None
