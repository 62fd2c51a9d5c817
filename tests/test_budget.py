"""Budgets: every way to write one, and every way to get it wrong."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvexp.budget import Budget
from kvexp.errors import UserError

_WRONG = [
    0,
    -5,
    "0",
    "-5",
    "0k",
    "0%",
    "0.01%",
    "abc",
    "",
    "1.5",
    1.5,
    1024.0,
    "4kb",
    "k",
    "%",
    "-20%",
    "1e3",
]
_ODD = [None, True, [512], {"rows": 4}, "٤", "4 k", "20 percent"]


@pytest.mark.parametrize(
    ("written", "rows"),
    [
        (4096, 4096),
        (1, 1),
        ("4096", 4096),
        ("4k", 4096),
        ("4K", 4096),
        ("1k", 1024),
        ("20%", 819),  # 4096 * 20 / 100 = 819.2
        ("12.5%", 512),
        ("0.1 %", 4),  # 4.096
        ("100%", 4096),
        ("150%", 6144),
        ("full", None),
        (" full ", None),
    ],
)
def test_parse_reads_every_form(written: object, rows: int | None) -> None:
    assert Budget.parse(written, 4096).rows == rows


@pytest.mark.parametrize("written", [*_WRONG, *_ODD])
def test_parse_refuses_the_rest_in_one_line(written: object) -> None:
    with pytest.raises(UserError) as caught:
        Budget.parse(written, 4096)
    message = str(caught.value)
    assert "\n" not in message and message.startswith("budget=") and "budget=1024" in message


def test_a_share_needs_a_context_of_known_length() -> None:
    with pytest.raises(UserError, match="no context of fixed length"):
        Budget.parse("20%", None)
    assert Budget.parse("2k", None).rows == 2048


@given(hundredths=st.integers(1, 20_000), tokens=st.integers(1, 2_000_000))
def test_a_share_is_the_exact_floor(hundredths: int, tokens: int) -> None:
    expected = hundredths * tokens // 10_000
    written = f"{hundredths // 100}.{hundredths % 100:02d}%"
    if expected == 0:
        with pytest.raises(UserError):
            Budget.parse(written, tokens)
    else:
        assert Budget.parse(written, tokens) == Budget(expected)


@given(rows=st.integers(1, 10**9))
def test_what_is_shown_is_read_back(rows: int) -> None:
    assert Budget.parse(str(Budget(rows))) == Budget(rows)
    assert str(Budget(None)) == "full" and Budget.parse("full") == Budget(None)


def test_limit_never_exceeds_the_context() -> None:
    assert Budget(100).limit(40) == 40
    assert Budget(100).limit(400) == 100
    assert Budget(None).limit(400) == 400


@pytest.mark.parametrize("rows", [0, -3, 1.5, "20%", True])
def test_a_budget_holds_a_number_of_rows(rows: object) -> None:
    with pytest.raises(UserError, match=r"budget=.*budget=1024"):
        Budget(rows)  # type: ignore[arg-type]


def test_a_budget_is_read_as_itself() -> None:
    assert Budget.parse(Budget(5)) == Budget(5)
