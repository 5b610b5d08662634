"""Makes plan files from models: measures, decides, and takes a real step under the decision."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch

from . import userfile
from .canonical import canonical, fingerprints
from .errors import CkptPlannerError
from .lockfile import Locked, LockedProfile, Settings
from .lockio import profile_path
from .options import find_optimizer
from .profile import Profile
from .profiling.measure import complete_profile, measure_twice
from .relock import lock_of
from .runtime import Runtime
from .seeding import seeded
from .userfile import Subject

Progress = Callable[[str], None]


def silent(_: str) -> None:
    """Says nothing of a stage."""


def reference(target: str, plan: Path) -> str:
    """FILE[:NAME] as a plan file names it: relative to the plan's folder, with slashes."""
    path, name = userfile.split(target)
    relative = Path(os.path.relpath(path.resolve(), plan.parent.resolve())).as_posix()
    return relative if name == "model" else f"{relative}:{name}"


def resolved(settings: Settings, plan: Path) -> str:
    """The FILE[:NAME] that a plan file names, from here."""
    return os.path.normpath(plan.parent / settings.model)


def file_of(settings: Settings, plan: Path) -> str:
    """The file that a plan's model or test is in, from the present folder."""
    target = resolved(settings, plan)
    return shown(Path(target.split("::")[0] if "::" in target else userfile.split(target)[0]))


def shown(path: Path) -> str:
    """A path from the present folder where it lies in it, as people write it."""
    relative = os.path.relpath(path)
    return str(path) if relative.startswith(os.pardir) else Path(relative).as_posix()


@contextmanager
def subject_of(
    target: str, optimizer: str | None = None, device: str | None = None, *, elsewhere: bool = False
) -> Iterator[Subject]:
    """What a user's file defines, in training mode; afterwards the modules that it imported from its folder are let go.

    So two models in folders of their own may each have a neighbour of the same name.

    Args:
        target: FILE[:NAME].
        optimizer: a class of torch.optim, over the file's; "none" for none; None for the file's.
        device: where the model and its inputs are moved; None leaves them where the file puts them.
        elsewhere: whether the CPU will do where this machine has no such GPU.

    Raises:
        UserFileError: the file cannot be used.
    """
    path, name = userfile.split(target)
    chosen = None if optimizer is None else optimizer_class(optimizer)
    modules, paths = set(sys.modules), list(sys.path)
    try:
        with seeded():
            subject = _loaded(path, name, _available(device) if elsewhere else device)
        with seeded():  # again: a model that draws its path takes the same one, whatever was drawn when it was made
            yield subject if optimizer is None else subject._replace(optimizer=chosen)
    finally:
        sys.path[:] = paths
        for added in set(sys.modules) - modules:
            if _of_folder(getattr(sys.modules[added], "__file__", None), path.parent.resolve()):
                del sys.modules[added]


def _of_folder(file: str | None, folder: Path) -> bool:
    """Whether a module's file is one of the user's in a folder, which may hold an environment with packages, too."""
    found = Path(file or "")
    installed = {"site-packages", "dist-packages"} & set(found.parts) or found.is_relative_to(sys.prefix)
    return bool(file) and not installed and found.is_relative_to(folder)


def _loaded(path: Path, name: str, device: str | None) -> Subject:
    subject = userfile.load(path, name, device)
    subject.model.train()
    return subject


def _available(device: str | None) -> str | None:
    return "cpu" if device is not None and device.startswith("cuda") and not torch.cuda.is_available() else device


def optimizer_class(name: str) -> Any:
    """The class of torch.optim with that name; None for "none".

    Raises:
        CkptPlannerError: there is none.
    """
    try:
        return find_optimizer(name)
    except LookupError:
        message = f"the optimizer {name!r} is no class of torch.optim, such as AdamW, and is not none"
        raise CkptPlannerError(message) from None


def lock(subject: Subject, settings: Settings, plan: Path, progress: Progress = silent) -> tuple[Locked, LockedProfile]:
    """Measure a model's step, decide, and take a real step under the decision.

    Args:
        subject: the model in training mode, its call, loss and optimizer.
        settings: what is asked for.
        plan: where the plan file will be; nothing is written here.
        progress: told the name of each stage.

    Raises:
        InfeasibleBudgetError: the budget cannot be kept.
        CaptureError, UnsupportedModelError: the step cannot be measured.
    """
    model, args, kwargs = subject.model, subject.args, subject.kwargs
    draft, profile = measure_twice(
        model, args, kwargs, loss_fn=subject.loss_fn, optimizer=subject.optimizer, progress=progress
    )
    source = LockedProfile(canonical(profile), fingerprints(draft))
    return rehearsed(subject, settings, source, settings.budget, plan, progress), source


def rehearsed(
    subject: Subject,
    settings: Settings,
    source: LockedProfile,
    budget: str | int | None,
    plan: Path,
    progress: Progress = silent,
) -> Locked:
    """Decide from a profile and take a real step under the decision; below the budget where that takes more."""
    runtime = Runtime(budget, settings.strategy, subject.loss_fn, subject.optimizer, progress)
    planned = runtime.decide_alone(source.profile, subject.model, subject.args, subject.kwargs)
    return lock_of(planned.decision, settings, source, profile_path(plan).name)


def completed(subject: Subject, draft: Profile, sequences: list[int], progress: Progress) -> Profile:
    """The profile of a recorded forward pass, with its backward pass and the optimizer measured."""
    return complete_profile(
        draft, sequences, subject.model, subject.args, subject.kwargs,
        loss_fn=subject.loss_fn, optimizer=subject.optimizer, progress=progress,
    )  # fmt: skip
