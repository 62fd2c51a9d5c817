"""Tables that stand in a page: the README's of methods is that of the code, and nothing around it changes."""

from __future__ import annotations

from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_a_table_is_put_between_its_marks(script) -> None:
    place = script("marked").Marked("x.md", "a b", lambda: "| new |")
    text = "before\n<!-- a b -->\n| old |\n| older |\n<!-- end of a b -->\nafter <!-- c -->\n"
    assert place.placed(text) == "before\n<!-- a b -->\n| new |\n<!-- end of a b -->\nafter <!-- c -->\n"


def test_it_is_printed_or_written(script, capsys, tmp_path, monkeypatch) -> None:
    marked = script("marked")
    monkeypatch.setattr(marked, "__file__", str(tmp_path / "scripts/marked.py"))
    (tmp_path / "x.md").write_text("<!-- t -->\n<!-- end of t -->\n")
    place = marked.Marked("x.md", "t", lambda: "| é |")
    assert place.main([]) == 0 and capsys.readouterr().out == "| é |\n"
    assert place.main(["--write"]) == 0 and capsys.readouterr().out == ""
    assert (tmp_path / "x.md").read_text(encoding="utf-8") == "<!-- t -->\n| é |\n<!-- end of t -->\n"


def test_the_readme_has_the_table_of_the_code(script) -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    placed = script("method_table").PLACE.placed(text)
    assert placed == text, "run: python scripts/method_table.py --write"


def test_rows_say_when_and_what(script) -> None:
    rows = {line.split("|")[1].strip(): line for line in script("method_table").table().splitlines()}
    assert "prompt end, every 128 tokens" in rows["`rkv`"] and "latest 8" in rows["`rkv`"]
    assert "| never |" in rows["`keep_all`"]
