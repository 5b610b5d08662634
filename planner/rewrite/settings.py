"""What calls depend on that is set between them, while a forward is recorded."""

from __future__ import annotations

import torch

from ..replay.ambient import AutocastState, autocast_state, choices, generator_states
from .graphcode import autocast_depth


class Settings:
    """Noticed before and after each call; enter it around forward.

    Attributes:
        draws: whether a call drew from a generator.
    """

    def __init__(self) -> None:
        self._cast, self._cached = autocast_state(), torch.is_autocast_cache_enabled()
        self._depth = autocast_depth()
        self._cleared = False  # autocast has let its casts go since the last call
        self._choices, self._states = choices(), generator_states()
        self.draws = False

    def __enter__(self) -> Settings:
        self._clear = torch.clear_autocast_cache
        torch.clear_autocast_cache = self._let_casts_go  # which autocast calls at its outermost end
        return self

    def __exit__(self, *error: object) -> None:
        torch.clear_autocast_cache = self._clear

    def _let_casts_go(self) -> None:
        self._cleared = True
        self._clear()

    def autocast(self) -> tuple[AutocastState, bool, bool] | None:
        """What autocast is, whether it remembers casts, and whether it has let some go; None if all is as before."""
        cast, cached, depth = autocast_state(), torch.is_autocast_cache_enabled(), autocast_depth()
        clear = self._cleared or (depth == 0 and self._depth > 0)
        same = (cast, cached) == (self._cast, self._cached) and not clear
        self._cast, self._cached, self._depth, self._cleared = cast, cached, depth, False
        return None if same else (cast, cached, clear)

    def limits(self) -> list[str]:
        """What was set since the last call, and no node repeats."""
        found = []
        if choices() != self._choices:
            found.append("the default type of numbers, or the kernels of attention, are set within forward")
        if not all(map(torch.equal, self._states, generator_states())):
            found.append("a random generator is seeded, or its state set, within forward")
        return found

    def called(self) -> None:
        """A call has been made."""
        states = generator_states()
        self.draws |= not all(map(torch.equal, self._states, states))
        self._states = states
