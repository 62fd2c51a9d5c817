"""The tables: what stands in them, and that text cannot break out of its place."""

from __future__ import annotations

import csv
import io

from kvexp.report import papers
from kvexp.report.collect import collect
from kvexp.report.groups import groups
from kvexp.report.items import Items
from kvexp.report.markdown import cells_csv, differences_csv, markdown, rows_csv, score, table
from kvexp.report.page_data import page_data
from kvexp.report.paper_numbers import PaperNumber


def data_of(tmp_path):
    found = collect([tmp_path])
    return page_data(found, groups(found.records), Items(), [str(tmp_path)])


def test_tables_of_two_methods_and_a_failure(tmp_path, make_record, make_samples, store):
    store(tmp_path / "f", make_record("full", "full", accuracy=0.75), make_samples([1, 1, 1, 0]))
    store(tmp_path / "s", make_record("snapkv", 512, accuracy=0.5), make_samples([1, 1, 0, 0]))
    store(tmp_path / "x", make_record("tova", 512, error="<b>|oops|"), [])
    data, records = data_of(tmp_path)
    text = markdown(data)
    assert "## intents · tiny" in text
    assert "| snapkv | 512 | 0.500 ± 0.100 | 1,024 | 3 | 2 | 20 |" in text
    assert "| snapkv | 512 | accuracy | 4 | -0.250" in text and "| 1.000 | not shown |" in text
    assert "&lt;b&gt;\\|oops\\|" in text and "<b>" not in text
    (difference,) = csv.DictReader(io.StringIO(differences_csv(data)))
    assert (difference["label"], difference["value"], difference["losses"]) == ("snapkv", "-0.25", "1")
    rows = {row["method"]: row for row in csv.DictReader(io.StringIO(rows_csv(data)))}
    assert (rows["full"]["value"], rows["snapkv"]["kv_tokens"]) == ("0.75", "1024.0")
    cells = {row["method"]: row for row in csv.DictReader(io.StringIO(cells_csv(records)))}
    assert cells["tova"]["status"] == "failed" and cells["snapkv"]["intents/accuracy"] == "0.5"


def test_a_cell_of_a_table_stays_in_its_place():
    text = table(["a", "b"], [["x|y\nz", "*[l](u)* `c`"]])
    assert text.splitlines()[2] == "| x\\|y z | \\*\\[l\\](u)\\* \\`c\\` |"


def test_a_score_has_its_errors_in_order():
    assert score({"value": 0.5, "se": 0.01, "se_seeds": 0.125}) == "0.500 ± 0.010 ± 0.125"
    assert score({"value": 0.5, "se": 0.01, "se_seeds": None}, "+.3f") == "+0.500 ± 0.010"
    assert score({"value": 0.5, "se": None, "se_seeds": None}) == "0.500"
    assert score(None) == "–"


def test_papers_stand_beside_ours(tmp_path, make_record, store, monkeypatch):
    number = {"paper": "tri", "table": "table1", "model": "qwen3-8b", "task": "intents", "method": "snapkv"}
    number |= {"metric": "accuracy", "setting": "8 answers", "source": "TriAttention"}
    found = (
        PaperNumber(**number, budget="1024", value=34.6, note="from the text"),
        PaperNumber(**number, budget="512", value=20.0),
    )
    monkeypatch.setattr(papers, "numbers", lambda: found)
    store(tmp_path / "s", make_record("snapkv", 1024, accuracy=0.25, stderr=0.0135), [])
    text = markdown(data_of(tmp_path)[0])
    row = "| tri, table1 | qwen3-8b | snapkv | 1024 | accuracy | 34.6 | 25.0 ± 1.4 | snapkv | 8 |"
    assert f"{row} 8 answers; from the text |" in text
    assert "1 more of this task have no row of ours." in text and "20.0" not in text
