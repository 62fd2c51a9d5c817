"""What is shown of one cell: its first samples, in little room, and where the rest lies."""

from __future__ import annotations

import json
import os
from urllib.parse import unquote_to_bytes, urljoin, urlsplit

import pytest

from kvexp.report.details import ROOM, detail, memory_of, shortened
from kvexp.report.items import Items


def test_twenty_samples_and_links_to_the_rest(tmp_path, make_record, make_samples, store):
    record = store(tmp_path / "runs/a", make_record(), make_samples([1, 0] * 15))
    found = detail(record, Items(), tmp_path / "report/index.html")
    assert (len(found["samples"]), found["total"]) == (20, 30)
    assert found["samples"][1] == {"id": "1", "query": "q1", "answer": "blue", "expected": "red"}
    assert found["files"] == {
        "record.json": "../runs/a/record.json",
        "samples.jsonl": "../runs/a/samples.jsonl",
    }


@pytest.mark.parametrize("name", ["a#1", "b?x=1", "100%41", "javascript:alert(1)", 'd é&"<', b"\xff"])
def test_an_address_leads_to_its_file(name, tmp_path, make_record, make_samples, store):
    record = store(tmp_path / os.fsdecode(name) / "x#y", make_record(), make_samples([1]))
    page = tmp_path / "index.html"
    for file, address in detail(record, Items(), page)["files"].items():
        found = urlsplit(urljoin(page.as_uri(), address))
        assert (found.scheme, found.query, found.fragment) == ("file", "", "")
        assert unquote_to_bytes(found.path) == os.fsencode(record["folder"]) + b"/" + file.encode()


def test_long_texts_keep_head_and_tail_and_fit():
    samples = [
        {"id": str(i), "query": f"start{'x' * 5000}end", "answer": "y" * 3000, "expected": ["a", "b"]}
        for i in range(20)
    ]
    found = shortened(samples)
    assert len(json.dumps(found)) <= ROOM
    assert found[0]["query"].startswith("start") and found[0]["query"].endswith("end")
    assert "characters" in found[0]["query"] and found[0]["expected"] == "a | b"
    assert shortened(
        [{"id": "1", "answer": "short", "scores": {"f1": 0.5}, "blocks": {"kl": [1.0] * 99}}]
    ) == [{"id": "1", "answer": "short", "scores": {"f1": 0.5}}]


def test_what_the_calibration_says_of_itself(tmp_path, make_record, store):
    record = store(tmp_path / "a", make_record(), [])
    assert memory_of(record) == {}
    pointer = {"built": True, "manifest": {"trace_tokens": 9, "curve": list(range(900))}}
    (tmp_path / "a/memory.json").write_text(json.dumps(pointer))
    assert memory_of(record) == {"built": True, "trace_tokens": 9}
    (tmp_path / "a/memory.json").write_text("[]")
    assert memory_of(record) == {}
