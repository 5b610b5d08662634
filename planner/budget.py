"""Budgets as people write them, and sizes as people read them.

Sizes with a decimal prefix are powers of ten (1 GB = 10^9 bytes), those with a binary prefix powers of two
(1 GiB = 2^30 bytes). Free of torch.
"""

from __future__ import annotations

import operator
import re
from decimal import Decimal
from typing import TypeAlias

import msgspec

from .errors import BudgetError

UNITS = {
    "B": 1,
    "KB": 10**3,
    "MB": 10**6,
    "GB": 10**9,
    "TB": 10**12,
    "KIB": 2**10,
    "MIB": 2**20,
    "GIB": 2**30,
    "TIB": 2**40,
}

ACCEPTED = (
    'a size ("8GB" = 8 * 10^9 bytes, "8GiB" = 8 * 2^30 bytes; B, KB, KiB, MB, MiB, GB, GiB, TB, TiB), '
    'a whole number of bytes (8000000000), a share of the plain step\'s peak ("60%"), '
    "or None for the device's free memory less a reserve"
)

_NUMBER = re.compile(r"([0-9]{1,24}(?:\.[0-9]{0,24})?|\.[0-9]{1,24})\s*([a-zA-Z]*|%)", re.ASCII)


class Bytes(msgspec.Struct, frozen=True):
    """A budget in bytes of peak."""

    bytes: int


class Share(msgspec.Struct, frozen=True):
    """A budget as a share of the plain step's peak; 0.6 for "60%"."""

    share: float

    def of(self, peak_bytes: int) -> int:
        """The budget in bytes where the plain step's peak is `peak_bytes`; rounded down."""
        # Decimal, so that 60 % of 10^9 is not a byte short of 6 * 10^8.
        return int(Decimal(str(self.share)) * peak_bytes)


class Free(msgspec.Struct, frozen=True):
    """A budget of what the device has free, less a reserve."""


Budget: TypeAlias = Bytes | Share | Free


def parse_budget(value: str | int | None) -> Budget:
    """What a budget means.

    Args:
        value: a size such as "8GB" or "7.5 GiB" (prefix and unit in any case), bytes as an integer or a string of
            digits, a share such as "60%", or None.

    Returns:
        `Bytes`, `Share` or `Free`. A size that is no whole number of bytes is rounded down.

    Raises:
        BudgetError: `value` is none of these, or is not above zero, or a share is above 100 %; the message shows what
            is accepted.
    """
    if value is None:
        return Free()
    if isinstance(value, str):
        return _parse_text(value)
    try:
        size = operator.index(value)  # numpy's integers too
    except TypeError:
        raise _error(value) from None
    if isinstance(value, bool):
        raise _error(value)
    if size <= 0:
        raise _error(value, "it is not above zero")
    return Bytes(size)


def _parse_text(value: str) -> Budget:
    match = _NUMBER.fullmatch(value.strip())
    if match is None:
        raise _error(value)
    number, unit = Decimal(match[1]), match[2].upper()
    if unit == "%":
        if not 0 < number <= 100:
            raise _error(value, "a share lies above 0% and at most at 100%")
        return Share(float(number / 100))
    if not unit and "." in match[1]:
        raise _error(value, "a number without a unit is in bytes, and has to be whole")
    if unit and unit not in UNITS:
        raise _error(value, f"the unit {match[2]!r} is unknown")
    size = int(number * UNITS[unit or "B"])
    if size <= 0:
        raise _error(value, "it is less than a byte")
    return Bytes(size)


def _error(value: object, why: str = "") -> BudgetError:
    return BudgetError(f"budget {value!r} is not understood{': ' + why if why else ''}. Accepted: {ACCEPTED}.")


def format_bytes(size: int) -> str:
    """A size to read: "1.50 GiB", "12.00 MiB", "3.20 KiB", "17 B"; negative sizes keep their sign."""
    for name, unit in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        # Rounded first, so that a byte less than a GiB reads 1.00 GiB and not 1024.00 MiB.
        if round(abs(size) / unit, 2) >= 1:
            return f"{size / unit:.2f} {name}"
    return f"{size} B"
