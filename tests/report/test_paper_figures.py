"""Figures on paper: the front by hand and against brute force, and the files of a group."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvexp.report.collect import Collected
from kvexp.report.groups import groups
from kvexp.report.items import Items
from kvexp.report.page_data import page_data
from kvexp.report.paper_figures import draw_figures, front

points = st.lists(st.tuples(st.integers(1, 6), st.integers(0, 6)), min_size=1, max_size=10)


def test_by_hand():
    assert front([(3, 0.9), (1, 0.5), (2, 0.4), (3, 0.8)], True) == [(1, 0.5), (3, 0.9)]
    assert front([(1, 0.5), (2, 0.4), (3, 0.4)], False) == [(1, 0.5), (2, 0.4)]


@given(points, st.booleans())
def test_the_front_is_what_no_other_beats_in_both(found, higher):
    sign = 1 if higher else -1

    def beaten(p):
        no_worse = [q for q in found if q[0] <= p[0] and sign * q[1] >= sign * p[1]]
        return any(q != p for q in no_worse)

    assert set(front(found, higher)) == {p for p in found if not beaten(p)}


def test_a_group_makes_its_figures(tmp_path, make_record, make_samples, store):
    pytest.importorskip("matplotlib")
    records = [
        store(tmp_path / f"{method}{budget}", make_record(method, budget), make_samples(right))
        for method, budget, right in (
            ("full", "full", [1, 1, 1, 0]),
            ("snapkv", 256, [1, 0, 0, 0]),
            ("snapkv", 512, [1, 1, 0, 0]),
        )
    ]
    data, _ = page_data(Collected(records), groups(records), Items(), [])
    drawn = draw_figures(data, tmp_path / "figures")
    names = [f"intents-tiny-{kind}" for kind in ("score", "memory", "latency", "differences")]
    assert [path.stem for path in drawn] == names
    for path in drawn:
        assert path.read_bytes().startswith(b"\x89PNG")
        assert path.with_suffix(".pdf").read_bytes().startswith(b"%PDF")
