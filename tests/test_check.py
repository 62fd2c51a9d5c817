"""Values against annotations: what fits, what is converted, what is refused and how it is said."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import pytest

from kvexp import check
from kvexp.errors import UserError


@dataclass(frozen=True)
class _Knobs:
    kind: ClassVar[str] = "not a knob"
    rate: float
    layout: Literal["auto", "pooled", 4] = "auto"
    cells: int | None = None
    probes: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("given", "annotation", "expected"),
    [
        (3, int, 3),
        (3, float, 3.0),
        (2.5, float, 2.5),
        (True, bool, True),
        ("x", str, "x"),
        (12345678, str, "12345678"),  # a revision of digits alone
        (None, int | None, None),
        (4, int | None, 4),
        ("20%", int | str, "20%"),
        ("pooled", Literal["auto", "pooled"], "pooled"),
        ("b", Literal["a"] | Literal["b"] | None, "b"),
        ([1, 2], tuple[int, ...], (1, 2)),
        ([1, "a"], tuple[int, str], (1, "a")),
        ([1, 2], list[float], [1.0, 2.0]),
        ({"a": 1}, dict[str, Any], {"a": 1}),
        ({"a": [1]}, Any, {"a": [1]}),
    ],
)
def test_values_that_fit(given: object, annotation: object, expected: object) -> None:
    found = check.value(given, annotation, "knob")
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("given", "annotation"),
    [
        (True, int),
        (1.0, int),
        ("3", int),
        (None, int),
        (True, float),
        ("2.5", float),
        (float("inf"), float),
        (float("nan"), float | None),
        ([0.5, float("-inf")], tuple[float, ...]),
        (1, bool),
        ("true", bool),
        (2.5, str),
        (True, str),
        (None, str),
        ("pool", Literal["auto", "pooled"]),
        (1, Literal[True]),
        (2.5, int | None),
        ("ab", tuple[str, ...]),
        ([1, "a"], tuple[int, ...]),
        ([1], tuple[int, int]),
        ([1], dict[str, Any]),
    ],
)
def test_values_that_do_not(given: object, annotation: object) -> None:
    with pytest.raises(UserError, match=r"^knob=.* is not possible.* knob is ") as caught:
        check.value(given, annotation, "knob")
    assert "\n" not in str(caught.value)


def test_fields_fill_a_dataclass_and_leave_defaults_out() -> None:
    values = check.fields(_Knobs, {"rate": 1, "probes": [3]}, "method", "method x")
    assert values == {"rate": 1.0, "probes": (3,)}
    assert _Knobs(**values).layout == "auto"


@pytest.mark.parametrize(
    ("values", "sentence"),
    [
        (
            {"rate": 1, "layuot": "auto"},
            "there is no 'method.layuot', did you mean 'layout'? Method x has cells, layout, probes, rate",
        ),
        ({"rate": 1, "kind": "y"}, "there is no 'method.kind'. Method x has cells, layout, probes, rate"),
        ({}, "method x needs method.rate=...: a finite number"),
        (
            {"rate": 1, "layout": "pool"},
            "method.layout=pool is not possible, did you mean 'pooled'?"
            " method.layout is one of auto, pooled, 4",
        ),
        ({"rate": None}, "method.rate=null is not possible: method.rate is a finite number"),
        (
            {"rate": 1, "cells": [1, None]},
            "method.cells=[1,null] is not possible: method.cells is a whole number or null",
        ),
    ],
)
def test_sentences(values: dict[str, object], sentence: str) -> None:
    with pytest.raises(UserError) as caught:
        check.fields(_Knobs, values, "method", "method x")
    assert str(caught.value) == sentence


def test_an_annotation_that_no_knob_may_have_is_a_mistake_of_the_programmer() -> None:
    with pytest.raises(TypeError, match=r"see kvexp\.check"):
        check.value(1, set[int], "knob")
