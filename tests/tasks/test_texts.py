"""Texts by name: what each source holds, and what is said when it cannot be read."""

from __future__ import annotations

import gzip
import json
import os
import sys
import sysconfig
from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.tasks.texts import SOURCES, Text, data_file, load_texts, sentences, texts_sha256
from kvexp.tasks.texts_stdlib import prose_paragraphs

DATA = os.environ.get("KVEXP_DATA_DIR")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


def write(folder: Path, member: str, text: str) -> str:
    (folder / member).parent.mkdir(parents=True, exist_ok=True)
    (folder / member).write_bytes(gzip.compress(text.encode()))
    return str(folder)


def test_stdlib_holds_one_text_of_prose_for_each_module():
    before = set(sys.modules)
    texts = load_texts("stdlib")
    assert not (set(sys.modules) - before) & {text.name for text in texts}  # read, not imported
    names = [text.name for text in texts]
    assert names == sorted(set(names)) and set(names) <= sys.stdlib_module_names and len(names) > 100
    found = dict(zip(names, (text.text for text in texts), strict=True))
    assert "Wrap a single paragraph of text, returning a list of wrapped lines." in found["textwrap"]
    assert sum(len(text.text) for text in texts) > 300_000
    for text in texts:
        assert text.text.endswith("\n") and "  " not in text.text and ">>>" not in text.text
        paragraphs = text.text[:-1].split("\n\n")
        assert len(set(paragraphs)) == len(paragraphs)
        assert all(paragraph[0].isupper() and "\n" not in paragraph for paragraph in paragraphs)


def test_stdlib_code_holds_the_sources():
    found = {text.name: text.text for text in load_texts("stdlib_code")}
    folder = Path(sysconfig.get_paths()["stdlib"])
    assert found["textwrap"] == (folder / "textwrap.py").read_text(encoding="utf-8")
    assert {"argparse", "zipimport"} <= set(found) and not {"test", "idlelib", "json"} & set(found)


def test_prose_is_told_from_code_and_tables():
    doc = """Return the length of a path, in steps from its start.

It counts every step that the
path takes, the last one too.

    Indented text is an example, whatever words it may have in it.

>>> length(path) of an example that has many words in it

Too short to count.

lower case words start this paragraph of more than eight words.

The options are: --size=3, --name="x", {a: 1}, [2, 3], <tag/>.

A heading that does not end as a sentence would, and is long
"""
    assert list(prose_paragraphs(doc)) == [
        "Return the length of a path, in steps from its start.",
        "It counts every step that the path takes, the last one too.",
    ]


def test_sentences_join_to_the_text():
    text = 'He came.  "Why?" she asked (so he said.) Then e.g. this one!\nIt is 3.5 long. 4 more. end'
    assert sentences(text) == [
        "He came.  ",
        '"Why?" she asked (so he said.) ',
        "Then e.g. this one!\n",
        "It is 3.5 long. ",
        "4 more. end",
    ]
    assert sentences("") == [] and sentences("no end") == ["no end"]
    for source in load_texts("stdlib")[:40]:
        assert "".join(sentences(source.text)) == source.text


def test_rows_and_whole_files(tmp_path):
    rows = [
        {"file": "b.txt", "text": "Bee."},
        {"file": "a.txt", "text": "\u2028 A "},
        {"file": "c", "text": " "},
    ]
    lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
    folder = write(tmp_path, "ruler/essays.jsonl.gz", lines)
    assert load_texts("essays", folder) == [Text("b.txt", "Bee."), Text("a.txt", "\u2028 A ")]
    write(tmp_path, "calibration_tinyshakespeare/train.txt.gz", "First Citizen:\nSpeak.\n")
    expected = [Text("calibration_tinyshakespeare", "First Citizen:\nSpeak.\n")]
    assert load_texts("tinyshakespeare", folder) == expected


def test_wikitext_is_parted_at_the_first_level(tmp_path):
    text = " \n = Du Fu = \n \n A poet . \n \n = = Life = = \n \n Long . \n"
    text += " \n = X = \n \n Short \n = 1 k = \n . \n"
    folder = write(tmp_path, "calibration_wikitext2/test.txt.gz", text)
    assert load_texts("wikitext2", folder) == [
        Text("Du Fu", "A poet . \n \n = = Life = = \n \n Long .\n"),
        Text("X", "Short \n = 1 k = \n .\n"),
    ]


def test_dialogue_has_speakers_under_dates_in_the_order_of_sessions(tmp_path):
    said = [{"speaker": "Jo", "text": "Hi\nyou!", "dia_id": "D1:1"}, {"speaker": "Al", "text": "Hey."}]
    talk = {
        "speaker_a": "Jo",
        "session_10_date_time": "noon on 3 May",
        "session_10": said[1:],
        "session_2_date_time": "4 pm on 1 May",
        "session_2": said,
        "session_3_date_time": "5 pm on 2 May",
        "session_3": [],
    }
    folder = write(
        tmp_path, "locomo/test.jsonl.gz", json.dumps({"sample_id": "conv-1", "conversation": talk})
    )
    expected = "4 pm on 1 May\nJo: Hi you!\nAl: Hey.\n\nnoon on 3 May\nAl: Hey.\n"
    assert load_texts("dialogue", folder) == [Text("conv-1", expected)]


def test_files_and_folders_of_your_own(tmp_path):
    (tmp_path / "sub").mkdir()
    for name, text in {"b.txt": "Bee", "sub/a.md": "Ay", "c.py": "Sea", "empty.txt": "\n"}.items():
        (tmp_path / name).write_text(text, encoding="utf-8")
    assert load_texts(str(tmp_path / "b.txt")) == [Text("b.txt", "Bee")]
    assert load_texts(str(tmp_path)) == [Text("b.txt", "Bee"), Text("sub/a.md", "Ay")]


def test_the_data_folder_may_come_from_the_environment(tmp_path, monkeypatch):
    folder = write(tmp_path, "ruler/essays.jsonl.gz", json.dumps({"file": "a", "text": "b"}))
    assert data_file(None, "ruler/essays.jsonl.gz") is None
    monkeypatch.setenv("KVEXP_DATA_DIR", folder)
    assert data_file(None, "ruler/essays.jsonl.gz") == tmp_path / "ruler/essays.jsonl.gz"
    assert load_texts("essays") == [Text("a", "b")]
    assert data_file(str(tmp_path / "ruler"), "ruler/essays.jsonl.gz") is None


@pytest.mark.parametrize(
    ("source", "content", "message"),
    [
        ("esays", None, "no texts are called esays, did you mean 'essays'"),
        (
            "essays",
            None,
            r"essays cannot be read, since data_dir=.* has no ruler/essays\.jsonl\.gz",
        ),
        ("essays", '{"file": "a"}', "has a row without the text 'text': fetch it again"),
        ("essays", "[1]", "has a row that is no object"),
        ("essays", "{", "cannot be read"),
        ("essays", '{"file": "a", "text": " "}', "the source essays holds no text: name one of stdlib"),
    ],
)
def test_what_is_said_when_texts_cannot_be_read(tmp_path, source, content, message):
    if content is not None:
        write(tmp_path, "ruler/essays.jsonl.gz", content)
    with pytest.raises(UserError, match=message):
        load_texts(source, str(tmp_path))


def test_what_is_said_about_files(tmp_path):
    with pytest.raises(UserError, match=r"has no \.txt or \.md file"):
        load_texts(str(tmp_path))
    with pytest.raises(UserError, match=r"no data_dir is set to find locomo/test\.jsonl\.gz in: set"):
        load_texts("dialogue")
    (tmp_path / "latin.txt").write_bytes(b"caf\xe9")
    with pytest.raises(UserError, match="cannot be read as text"):
        load_texts(str(tmp_path / "latin.txt"))
    (tmp_path / "ruler").mkdir()
    (tmp_path / "ruler/essays.jsonl.gz").write_bytes(gzip.compress(b"{}" * 1000)[:30])
    with pytest.raises(UserError, match="cannot be read"):
        load_texts("essays", str(tmp_path))


def test_the_hash_tells_texts_names_and_order_apart():
    a, b = Text("a", "x"), Text("b", "y")
    lists = [[a, b], [b, a], [a], [Text("a", "y"), b], [Text("ax", ""), b]]
    assert len({texts_sha256(texts) for texts in lists}) == 5
    assert texts_sha256([a, b]) == texts_sha256([Text("a", "x"), Text("b", "y")])


@pytest.mark.skipif(DATA is None, reason="KVEXP_DATA_DIR is unset")
@pytest.mark.parametrize(
    ("source", "n"), [("essays", 49), ("wikitext2", 60), ("tinyshakespeare", 1), ("code", 29), ("html", 14)]
)
def test_the_published_files(source, n):
    texts = load_texts(source, DATA)
    assert source in SOURCES and len(texts) == n
