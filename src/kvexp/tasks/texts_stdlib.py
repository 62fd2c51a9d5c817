"""Texts out of the installed Python: documentation strings and sources of its top-level modules.

The modules are read and parsed, never imported. The texts depend on the version of Python alone, apart from
changes that a distribution made to its files.
"""

from __future__ import annotations

import ast
import re
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

_MIN_WORDS = 8
_MIN_LETTERS = 0.93  # share of letters, spaces, commas, full stops and apostrophes in a paragraph of prose


def prose() -> list[tuple[str, str]]:
    """Return (module, text): the paragraphs of prose in its documentation strings, in the order of the file.

    A paragraph is prose when no line of it is indented, it has at least eight words, starts with a capital
    letter, ends as a sentence does, and consists of letters and plain punctuation to 93%. Its lines are
    joined to one, a paragraph that repeats within a module is left out, as are modules without prose.
    """
    found = []
    for name, source in code():
        paragraphs = dict.fromkeys(p for doc in _docstrings(source) for p in prose_paragraphs(doc))
        if paragraphs:
            found.append((name, "\n\n".join(paragraphs) + "\n"))
    return found


def code() -> list[tuple[str, str]]:
    """Return (module, source) of every top-level module that is one file, sorted by name."""
    folder = Path(sysconfig.get_paths()["stdlib"])
    files = sorted(path for path in folder.glob("*.py") if path.stem in sys.stdlib_module_names)
    return [(path.stem, path.read_text(encoding="utf-8")) for path in files]


def prose_paragraphs(doc: str) -> Iterator[str]:
    """Yield the paragraphs of prose in a documentation string, each on one line; see `prose`."""
    for block in re.split(r"\n\s*\n", doc):
        if re.search(r"^\s", block, re.MULTILINE) or ">>>" in block:
            continue
        text = " ".join(block.split())
        plain = sum(char.isalpha() or char in " ,.'" for char in text)
        is_sentence = text[:1].isupper() and text[-1:] in (".", "!", "?")
        if is_sentence and len(text.split()) >= _MIN_WORDS and plain >= _MIN_LETTERS * len(text):
            yield text


def _docstrings(source: str) -> list[str]:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    return [doc for node in nodes if (doc := ast.get_docstring(node))]
