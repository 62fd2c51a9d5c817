"""The papers' numbers: read, checked, and with what does not agree within a paper said beside them."""

from __future__ import annotations

import pytest

from kvexp.report.paper_numbers import numbers, parsed

ENTRY = {
    "paper": "tri",
    "table": "table1",
    "model": "qwen3-8b",
    "task": "aime24",
    "method": "full",
    "budget": "full",
    "metric": "accuracy",
    "value": 57.1,
    "setting": "8 samples",
    "source": "TriAttention",
    "note": None,
}


def value(**wanted: str) -> float:
    [found] = [n for n in numbers() if all(getattr(n, key) == item for key, item in wanted.items())]
    return found.value


def test_some_numbers_as_printed() -> None:
    assert len(numbers()) > 250
    assert value(table="table1", model="qwen3-8b", task="aime24", method="triattention") == 42.1
    assert (
        value(table="table5", paper="asm", model="llama-3.2-3b-instruct", method="asm", budget="4096") == 77.5
    )
    assert value(table="ama", method="agentkvshift", metric="f1") == 0.263
    assert value(table="tablea", method="knorm") == 35.1
    assert value(table="fig5d", method="full", metric="stack_match [steps 20]") == 45


def test_what_does_not_agree_has_a_note() -> None:
    for wanted, told in (
        ({"table": "tablef", "value": 45.8}, "not 42.1"),
        ({"table": "locomo", "value": 0.178}, ".150"),
        ({"table": "table1", "value": 23.9}, "no multiple of 0.5"),
        ({"table": "table5", "value": 32.0}, "below ICL"),
        ({"table": "table1", "value": 57.1}, "without a chat template"),
    ):
        found = [n for n in numbers() if all(getattr(n, key) == item for key, item in wanted.items())]
        assert found and all(told in (n.note or "") for n in found), wanted


def test_no_number_stands_twice() -> None:
    keys = [(n.preset, n.model, n.task, n.method, n.budget, n.metric, n.setting) for n in numbers()]
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize(
    "change", [{"value": "57"}, {"paper": "other"}, {"budget": 512}, {"note": 3}, {"model": ""}, {"extra": 1}]
)
def test_an_entry_that_is_none_is_named(change: dict[str, object]) -> None:
    assert parsed([ENTRY])[0].preset == "tri/table1"
    with pytest.raises(ValueError, match=r"entry 2 of papers\.yaml"):
        parsed([ENTRY, {**ENTRY, **change}])
