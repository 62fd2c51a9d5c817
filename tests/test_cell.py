"""The cell hash: stable, independent of order, and sensitive to every value."""

from __future__ import annotations

import dataclasses
import hashlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvexp.cell import canonical, cell_hash, knobs
from kvexp.cli import settings_of

_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=10,
)


@dataclasses.dataclass(frozen=True)
class _Method:
    layout: str = "auto"
    probes: tuple[int, ...] = (16, 8)


def test_canonical_text_by_hand() -> None:
    assert canonical({"b": [1, 2.5, None], "a": {"é": True}}) == '{"a":{"\\u00e9":true},"b":[1,2.5,null]}'


def test_hash_is_the_head_of_sha256_over_canonical_text() -> None:
    assert cell_hash({"seed": 0}) == hashlib.sha256(b'{"seed":0}').hexdigest()[:10]


@given(st.dictionaries(st.text(max_size=5), _values, max_size=5))
def test_order_of_keys_does_not_matter(identity: dict[str, object]) -> None:
    assert cell_hash(identity) == cell_hash(dict(reversed(identity.items())))


def test_values_that_look_alike_are_different_cells() -> None:
    cells = {cell_hash({"limit": value}) for value in (None, 0, False, "0", "null", 0.5, [], [0])}
    assert len(cells) == 8


def test_knobs_of_a_dataclass_are_plain_data() -> None:
    assert knobs(_Method()) == {"layout": "auto", "probes": [16, 8]}
    assert cell_hash({"method": _Method()}) == cell_hash({"method": {"layout": "auto", "probes": [16, 8]}})
    assert cell_hash({"method": _Method("pooled")}) != cell_hash({"method": _Method()})


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_without_a_json_form_are_refused(value: float) -> None:
    with pytest.raises(ValueError, match="JSON"):
        cell_hash({"x": value})


@pytest.mark.parametrize("value", [object(), {1: 2}, {1, 2}, b"x"])
def test_what_is_not_plain_data_is_refused(value: object) -> None:
    with pytest.raises(TypeError):
        cell_hash({"x": value})


def test_only_a_dataclass_instance_has_knobs() -> None:
    with pytest.raises(TypeError, match="no knobs"):
        knobs(_Method)


def test_compiled_steps_are_another_cell() -> None:
    words = ["model=tiny-llama", "logger=none"]
    cells = [settings_of([*words, f"model.compiled={value}"])[0].cell for value in ("false", "true")]
    assert settings_of(words)[0].cell == cells[0] != cells[1]
