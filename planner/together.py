"""Planning on several ranks: the first rank's profile decides, and every rank runs the same plan.

All ranks measure the same steps, so that collectives within the forward find their counterparts. The first rank never
waits for another; the others follow what it says (`ranks.py`).
"""

from __future__ import annotations

import hashlib
import logging
from typing import TYPE_CHECKING, Any

from torch import nn

from . import ranks as talking
from .decision import Decision, decide
from .errors import CaptureError, CkptPlannerError, InfeasibleBudgetError, PlanMismatchError
from .planfile import decode_plan, encode_plan
from .problem import make_problem
from .profile import Profile
from .profiling.signature import model_structure
from .ranks import Message, Ranks
from .solve import Solution, SolveStatus, segments_by_bytes

if TYPE_CHECKING:
    from .deciding import Planned
    from .runtime import Runtime

log = logging.getLogger("ckpt_planner")


def plan_together(runtime: Runtime, ranks: Ranks, model: nn.Module, args: Any, kwargs: Any) -> Planned:
    """The plan that every rank carries out for calls of this kind.

    The first planning is one that every rank has to take part in. Later ones may concern one rank only (its batch is
    smaller). Where the forward has collectives, a rank may measure only if all do; otherwise it follows the plan that
    there is. Where it has none, a rank to whose kind of call the first rank does not come decides for itself.

    Raises:
        PlanMismatchError: this rank's model is not the first rank's.
        InfeasibleBudgetError, CaptureError: as on the first rank.
    """
    key = runtime.key(model, args, kwargs)
    if runtime.first is None:
        return _plan(runtime, ranks, "first", model, args, kwargs, talking.PATIENCE)
    if runtime.collectives:
        talk = f"call {runtime.calls}"
        if ranks.all_here(talk, talking.GRACE):
            return _plan(runtime, ranks, talk, model, args, kwargs, talking.PATIENCE)
        log.warning(
            "a call of another kind than planned, %s, has come on some ranks only; its forward has collectives, so it "
            "could not be measured. It follows the plan for %s and may take more memory than the budget",
            key[0],
            runtime.first.decision.profile.input_signature,
        )
        return runtime.left.get(key, runtime.first)
    digest = hashlib.blake2b(repr(key).encode(), digest_size=8).hexdigest()
    return _plan(runtime, ranks, f"{digest} {runtime.replans(key)}", model, args, kwargs, talking.GRACE)


def _plan(
    runtime: Runtime, ranks: Ranks, talk: str, model: nn.Module, args: Any, kwargs: Any, patience: float
) -> Planned:
    if ranks.decides:
        return _decide(runtime, ranks, talk, model, args, kwargs)
    return _follow(runtime, ranks, talk, model, args, kwargs, patience)


def _decide(runtime: Runtime, ranks: Ranks, talk: str, model: nn.Module, args: Any, kwargs: Any) -> Planned:
    ranks.say(talk, 0, Message("begun", model_structure(model), type(model).__name__))
    number = 0

    def say(kind: str, decision: Decision) -> None:
        nonlocal number
        number += 1
        ranks.say(talk, number, Message(kind, plan=encode_plan(decision)))

    try:
        planned = runtime.plan_alone(model, args, kwargs, lambda p: say("rehearse", p.decision))
    except InfeasibleBudgetError as error:
        failed = Message("failed", str(error), budget_bytes=error.budget_bytes, minimum_bytes=error.minimum_bytes)
        ranks.say(talk, number + 1, failed)
        raise
    except BaseException as error:
        ranks.say(talk, number + 1, Message("failed", f"{type(error).__name__}: {error}"))
        raise
    say("done", planned.decision)
    return planned


def _follow(
    runtime: Runtime, ranks: Ranks, talk: str, model: nn.Module, args: Any, kwargs: Any, patience: float
) -> Planned:
    profile = None
    if patience < talking.PATIENCE:  # measuring takes a while; the first rank may have come by then
        profile = runtime.measure(model, args, kwargs)
    begun = ranks.hear(talk, 0, patience)
    if begun is None and profile is not None:
        log.info("rank 0 does not plan for %s: rank %d decides for itself", profile.input_signature, ranks.rank)
        return runtime.decide_alone(profile, model, args, kwargs)
    if begun is None:
        raise CkptPlannerError(
            f"rank 0 has not begun to plan within {patience:.0f} s. Its profile decides for all ranks: call optimize, "
            "or plan.model for the first time, on every rank of the process group and in one order; give optimize the "
            "process_group of the ranks that train this model."
        )
    if begun.text != model_structure(model):
        raise PlanMismatchError(
            f"rank {ranks.rank} has a {type(model).__name__} that differs from rank 0's {begun.model} (names, shapes "
            f"or types of parameters and buffers, modes, what is frozen, or the device): {model_structure(model)} "
            f"here, {begun.text} there. Make the same model on every rank and plan in one order, or give optimize the "
            "process_group of the ranks that train it."
        )
    if profile is None:
        profile = runtime.measure(model, args, kwargs)
    number = 0
    while True:
        number += 1
        message = ranks.hear(talk, number, talking.PATIENCE)
        if message is None:
            raise CkptPlannerError(f"rank 0 has said nothing for {talking.PATIENCE:.0f} s while it planned")
        if message.kind == "failed":
            if message.minimum_bytes >= 0:
                raise InfeasibleBudgetError(
                    message.text, budget_bytes=message.budget_bytes, minimum_bytes=message.minimum_bytes
                )
            raise CaptureError(f"rank 0, whose profile decides, could not plan: {message.text}")
        decision = decode_plan(message.plan, "rank 0's plan")
        if message.kind == "done":
            return _own(runtime, decision, profile, runtime.budget_bytes(profile, model, args, kwargs))
        if runtime.collectives:  # rank 0 takes a step now, which this rank has to join
            runtime.rehearsed(_rough(decision, profile), model, args, kwargs)


def _own(runtime: Runtime, decision: Decision, profile: Profile, budget: int) -> Planned:
    """Rank 0's decision for this rank: as it is, or on this rank's shapes; one of its own where neither fits."""
    from .deciding import Planned

    if _work(decision.profile) == _work(profile):
        if decision.profile.input_signature != profile.input_signature or decision.timeline.peak_bytes > budget:
            decision = Decision(profile, _on(profile, decision.solution), budget, decision.strategy)
        if decision.timeline.peak_bytes <= budget:
            planned = Planned(decision)
            planned.trust_nothing()
            return planned
    log.info("rank 0's plan does not fit this rank, which decides for itself for %s", profile.input_signature)
    planned = Planned(decide(profile, budget, runtime.strategy))
    planned.trust_nothing()
    return planned


def _rough(decision: Decision, profile: Profile) -> Planned:
    """A plan for a step that this rank takes only because rank 0 takes one."""
    from .deciding import Planned

    same = _work(decision.profile) == _work(profile)
    solution = decision.solution if same else Solution(segments_by_bytes(profile), SolveStatus.FEASIBLE, 0.0, 0)
    return Planned(Decision(profile, _on(profile, solution), decision.budget_bytes, decision.strategy))


def _on(profile: Profile, solution: Solution) -> Solution:
    """A solution with this profile's own figures."""
    problem = make_problem(profile, 0)
    try:
        judged = problem.judge(solution.dropped, solution.inner)
    except ValueError:  # inner boundaries that separate nothing here
        judged = problem.judge(solution.dropped)
    return Solution(judged.dropped, SolveStatus.FEASIBLE, judged.seconds, judged.peak_bytes, inner=judged.inner)


def _work(profile: Profile) -> tuple[Any, ...]:
    """What has to be equal for one profile's decision to mean something for another."""
    return (
        tuple((op.name, op.inside, op.replay, op.reads, op.output, op.writes, op.choices) for op in profile.ops),
        tuple((slot.op, slot.position, slot.storage, slot.fixed) for slot in profile.slots),
        tuple((storage.kind, storage.birth) for storage in profile.storages),
    )
