"""Every model family that budgets are tried on; see the modules that this one gathers."""

from __future__ import annotations

from benchmarks import families_more, families_text, families_vision
from benchmarks.family import FAMILIES, Family, build

__all__ = ["FAMILIES", "Family", "build", "families_more", "families_text", "families_vision"]
