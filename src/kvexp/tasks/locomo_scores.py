"""How LoCoMo's answers are scored: the F1 of its authors, by category, and that of A-MEM.

The first is over Porter stems as multisets, after commas, punctuation and the words a, an, the and "and" are
dropped. Category 1 parts both texts at commas: the mean over the gold parts of the best F1 of a predicted
part. Of category 3 the gold answer counts up to its first semicolon. Category 5 is 1 where the answer says
that there is no information or no mention of it, else 0; an answer that only names a choice stands for its
text.

The second (A-MEM, Xu et al., 2025, arXiv 2502.12110) is over sets of lower-case words, with . , ! and ? as
spaces, of whole answers in every category. In category 5 it is against the choice that is right, where the
code of A-MEM compares with the wrong one.
"""

from __future__ import annotations

import re
import string
from collections import Counter

from kvexp.notes.words import stem
from kvexp.tasks.questions import Question

NOT_MENTIONED = "Not mentioned in the conversation"
METRICS = ("f1", "f1_set")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_ARTICLES = re.compile(r"\b(?:a|an|the|and)\b")
_SPACES = str.maketrans(".,!?", "    ")
_CHOICE = re.compile(r"\s*\(?([ab])\)?[\s.]*", re.IGNORECASE)


def score(question: Question, text: str) -> dict[str, float]:
    """Return `f1` and `f1_set` of an answer; the category is the first of the question's groups."""
    gold, category = question.expected[0], category_of(question)
    answer = text.strip()
    if category == "adversarial":
        answer = _chosen(question.query, answer)
        absent = any(phrase in answer.lower() for phrase in ("no information available", "not mentioned"))
        return {"f1": float(absent), "f1_set": f1_set(answer, gold)}
    multi = category == "multi-hop"
    return {"f1": (f1_parts if multi else f1)(answer, gold), "f1_set": f1_set(answer, gold)}


def category_of(question: Question) -> str:
    """Return the name of a question's category."""
    return question.group.split(" | ")[0]


def gold_answer(category: int, answer: str) -> str:
    """Return what an answer is compared with."""
    if category == 5:
        return NOT_MENTIONED
    return answer.split(";")[0].strip() if category == 3 else answer


def f1(answer: str, gold: str) -> float:
    """Return the F1 over stems with multiplicity."""
    ours, theirs = (Counter(map(stem, _normal(text))) for text in (answer, gold))
    return _harmonic((ours & theirs).total(), ours.total(), theirs.total())


def f1_parts(answer: str, gold: str) -> float:
    """Return the mean over the gold parts between commas of the best F1 of a part of the answer."""
    parts = answer.split(",")
    best = [max(f1(part, wanted) for part in parts) for wanted in gold.split(",")]
    return sum(best) / len(best)


def f1_set(answer: str, gold: str) -> float:
    """Return the F1 over sets of words."""
    ours, theirs = (_word_set(text) for text in (answer, gold))
    return _harmonic(len(ours & theirs), len(ours), len(theirs))


def choices(query: str) -> dict[str, str]:
    """Return the texts of the choices that a query offers on lines of their own, "(a) ..." and "(b) ..."."""
    return dict(re.findall(r"^\(([ab])\) (.*)$", query, re.MULTILINE))


def _chosen(query: str, answer: str) -> str:
    named = _CHOICE.fullmatch(answer)
    return choices(query).get(named[1].lower(), answer) if named else answer


def _normal(text: str) -> list[str]:
    return _ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()


def _word_set(text: str) -> set[str]:
    return set(text.lower().translate(_SPACES).split())


def _harmonic(shared: int, ours: int, theirs: int) -> float:
    """F1 of so many shared of ours and theirs: the harmonic mean of precision and recall."""
    return 2 * shared / (ours + theirs) if shared else 0.0
