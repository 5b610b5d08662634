"""Plans made up for tests of what is shown of them, without solving."""

from __future__ import annotations

from enum import Enum
from types import SimpleNamespace
from typing import Any

from ckpt_planner.deciding import Planned
from ckpt_planner.decision import Decision
from ckpt_planner.plan import Plan
from ckpt_planner.profile import SCHEMA_VERSION, Profile
from ckpt_planner.runtime import Runtime
from ckpt_planner.solve import Solution, SolveStatus

MB = 2**20


class Status(Enum):
    """As a plan's."""

    OPTIMAL = "No plan of this kind takes less time."


def segment(*modules: str, freed: int = 8 * MB, nodes: int = 4, seconds: float = 0.002) -> SimpleNamespace:
    """What `Plan.segments` holds."""
    return SimpleNamespace(
        modules=modules, nodes=nodes, bytes_freed=freed, bytes_kept=freed // 8, recompute_seconds=seconds
    )


def memory(**parts: int) -> SimpleNamespace:
    """What `Plan.memory` holds, in MiB."""
    names = ("parameters", "buffers", "gradients", "optimizer", "inputs", "activations", "workspace")
    return SimpleNamespace(**{name: parts.get(name, 0) * MB for name in names})


def plan(**changes: Any) -> Any:
    """A plan that saves 96 of 150 MiB (of 136 above what is resident) for 12 % more time."""
    profile = Profile(
        schema=SCHEMA_VERSION,
        model="GPT2LMHeadModel",
        input_signature="",
        structure="",
        torch_version="2.13.0",
        device="cpu",
        storages=(),
        ops=(),
        slots=(),
        steps=(),
        parameter_bytes=13 * MB,
        buffer_bytes=0,
        input_bytes=MB,
        gradient_bytes=13 * MB,
        end_live_bytes=13 * MB,
    )
    values = {
        "peak_bytes": 54 * MB,
        "baseline_peak_bytes": 150 * MB,
        "budget_bytes": 60 * MB,
        "step_seconds": 0.112,
        "baseline_step_seconds": 0.1,
        "recompute_seconds": 0.011,
        "overhead": 0.12,
        "status": Status.OPTIMAL,
        "strategy": "budget",
        "segments": tuple(segment(f"transformer.h.{i}.mlp.act", f"transformer.h.{i}.mlp.c_fc") for i in range(12)),
        "profile": profile,
        "decision": Decision(profile, Solution((), SolveStatus.NOTHING_TO_DO, 0.0, 0), 60 * MB, "budget"),
        "memory": memory(parameters=13, inputs=1, activations=30, workspace=10),
        "baseline_memory": memory(parameters=13, inputs=1, activations=126, workspace=10),
        "notes": (),
        "lower_bound_seconds": 0.01,
        "gap": 0.01,
        "mechanism": "slice",
        "mechanism_reason": "The default.",
    }
    return SimpleNamespace(**{**values, **changes})


def plan_of(decision: Decision) -> Plan:
    """The plan of a decision that no model was measured for."""
    runtime = Runtime(decision.budget_bytes, decision.strategy)
    runtime.first = Planned(decision)
    return Plan(runtime)


def measurement(**changes: Any) -> Any:
    """What `Plan.measure` returns."""
    values = {
        "peak_bytes": 53 * MB,
        "predicted_peak_bytes": 54 * MB,
        "step_seconds": 0.115,
        "baseline_peak_bytes": 150 * MB,
        "baseline_step_seconds": 0.1,
    }
    return SimpleNamespace(**{**values, **changes})
