"""What RULER's prompts are made of: the published templates, and lists of words.

The templates are read out of the source files of lm-eval, whose modules cannot be imported without further
packages and a download.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from kvexp.errors import UserError
from kvexp.tasks.texts import data_file, read_gzip

WORDS = "ruler/words.json.gz"


@dataclass(frozen=True)
class Form:
    """A template: the text around the `{context}`, and the question with the start of its answer."""

    body: str
    question: str
    prefix: str

    def fill(self, context: str, **fields: Any) -> tuple[str, str]:
        """Return the text before the question, and question and answer prefix."""
        body = self.body.format(context=context, **fields)
        return body, f"{self.question} {self.prefix}".format(**fields)


@dataclass(frozen=True)
class Templates:
    """The forms of each family, the sentence of a needle, the line of noise, and the frame of a document."""

    niah: Form
    vt: Form
    cwe: Form
    fwe: Form
    qa: Form
    needle: str
    noise: str
    document: str


@dataclass(frozen=True)
class Words:
    """Words by their kind; `origin` says where they are from."""

    adjectives: tuple[str, ...]
    nouns: tuple[str, ...]
    verbs: tuple[str, ...]
    origin: str

    @property
    def all(self) -> list[str]:
        """Every word once, sorted."""
        return sorted({*self.adjectives, *self.nouns, *self.verbs})


@cache
def load_templates() -> Templates:
    """Return the templates of lm-eval's RULER; raises UserError where they are not to be found."""
    try:
        needles, niah = _constants("prepare_niah.py"), _constants("niah_utils.py")
        tracking = _constants("vt_utils.py")["CONFIG"]["variable_tracking"]
        documents = _constants("qa_utils.py")
        return Templates(
            niah=_niah_form(niah["TEMPLATE"]),
            vt=_form(tracking),
            cwe=_form(_constants("cwe_utils.py")["CONFIG"]),
            fwe=_form(_constants("fwe_utils.py")["CONFIG"]),
            qa=_form(documents["CONFIG"]),
            needle=needles["NEEDLE"],
            noise=needles["haystack"],
            document=documents["DOCUMENT_PROMPT"],
        )
    except (OSError, SyntaxError, LookupError, TypeError) as error:
        raise UserError(
            f"the installed lm-eval has no RULER templates as kvexp knows them ({error}): "
            "install lm-eval 0.4.13"
        ) from error


def load_words(data_dir: str | None) -> Words:
    """Return the published word lists of the data folder, or generated words where it has none."""
    path = data_file(data_dir, WORDS)
    if path is None:
        return _generated()
    try:
        lists = json.loads(read_gzip(path))
        adjectives, nouns, verbs = (tuple(map(str, lists[kind])) for kind in ("adjective", "noun", "verb"))
    except (ValueError, LookupError, TypeError) as error:
        raise UserError(f"{path} has no lists adjective, noun and verb: fetch it again") from error
    return Words(adjectives, nouns, verbs, origin="wonderwords")


@cache
def _generated() -> Words:
    """9000 words of five letters that can be spoken, in no language; none is a part of another."""
    rng, found = random.Random("ruler/words"), dict[str, None]()
    letters = ("bdfghjklmnprstvwz", "aeiou", "bdfgklmnprstvz", "aeiou", "dklmnprst")
    while len(found) < 9000:
        found["".join(map(rng.choice, letters))] = None
    words = tuple(found)
    return Words(words[:1000], words[1000:8000], words[8000:], origin="generated")


def _constants(file: str) -> dict[str, Any]:
    """The constants that a source file of lm-eval's RULER assigns to names, the first value of each."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise LookupError("it is not installed")
    path = Path(spec.submodule_search_locations[0], "tasks", "ruler", file)
    found: dict[str, Any] = {}
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Assign) and isinstance(node.targets[0], ast.Name):
            try:
                found.setdefault(node.targets[0].id, ast.literal_eval(node.value))
            except ValueError:
                continue
    return found


def _form(config: Mapping[str, str]) -> Form:
    body, _, question = config["template"].rpartition("\n")
    return Form(body + "\n", question, config["answer_prefix"].strip())


def _niah_form(template: str) -> Form:
    """The start of an answer repeats the question as a statement, up to the verb."""
    form = _form({"template": template, "answer_prefix": ""})
    statement = form.question.removeprefix("What are all the ").removesuffix("?")
    if form.question != f"What are all the {statement}?":
        raise LookupError(f"the question {form.question!r} is another one")
    return Form(form.body, form.question, f"The {statement} are")
