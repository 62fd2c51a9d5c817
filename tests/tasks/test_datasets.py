"""Rows from a folder, and from a hub that a stand-in plays."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import pytest

from kvexp.errors import UserError
from kvexp.tasks.datasets import load_rows


class Names(SimpleNamespace):
    """A column of numbers that stand for names."""


class Table(list):
    """Rows with features, as the hub's library returns them."""

    def __init__(self, rows, **names):
        super().__init__(rows)
        columns = rows[0]
        self.features = {
            c: Names(names=names[c]) if c in names else SimpleNamespace(dtype="string") for c in columns
        }


@pytest.fixture
def hub(monkeypatch):
    """Replace the hub's library; hub(function) is its load_dataset from then on and returns the calls."""

    def install(answer):
        calls = []

        def load_dataset(*args, **kwargs):
            calls.append((args, kwargs))
            return answer(*args, **kwargs)

        monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
        monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)
        return calls

    return install


def test_a_folder_gives_its_rows_in_order(folder):
    rows = [{"text": "é", "label": "b"}, {"text": "x", "label": "a"}]
    data = folder("banking77", "train", rows)
    assert load_rows("banking77", "train", data) == rows


def test_the_environment_names_the_folder(folder, monkeypatch):
    data = folder("trec", "test", [{"text": "x", "label": "a"}])
    monkeypatch.setenv("KVEXP_DATA_DIR", data)
    assert load_rows("trec", "test") == [{"text": "x", "label": "a"}]


def test_a_missing_file_is_one_sentence(tmp_path):
    with pytest.raises(UserError) as caught:
        load_rows("banking77", "train", str(tmp_path))
    assert str(caught.value) == (
        f"data_dir={tmp_path} has no banking77/train.jsonl.gz: set data_dir=PATH to a folder that has it"
    )


@pytest.mark.parametrize("content", [b"not gzip", b"\x1f\x8b\x08\x00\x00"])
def test_a_damaged_file_is_one_sentence(tmp_path, content):
    (tmp_path / "trec").mkdir()
    (tmp_path / "trec" / "test.jsonl.gz").write_bytes(content)
    with pytest.raises(UserError, match=r"test\.jsonl\.gz cannot be read .*: fetch it again$"):
        load_rows("trec", "test", str(tmp_path))


def test_the_hub_gives_names_for_numbers(hub):
    calls = hub(
        lambda *_, **__: Table(
            [{"text": "x", "label": 1}, {"text": "y", "label": 0}], label=["card_a", "card_b"]
        )
    )
    assert load_rows("banking77", "test") == [
        {"text": "x", "label": "card_b"},
        {"text": "y", "label": "card_a"},
    ]
    assert calls == [(("PolyAI/banking77", None), {"split": "test"})]


def test_requests_out_of_scope_are_left_out(hub):
    calls = hub(
        lambda *_, **__: Table(
            [{"text": "x", "intent": 0}, {"text": "y", "intent": 1}], intent=["oos", "pto"]
        )
    )
    assert load_rows("clinc150", "train") == [{"text": "y", "label": "pto"}]
    assert calls == [(("clinc/clinc_oos", "plus"), {"split": "train"})]


def test_a_published_script_is_read_from_its_conversion(hub):
    def answer(*_, revision=None, **__):
        if revision != "refs/convert/parquet":
            raise RuntimeError("Dataset scripts are no longer supported, but found trec.py")
        row = {"text": "How far ?", "coarse_label": 1, "fine_label": 0}
        return Table([row], coarse_label=["HUM", "NUM"], fine_label=["NUM:dist"])

    hub(answer)
    assert load_rows("trec", "test") == [
        {"text": "How far ?", "coarse": "NUM", "fine": "NUM:dist", "label": "NUM:dist"}
    ]


def test_a_hub_out_of_reach_is_one_sentence(hub):
    def answer(*_, **__):
        raise ConnectionError("no route to host\nand more")

    hub(answer)
    with pytest.raises(UserError) as caught:
        load_rows("banking77", "train")
    assert str(caught.value) == (
        "PolyAI/banking77 cannot be read from the hub (no route to host): "
        "set data_dir=PATH to a folder that has banking77/train.jsonl.gz"
    )


@pytest.mark.parametrize("row", [{"text": "x", "fine": "a:b"}, {"text": "x", "coarse": 3}, ["x"]])
def test_a_row_without_its_field_names_file_and_key(folder, row):
    data = folder("trec", "train", [{"text": "x", "coarse": "a"}, row])
    with pytest.raises(UserError, match=r"trec/train\.jsonl\.gz has no text '(coarse|text)' in row 2: fetch"):
        load_rows("trec", "train", data, ("text", "coarse"))
