"""Which choices name a run among others."""

from __future__ import annotations

from kvexp.report.choices import differing, short_names

AMEM = {"task.notes.name": "amem", "task.notes.links": 3, "task.k": 10, "of.name": "x"}
OTHER = {"task.notes.name": "licomemory", "task.notes.tokens": 128, "task.k": 10, "of.name": "x"}
KEYS = ("task.k", "task.notes.name", "task.notes.links", "task.notes.tokens", "of.name")


def test_knobs_follow_from_the_name_of_their_part():
    assert differing(KEYS, [AMEM, OTHER]) == ["task.notes.name"]
    assert short_names(["task.notes.name"]) == {"task.notes.name": "notes"}


def test_a_knob_that_differs_under_one_name_is_told():
    more = {**AMEM, "task.notes.links": 0}
    assert differing(KEYS, [AMEM, more, OTHER]) == ["task.notes.name", "task.notes.links"]
    assert differing(KEYS, [AMEM, more]) == ["task.notes.links"]
    assert differing(KEYS, [AMEM, {**AMEM, "task.k": 5}]) == ["task.k"]


def test_names_that_agree_stay_whole():
    keys = ["method.of.window", "task.window", "method.of.name"]
    assert short_names(keys) == {
        "method.of.window": "method.of.window",
        "task.window": "task.window",
        "method.of.name": "of",
    }
