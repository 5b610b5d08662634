"""Budgets as text: what is accepted means what it says, what is not is refused with what would be."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ckpt_planner.budget import UNITS, Bytes, Free, Share, format_bytes, parse_budget
from ckpt_planner.errors import BudgetError, CkptPlannerError


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        ("8GB", Bytes(8 * 10**9)),
        ("8GiB", Bytes(8 * 2**30)),
        ("8 gib", Bytes(8 * 2**30)),
        (" 512 KiB ", Bytes(512 * 2**10)),
        ("1.5MB", Bytes(1_500_000)),
        ("0.1GB", Bytes(10**8)),
        (".5TB", Bytes(5 * 10**11)),
        ("1TiB", Bytes(2**40)),
        ("7B", Bytes(7)),
        ("123456789", Bytes(123456789)),
        (123456789, Bytes(123456789)),
        (np.int64(17), Bytes(17)),
        ("60%", Share(0.6)),
        ("33.3 %", Share(0.333)),
        ("100%", Share(1.0)),
        (None, Free()),
    ],
)
def test_accepted(value: str | int | None, expected: object) -> None:
    assert parse_budget(value) == expected


@pytest.mark.parametrize(
    "value",
    [
        *("", "GB", "8 G", "8gigs", "-1GB", "-5", "0", "0GB", "0.1B", "1.5", "0%", "101%", "%", "nan", "inf", "1e9"),
        *("٣GB", "8GB 8GB", "1,5GB", "9" * 5000, 0, -3, True, 1.5, b"8GB", [8], object()),
    ],
)
def test_refused_with_what_is_accepted(value: object) -> None:
    with pytest.raises(BudgetError) as caught:
        parse_budget(value)  # type: ignore[arg-type]
    assert repr(value) in str(caught.value)
    for example in ('"8GB"', '"8GiB"', '"60%"', "None"):
        assert example in str(caught.value)
    assert isinstance(caught.value, ValueError)
    assert isinstance(caught.value, CkptPlannerError)


@given(number=st.integers(1, 10**6), unit=st.sampled_from(sorted(UNITS)), space=st.sampled_from(["", " "]))
def test_every_unit_is_exact(number: int, unit: str, space: str) -> None:
    for text in (f"{number}{space}{unit}", f"{number}{space}{unit.lower()}"):
        assert parse_budget(text) == Bytes(number * UNITS[unit])


@given(size=st.integers(1, 2**60))
def test_bytes_are_themselves(size: int) -> None:
    assert parse_budget(size) == parse_budget(str(size)) == Bytes(size)


@given(percent=st.integers(1, 100), peak=st.integers(0, 2**50))
def test_share_is_rounded_down_from_the_exact_value(percent: int, peak: int) -> None:
    budget = parse_budget(f"{percent}%")
    assert isinstance(budget, Share)
    assert budget.of(peak) == percent * peak // 100


@given(text=st.text(max_size=12))
def test_any_text_is_a_budget_or_a_budget_error(text: str) -> None:
    try:
        budget = parse_budget(text)
    except BudgetError:
        return
    assert isinstance(budget, (Bytes, Share))


@pytest.mark.parametrize(
    ("size", "text"),
    [
        (0, "0 B"),
        (1000, "1000 B"),
        (2**10, "1.00 KiB"),
        (12 * 2**20, "12.00 MiB"),
        (3 * 2**29, "1.50 GiB"),
        (2**30 - 1, "1.00 GiB"),
        (-(2**20), "-1.00 MiB"),
    ],
)
def test_format(size: int, text: str) -> None:
    assert format_bytes(size) == text


@given(size=st.integers(0, 2**45))
def test_what_is_printed_reads_back_near_what_it_was(size: int) -> None:
    text = format_bytes(size)
    if size:
        back = parse_budget(text)
        assert isinstance(back, Bytes)
        assert abs(back.bytes - size) <= 0.006 * 2 ** (30 if "GiB" in text else 20 if "MiB" in text else 10)
