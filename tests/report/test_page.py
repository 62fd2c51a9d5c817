"""The page: one file, nothing from the network, no markup from a sample, little room, its own JavaScript."""

from __future__ import annotations

import json
import re

import pytest

from kvexp.errors import UserError
from kvexp.report import page
from kvexp.report.collect import Collected
from kvexp.report.details import detail
from kvexp.report.groups import groups
from kvexp.report.items import Items
from kvexp.report.page_data import page_data

EVIL = "</script><script>window.pwned = 1</script><img src=x onerror='window.pwned = 1'><!-- \u2028"


def page_of(records, tmp_path):
    items = Items()
    data, ordered = page_data(Collected(records), groups(records), items, ["outputs"])
    return page.render(data, [detail(record, items, tmp_path / "index.html") for record in ordered], "lib")


def blocks(text):
    found = re.findall(r'<script type="application/json" id="([^"]+)">(.*?)</script>', text, re.DOTALL)
    return {name: json.loads(body) for name, body in found}


def test_what_a_run_wrote_comes_back_and_adds_no_markup(tmp_path, make_record, make_samples, store):
    rows = make_samples([1, 0])
    rows[0] |= {"query": EVIL, "answer": EVIL, "expected": [EVIL, "%data%"]}
    record = store(tmp_path / "a", make_record(), rows)
    failed = store(tmp_path / "b", make_record("tova", error=EVIL.replace("\u2028", "")), [])
    text = page_of([record, failed], tmp_path)
    assert "<img" not in text and "<!--" not in text and text.count("<script") == 1 + 2 + 2
    found = blocks(text)
    assert sorted(found) == ["data", "detail-0", "detail-1"]
    assert found["detail-0"]["samples"][0]["query"] == EVIL
    assert found["detail-0"]["samples"][0]["expected"] == f"{EVIL} | %data%"
    assert found["data"]["cells"][1]["error"].startswith("</script>")


def test_the_page_asks_for_nothing(tmp_path, make_record):
    record = {**make_record(), "folder": str(tmp_path)}
    text = page_of([record], tmp_path)
    assert "default-src 'none'" in text
    assert not re.search(r"""(src|href)=["']?(https?:)?//""", text)
    addresses = set(re.findall(r"https?://[^\s\"'`]+", text))
    assert addresses <= {"https://vega.github.io/schema/vega-lite/v6.json", "http://www.w3.org/2000/svg"}


def test_a_hundred_cells_hold_less_than_three_megabytes(tmp_path, make_record, make_samples, store):
    rows = make_samples([1, 0] * 20)
    for row in rows:
        row |= {"query": "word " * 400, "answer": "token " * 300}
    records = [
        store(tmp_path / f"{method}{seed}", make_record(method, 512, seed), rows)
        for method in ("snapkv", "tova")
        for seed in range(50)
    ]
    assert len(page_of(records, tmp_path).encode()) < 3_000_000


def test_every_method_has_one_colour_and_full_is_ink(tmp_path, make_record):
    methods = ("full", "snapkv", "tova")
    records = [{**make_record(method), "folder": str(tmp_path / method)} for method in methods]
    data, _ = page_data(Collected(records), groups(records), Items(), [])
    colours = data["palette"]
    assert len({tuple(colours[name]) for name in ("full", "snapkv", "tova")}) == 3
    assert colours["full"] == ("#1b1f24", "#e7eaee")


def test_a_lone_surrogate_and_no_nan():
    assert page.embedded({"a": "\ud800<"}) == '{"a":"\\ud800\\u003c"}'
    with pytest.raises(ValueError, match="not JSON compliant"):
        page.embedded(float("nan"))


def test_a_missing_library_is_one_sentence(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "vl_convert", None)
    with pytest.raises(UserError, match=r"pip install 'kvexp\[report\]', or add --tables"):
        page.plot_library()
