"""The words that memories compare: stems of content words, phrases, and steps that are told by number."""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any

STOP = frozenset(
    "a about after again also am an and any are as at be because been before being but by can could did do"
    " does doing down during for from had has have having he her here him his how i if in into is it its just"
    " me might more most must my no nor not of off on once only or other our out over own really same shall"
    " she should so some such than that the their them then there these they this those through to too under"
    " until up us very was we were what when where which while who whom whose why will with would you"
    " your".split()
)
FILLERS = frozenset(
    "always anything awesome best better bit both come definitely done em even ever every everything"
    " few find fun get getting give glad go going gonna good got gotta great guess happy hear hey kinda"
    " know let like look looking looks lot lots love made make makes making many maybe mean means much"
    " need never new nice nothing now one others pretty put say see seems since something sounds still"
    " stuff super sure take taken tell thank thanks thing things think time took try two wanna want way"
    " well wow yeah yep yes yet".split()
)
"""Words that tell little of what a text is about, though they may tell two texts apart."""
_WORD = re.compile(r"[^\W_]+(?:['’][^\W_]+)*")
_SUFFIX = re.compile(r"['’](?:s|re|m|ve|ll|d|t)$")
_STEPS = re.compile(r"\bsteps?\s+(\d+)(?:\s*(?:-|–|to|through|and)\s*(?:step\s+)?(\d+))?", re.IGNORECASE)
_SPAN = 20  # steps of one range that count
_PHRASE = 4  # words of a phrase


def words(text: str) -> list[str]:
    """Return the words of a text that are no stop words, in lower case, in order."""
    found = (_SUFFIX.sub("", word.group().lower()) for word in _WORD.finditer(text))
    return [word for word in found if word not in STOP]


def terms(text: str) -> list[str]:
    """Return the stems of a text's words (Porter's), and "step:7" for each step that it names.

    A range such as "steps 7 to 9" names each step in it, the first 20 at most.
    """
    return [stem(word) for word in words(text)] + list(_steps(text))


def phrases(text: str) -> list[list[str]]:
    """Return the runs of up to four words without a stop word or mark between them, in lower case.

    The candidates of RAKE: Rose et al., "Automatic Keyword Extraction from Individual Documents" (2010).
    """
    return [phrase for clause in clauses(text) for phrase in clause]


def clauses(text: str) -> list[list[list[str]]]:
    """Return the phrases of a text, those together that no mark parts."""
    found: list[list[list[str]]] = []
    end, joined = 0, False
    for match in _WORD.finditer(text):
        if not found or text[end : match.start()].strip(" "):
            found.append([])
            joined = False
        end = match.end()
        word = _SUFFIX.sub("", match.group().lower())
        if word in STOP:
            joined = False
        elif joined and len(found[-1][-1]) < _PHRASE:
            found[-1][-1].append(word)
        else:
            found[-1].append([word])
            joined = True
    return [clause for clause in found if clause]


@lru_cache(maxsize=1 << 16)
def stem(word: str) -> str:
    """Return the Porter stem of a word, as nltk makes it."""
    return str(_stemmer().stem(word))


@cache
def _stemmer() -> Any:
    from nltk.stem import PorterStemmer

    return PorterStemmer()


def _steps(text: str) -> Iterator[str]:
    for found in _STEPS.finditer(text):
        first, last = int(found[1]), int(found[2] or found[1])
        for number in range(first, min(max(first, last), first + _SPAN - 1) + 1):
            yield f"step:{number}"
