"""Templates out of lm-eval's files, and words."""

from __future__ import annotations

import gzip
import importlib.util
import json
import os
from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.tasks import ruler_material
from kvexp.tasks.ruler_material import Form, load_templates, load_words

RULER = Path(importlib.util.find_spec("lm_eval").submodule_search_locations[0], "tasks", "ruler")
DATA = os.environ.get("KVEXP_DATA_DIR")


def source(file: str) -> str:
    return (RULER / file).read_text(encoding="utf-8")


def test_the_templates_are_those_of_lm_eval():
    found = load_templates()
    forms = {"vt": found.vt, "cwe": found.cwe, "fwe": found.fwe, "qa": found.qa, "niah": found.niah}
    for name, form in forms.items():
        assert f'"""{form.body}{form.question}"""'.replace("\n", "\\n") in source(f"{name}_utils.py")
        assert form.body.count("{context}") == 1 and form.body.endswith("\n") and "\n" not in form.question
    for name in ("vt", "cwe", "fwe", "qa"):
        assert f"{forms[name].prefix}" in source(f"{name}_utils.py") and forms[name].prefix.startswith(
            "Answer:"
        )
    assert found.niah.prefix == (
        "The special magic {type_needle_v} for {query} mentioned in the provided text are"
    )
    assert found.noise.startswith("The grass is green.") and found.noise.endswith("There and back again.")
    assert found.needle.format(type_needle_v="numbers", key="k", value=7).endswith("numbers for k is: 7.")
    assert found.document.format(i=3, document="A text.") == "Document 3:\nA text."


def test_a_form_puts_texts_in_as_they_are():
    form = Form("Read.\n{context}\n", "What is {query}?", "{query} is")
    assert form.fill("{a} {query} {}", query="{b}") == ("Read.\n{a} {query} {}\n", "What is {b}? {b} is")


@pytest.mark.parametrize(
    ("file", "change"),
    [
        ("niah_utils.py", ("What are all the", "Which are the")),
        ("prepare_niah.py", ("haystack =", "straw =")),
        ("vt_utils.py", ("CONFIG =", "SETTINGS =")),
        ("cwe_utils.py", ('"template"', '"text"')),
    ],
)
def test_an_lm_eval_with_other_templates_is_told(monkeypatch, tmp_path, file, change):
    for path in RULER.glob("*.py"):
        text = path.read_text(encoding="utf-8")
        copy = tmp_path / "tasks" / "ruler" / path.name
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(text.replace(*change) if path.name == file else text, encoding="utf-8")

    class Spec:
        submodule_search_locations = (str(tmp_path),)

    monkeypatch.setattr("importlib.util.find_spec", lambda name: Spec)
    with pytest.raises(UserError, match="has no RULER templates as kvexp knows them"):
        load_templates.__wrapped__()


def test_no_lm_eval(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=r"it is not installed\): install lm-eval"):
        load_templates.__wrapped__()


def test_generated_words_can_be_told_apart(tmp_path):
    words = load_words(str(tmp_path))
    assert words.origin == "generated" and words == ruler_material._generated.__wrapped__()
    assert len(words.all) == 9000 and {len(word) for word in words.all} == {5}
    assert [len(kind) for kind in (words.adjectives, words.nouns, words.verbs)] == [1000, 7000, 1000]
    assert all(word[1] in "aeiou" and word[3] in "aeiou" for word in words.all)


def test_words_of_the_data_folder(tmp_path):
    (tmp_path / "ruler").mkdir()
    path = tmp_path / "ruler" / "words.json.gz"
    path.write_bytes(
        gzip.compress(json.dumps({"adjective": ["red", "a"], "noun": ["a"], "verb": []}).encode())
    )
    words = load_words(str(tmp_path))
    assert (words.adjectives, words.nouns, words.verbs) == (("red", "a"), ("a",), ())
    assert words.all == ["a", "red"] and words.origin == "wonderwords"
    path.write_bytes(gzip.compress(b'{"noun": []}'))
    with pytest.raises(UserError, match="has no lists adjective, noun and verb"):
        load_words(str(tmp_path))


@pytest.mark.skipif(DATA is None, reason="KVEXP_DATA_DIR is unset")
def test_the_published_words():
    words = load_words(DATA)
    assert [len(kind) for kind in (words.adjectives, words.nouns, words.verbs)] == [912, 6782, 1042]
