"""Plans for calls as they come, and carries them out: what stands behind `plan.model`."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .budget import format_bytes
from .casts import Casts
from .deciding import Deciding, Planned
from .errors import CaptureError, CkptPlannerError, GuardError, InfeasibleBudgetError, UnsupportedModelError
from .graphed.graphed import Graphed
from .mechanism import Mechanism, Slice
from .modelstate import model_state
from .profile import Profile
from .profiling.garbage import cheap_collections
from .profiling.signature import input_signature
from .profiling.warned import warnings_name_the_user
from .profiling.watch import Watch
from .ranks import Ranks, ranks_of
from .replay.ambient import foreign_modes, modes_below
from .replay.calls import transforming
from .replay.follow import Follower
from .together import plan_together

log = logging.getLogger("ckpt_planner")

CACHE = 8  # decisions kept, one for each kind of call
REPLANS = 3  # how often a kind of call is planned again because steps left the plan

Key = tuple[Any, ...]

# Set while a step is followed or measured in this thread: planned modules inside it run as they are.
_ACTIVE = threading.local()
_hooks_allowed: Callable[[], bool] = torch._C._autograd._saved_tensors_hooks_is_enabled  # type: ignore[attr-defined]
_PLANNING = threading.RLock()  # a step is measured by torch's profiler, of which a process has one


class Runtime(Deciding):
    """Holds what was asked for, and a bounded cache of what was decided.

    Args:
        budget: as `optimize` takes it.
        strategy, loss_fn, optimizer, process_group, mechanism, gradient_buckets: likewise.
        progress: told the name of each stage of planning.

    Attributes:
        cache: decisions by kind of call.
        left: decisions for kinds of calls that are to be planned again.
        calls: how many training calls there were.
    """

    def __init__(
        self,
        budget: str | int | None,
        strategy: str = "budget",
        loss_fn: Callable[[Any], torch.Tensor] | None = None,
        optimizer: Any = None,
        progress: Callable[[str], None] | None = None,
        process_group: Any = None,
        mechanism: str = "slice",
        gradient_buckets: bool | None = None,
    ) -> None:
        super().__init__(budget, strategy, loss_fn, optimizer, progress, mechanism, gradient_buckets)
        self.cache: OrderedDict[Key, Planned] = OrderedDict()
        self.left: dict[Key, Planned] = {}
        self._latest: tuple[Planned, Graphed, Key] | None = None  # the last call's, if a graph ran it
        self.calls = 0
        self.watches: list[Watch] = []  # steps that are being watched; each belongs to a monitor
        self._replans: dict[Key, int] = {}
        self._followed: set[Key] = set()  # kinds of calls that no graph holds for, step after step
        self._group = process_group
        self._ranks: Ranks | None = None
        self._said_within = False
        self._casts = Casts()

    # -- planning ---------------------------------------------------------------------------------------------------

    @cheap_collections()
    def plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        """Measure, decide, check by a real step, and remember; on several ranks, as the first of them decides.

        Raises:
            InfeasibleBudgetError: the budget cannot be kept.
            CaptureError, UnsupportedModelError: the step cannot be measured.
            PlanMismatchError: the first rank has another model.
        """
        with _PLANNING:
            return self._plan(model, args, kwargs)

    def _plan(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Planned:
        ranks = self._ranks = self._ranks or ranks_of(self._group)
        self.several = ranks is not None
        call = (model, args, kwargs)
        if ranks is not None and self.mechanism != "slice":
            raise CkptPlannerError(
                f'mechanism "{self.mechanism}" plans on one rank only; on {ranks.size} ranks use mechanism "slice"'
            )
        planned = self.plan_alone(*call) if ranks is None else plan_together(self, ranks, *call)
        self.remember(self.key(model, args, kwargs), planned)
        return planned

    def remember(self, key: Key, planned: Planned) -> None:
        """Keep a decision for calls of this kind."""
        self.cache[key] = planned
        self.cache.move_to_end(key)
        self._latest = None
        while len(self.cache) > CACHE:
            self.cache.popitem(last=False)
        self.first = self.first or planned

    def under(self, budget_bytes: int) -> Runtime:
        """Another one for the same step under this budget, with nothing decided yet."""
        asked = (self.loss_fn, self.optimizer, self.progress, self._group, self.mechanism)
        return Runtime(budget_bytes, "budget", *asked, gradient_buckets=self.gradient_buckets)

    def adopt(self, model: nn.Module) -> None:
        """Take the first decision for calls of its kind on `model`, in the mode that the model is in now."""
        assert self.first is not None
        self.first.trust_nothing()
        self.cache[(self.first.decision.profile.input_signature, *model_state(model))] = self.first

    # -- running ----------------------------------------------------------------------------------------------------

    @staticmethod
    def key(model: nn.Module, args: Any, kwargs: Any) -> Key:
        """What has to be equal for a decision to be the right one: the call's kind, the model's state."""
        return (input_signature(args, kwargs), *model_state(model))

    def call(self, model: nn.Module, plainly: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """One call of `plan.model`: follow the plan for it, making one first if there is none."""
        if not (model.training and torch.is_grad_enabled()) or getattr(_ACTIVE, "busy", False):
            return plainly(*args, **kwargs)
        if within := _within() or self._stale(model):
            if not self._said_within:
                log.warning(
                    "a call of %s within %s ran its own forward, which keeps everything", type(model).__name__, within
                )
            self._said_within = True
            return plainly(*args, **kwargs)
        self.calls += 1
        if self._latest is not None and not self.watches:
            latest, graphed, key = self._latest
            tensors = graphed.tensors_of(model, args, kwargs)
            if tensors is not None:  # all that the key is made of is as it was
                run = partial(graphed.run_on, model, tensors, args, kwargs)
                return self._run(latest, run, model, plainly, args, kwargs, key)
        key = self.key(model, args, kwargs)
        planned = self.cache.get(key)
        if planned is None:
            planned = self._plan_within(model, args, kwargs, key)
        else:
            self.cache.move_to_end(key)
        for watch in self.watches:
            watch.called(planned.decision, (args, kwargs))
        if planned.rewritten is not None:
            if isinstance(planned.rewritten, Graphed):
                self._latest = (planned, planned.rewritten, key)
            observer = self._observer() if self.watches else None
            run = partial(planned.rewritten.run, model, args, kwargs, observer)
            return self._run(planned, run, model, plainly, args, kwargs, key)
        if planned.directions is None:
            return plainly(*args, **kwargs)
        follower = Follower(planned.directions)
        if self.watches:
            follower.observer = self._observer()
        _ACTIVE.busy = True
        try:
            with warnings_name_the_user(), follower:
                result = plainly(*args, **kwargs)
        finally:
            _ACTIVE.busy = False
            follower.finish()
        self._look_back(follower, planned, key)
        return result

    def _stale(self, model: nn.Module) -> str:
        if not self._casts.stale(model):
            return ""
        return (
            "an autocast context that was open while weights were changed (it remembers casts of the old ones; put it "
            "around forward only)"
        )

    def _observer(self) -> Callable[[Any, bool], None]:
        watches = tuple(self.watches)

        def observe(group: Any, begins: bool) -> None:
            for watch in watches:
                watch.replaying(group, begins)

        return observe

    def _run(
        self,
        planned: Planned,
        run: Callable[[], Any],
        model: nn.Module,
        plainly: Any,
        args: Any,
        kwargs: Any,
        key: Key,
    ) -> Any:
        """One call by the rewritten forward; by the model's own where a guard fails, and then it is planned anew."""
        _ACTIVE.busy = True
        try:
            try:
                result = run()
            except (GuardError, CaptureError, UnsupportedModelError) as error:
                missed = error
            else:
                planned.misses = 0
                return result
            planned.misses += 1
            if planned.misses == 1:
                log.warning(
                    "a step of %s ran its own forward, which keeps everything: %s",
                    planned.decision.profile.model,
                    missed,
                )
            self._replan(planned, key, 2 if getattr(missed, "guard", None) is not None else 1)
            return plainly(*args, **kwargs)
        finally:
            _ACTIVE.busy = False

    def _plan_within(self, model: nn.Module, args: Any, kwargs: Any, key: Key) -> Planned:
        _ACTIVE.busy = True
        try:
            planned = self.plan(model, args, kwargs)
        except InfeasibleBudgetError:
            if key not in self._followed or key not in self.left:
                raise
            planned = self.left[key]  # the graph's budget is smaller than what following the forward can keep
            self.remember(key, planned)
        finally:
            _ACTIVE.busy = False
            if torch.is_autocast_enabled("cpu") or torch.is_autocast_enabled("cuda"):
                torch.clear_autocast_cache()  # it holds the stand-in's weights
                self._casts = Casts()
                self._casts.stale(model)  # from here on
        decision = planned.decision
        log.info(
            "planned %s for %s: %s within a budget of %s",
            decision.profile.model,
            key[0],
            format_bytes(decision.timeline.peak_bytes),
            format_bytes(decision.budget_bytes),
        )
        return planned

    def _look_back(self, follower: Follower, planned: Planned, key: Key) -> None:
        """A step that left the plan was right, but kept more: say so once, and plan again if it goes on."""
        assert planned.directions is not None
        if follower.diverged is None and follower.position == len(planned.directions.ops):
            planned.misses = 0
            return
        planned.misses += 1
        if planned.misses == 1:
            end = (follower.position, "another operation", "the end of forward")
            position, expected, found = follower.diverged or end
            log.warning(
                "a step of %s took another path than planned (operation %d: %s instead of %s); from there on, until "
                "it met the plan again, everything was kept, so it may have taken more memory than the budget",
                planned.decision.profile.model,
                position,
                found,
                expected,
            )
        self._replan(planned, key, 2)

    def _replan(self, planned: Planned, key: Key, after: int) -> None:
        """Have a kind of call planned again whose steps left the plan `after` times in a row."""
        if planned.misses >= after and self._replans.get(key, 0) < REPLANS:
            self._replans[key] = self._replans.get(key, 0) + 1
            if planned.rewritten is not None and self._replans[key] > 1 and key not in self._followed:
                self._followed.add(key)
                log.warning(
                    'what the forward of %s reads differs at each step; such calls are planned for mechanism "slice"',
                    planned.decision.profile.model,
                )
            self.left[key] = planned
            self.cache.pop(key, None)
            self._latest = None

    def _mechanism(self, profile: Profile, model: nn.Module, args: Any, kwargs: Any) -> Mechanism:
        if self.key(model, args, kwargs) in self._followed:
            return Slice()
        return super()._mechanism(profile, model, args, kwargs)

    def replans(self, key: Key) -> int:
        """How often calls of a kind have been given up to be planned again."""
        return self._replans.get(key, 0)

    def __getstate__(self) -> dict[str, Any]:
        own = ("progress", "watches", "_ranks", "_group", "_casts", "_latest")
        state = {k: v for k, v in self.__dict__.items() if k not in own}
        if isinstance(self.optimizer, torch.optim.Optimizer):  # belongs to the original's parameters
            state["optimizer"] = type(self.optimizer)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.progress, self.watches, self._ranks, self._group = (lambda stage: None), [], None, None
        self._casts, self._latest = Casts(), None

    def __deepcopy__(self, memo: dict[int, Any]) -> Runtime:
        made = Runtime.__new__(Runtime)
        own = {
            "cache": OrderedDict(self.cache),
            "_replans": dict(self._replans),
            "_followed": set(self._followed),
            "left": {},
        }
        made.__setstate__({**self.__getstate__(), **own})
        return made


def _within() -> str:
    """What a call is made in that no plan can be followed in; nothing as a rule.

    torch.func differentiates without the hooks by which values are dropped; a function mode need not be at work in
    backward, where its part in a call would have to be repeated.
    """
    if transforming():
        return "vmap or a transformation of torch.func"
    if not _hooks_allowed():
        return "torch.autograd.graph.disable_saved_tensors_hooks"
    foreign = foreign_modes() if modes_below() else []
    return f"a torch function mode of your own ({', '.join(foreign)})" if foreign else ""
