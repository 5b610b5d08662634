"""What is committed for a model and compared later: a plan file, and the profile that it was decided from. Free of
torch.

Sizes are whole bytes; times are whole microseconds (`_us`) in the plan and nanoseconds (`_ns`) in the profile's file.
"""

from __future__ import annotations

import msgspec

from .canonical import Fingerprints
from .profile import Profile

SCHEMA_VERSION = 2
PLAN_KIND = "ckpt-planner locked plan"
PROFILE_KIND = "ckpt-planner locked profile"


class LockedSegment(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Operations that backward runs again together.

    Attributes:
        modules: paths of the modules that they belong to, in order.
        operations: their names, in order.
        bytes_freed, bytes_kept: as in `Segment`.
        recompute_us: their time in backward, microseconds.
    """

    modules: tuple[str, ...]
    operations: tuple[str, ...]
    bytes_freed: int
    bytes_kept: int
    recompute_us: int


class Settings(msgspec.Struct, frozen=True):
    """What a plan is made for.

    Attributes:
        model: FILE[:NAME] relative to the plan file's folder, or FILE::TEST for a plan that a test keeps.
        budget: as it was asked for; None for what the device had free.
        strategy: "budget", "sqrt", "all" or "none".
        optimizer, device: given over what the model's file says; None where they were not.
    """

    model: str
    budget: str | None
    strategy: str = "budget"
    optimizer: str | None = None
    device: str | None = None


class Locked(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A plan file's contents.

    Attributes:
        model, budget, strategy, optimizer, device: the settings that it was made with.
        subject, inputs: the model's class, and the shapes and types of the call.
        budget_bytes: the budget in bytes of peak, as it was when the plan was made.
        margin_bytes: what the solver stayed below the budget, because a real step took more than predicted; all of
            the budget where only the plan with the smallest peak keeps it.
        peak_bytes, baseline_peak_bytes: predicted peak of the planned and of the plain step.
        baseline_step_us, recompute_us: time of the plain step, and of what runs again.
        follow_us: what following forward costs, beyond what runs again.
        overhead: what the plan costs, both of these, as a share of the plain step's time; as `Plan.overhead`.
        memory: where the bytes of the planned step's peak are.
        profile, profile_digest: the profile's file beside this one, and a digest of its contents.
        versions: of what made the plan.
        digest: of all the rest, so that a change by hand or by a merge is noticed.
    """

    schema: int
    kind: str
    model: str
    subject: str
    inputs: str
    budget: str | None
    budget_bytes: int
    margin_bytes: int
    strategy: str
    optimizer: str | None
    device: str | None
    peak_bytes: int
    baseline_peak_bytes: int
    baseline_step_us: int
    recompute_us: int
    follow_us: int
    overhead: float
    memory: dict[str, int]
    segments: tuple[LockedSegment, ...]
    profile: str
    profile_digest: str
    versions: dict[str, str]
    digest: str = ""

    @property
    def settings(self) -> Settings:
        """What the plan was made for."""
        return Settings(self.model, self.budget, self.strategy, self.optimizer, self.device)


class LockedProfile(msgspec.Struct, frozen=True):
    """A profile file's contents.

    Attributes:
        profile: in its canonical form.
        fingerprints: of the recorded forward pass.
        estimated: signatures of the operations whose time was not measured with the others but scaled to them.
    """

    profile: Profile
    fingerprints: Fingerprints
    estimated: tuple[str, ...] = ()
