"""Holm's correction by hand and against its definition, and what may be claimed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvexp.report.significance import LEVEL, holm, verdict

p_values = st.lists(st.floats(0, 1), max_size=8)


def rejected(ps, level):
    """Holm's procedure as he wrote it: from the smallest p on, stop at the first that is too large."""
    order = sorted(range(len(ps)), key=lambda i: ps[i])
    found = set()
    for rank, place in enumerate(order):
        if ps[place] > level / (len(ps) - rank):
            break
        found.add(place)
    return found


def test_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.5]) == [0.5]
    assert holm([0.6, 0.7]) == [1.0, 1.0]
    assert holm([]) == []


@given(p_values, st.floats(0.001, 0.2))
def test_adjusted_values_reject_what_the_procedure_rejects(ps, level):
    found = {place for place, p in enumerate(holm(ps)) if p <= level}
    near = any(abs(p * k - level) < 1e-9 for p in ps for k in range(1, len(ps) + 1))
    assert near or found == rejected(ps, level)


@given(p_values)
def test_adjusting_never_lowers_a_p_nor_changes_the_order(ps):
    adjusted = holm(ps)
    assert all(a >= min(1.0, p) for a, p in zip(adjusted, ps, strict=True))
    pairs = sorted(zip(ps, adjusted, strict=True))
    assert [a for _, a in pairs] == sorted(adjusted)


def test_a_claim_needs_the_test_and_the_interval():
    assert verdict(0.1, 0.02, 0.2, 0.01, True) == "better"
    assert verdict(0.1, 0.02, 0.2, 0.01, False) == "worse"
    assert verdict(-0.1, -0.2, -0.02, 0.01, True) == "worse"
    assert verdict(0.1, 0.02, 0.2, LEVEL, True) == "not shown"
    assert verdict(0.1, -0.01, 0.2, 0.001, True) == "not shown"
    assert verdict(0.0, 0.0, 0.0, 0.001, True) == "not shown"
