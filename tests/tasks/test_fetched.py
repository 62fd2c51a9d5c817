"""Records from a data folder, or from where they are published."""

from __future__ import annotations

import json

import pytest

from kvexp.errors import UserError
from kvexp.tasks import fetched
from kvexp.tasks.fetched import load_records

ROWS = [{"text": "one\u2028line"}, {"text": "two"}]  # no end of a line for JSON, but for `splitlines`


@pytest.fixture(autouse=True)
def cache(monkeypatch, tmp_path):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))


def test_a_folder_comes_first(folder, monkeypatch):
    data = folder("set", "test", ROWS)
    path, rows = load_records(data, "set/test.jsonl.gz", "file:///nowhere")
    assert rows == ROWS and str(path) == f"{data}/set/test.jsonl.gz"
    monkeypatch.setenv("KVEXP_DATA_DIR", data)
    assert load_records(None, "set/test.jsonl.gz", "file:///nowhere") == (path, rows)
    with pytest.raises(
        UserError, match=r"has no set/train\.jsonl\.gz: set data_dir=PATH to a folder that has"
    ):
        load_records(None, "set/train.jsonl.gz", "file:///nowhere")


@pytest.mark.parametrize(
    "text",
    [json.dumps(ROWS, indent=1), "\n".join(json.dumps(row, ensure_ascii=False) for row in ROWS) + "\n"],
)
def test_a_file_is_fetched_once(tmp_path, text):
    source = tmp_path / "published.json"
    source.write_text(text, encoding="utf-8")
    path, rows = load_records(None, "set/test.jsonl.gz", source.as_uri())
    assert rows == ROWS and path == tmp_path / "cache" / "data" / "set" / "published.json"
    source.unlink()
    assert load_records(None, "set/test.jsonl.gz", source.as_uri()) == (path, rows)
    path.write_text("[{", encoding="utf-8")
    with pytest.raises(
        UserError, match=r"published\.json cannot be read .*: remove it, so that it is fetched"
    ):
        load_records(None, "set/test.jsonl.gz", source.as_uri())


def test_a_file_of_the_hub(tmp_path, monkeypatch):
    asked = []

    def download(repo, file, repo_type):
        asked.append((repo, file, repo_type))
        (tmp_path / "hub.jsonl").write_text('{"a": 1}\n\n{"a": 2}\n', encoding="utf-8")
        return str(tmp_path / "hub.jsonl")

    monkeypatch.setattr("huggingface_hub.hf_hub_download", download)
    path, rows = load_records(None, "set/test.jsonl.gz", "hf://datasets/org/name/test/rows.jsonl")
    assert rows == [{"a": 1}, {"a": 2}] and path == tmp_path / "hub.jsonl"
    assert asked == [("org/name", "test/rows.jsonl", "dataset")]


@pytest.mark.parametrize("url", ["file:///nowhere/rows.json", "hf://datasets/org/name/rows.jsonl"])
def test_what_cannot_be_fetched_is_one_sentence(url, monkeypatch):
    monkeypatch.setattr(fetched, "_from_hub", lambda name: 1 / 0)
    with pytest.raises(UserError) as error:
        load_records(None, "set/test.jsonl.gz", url)
    assert str(error.value).startswith(f"{url} cannot be read (")
    assert str(error.value).endswith("): set data_dir=PATH to a folder that has set/test.jsonl.gz")
    assert "\n" not in str(error.value)
