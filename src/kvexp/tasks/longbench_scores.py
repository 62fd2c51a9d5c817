"""How the sixteen English parts of LongBench are scored, each from 0 to 1, the best over the gold answers.

LongBench (Bai et al., 2024, arXiv 2308.14508). Departures: ROUGE-L is that of the package rouge-score (F1
over the longest common subsequence of the whole text, no stemming), where the authors use another one that
parts texts at full stops; the likeness of code is that of Python's difflib, rounded to hundredths as theirs
is.
"""

from __future__ import annotations

import difflib
import re
import string
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_NO_CODE = ("`", "#", "//")


def qa_f1(answer: str, gold: str, classes: Sequence[str] = ()) -> float:
    """F1 over words with multiplicity, without case, punctuation and articles."""
    ours, theirs = (
        Counter(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split()) for text in (answer, gold)
    )
    shared = (ours & theirs).total()
    return 2 * shared / (ours.total() + theirs.total()) if shared else 0.0


def rouge_l(answer: str, gold: str, classes: Sequence[str] = ()) -> float:
    """F1 over the longest common subsequence of words."""
    return float(_rouge().score(gold, answer)["rougeL"].fmeasure)


def classification(answer: str, gold: str, classes: Sequence[str]) -> float:
    """One over the number of classes that the answer names, where the gold one is among them.

    A class whose name is a part of the gold one's does not count.
    """
    named = [name for name in classes if name in answer and (name == gold or name not in gold)]
    return 1 / len(named) if gold in named else 0.0


def count(answer: str, gold: str, classes: Sequence[str] = ()) -> float:
    """The share of the numbers in the answer that are the gold one."""
    numbers = re.findall(r"\d+", answer)
    return numbers.count(gold.strip()) / len(numbers) if numbers else 0.0


def retrieval(answer: str, gold: str, classes: Sequence[str] = ()) -> float:
    """The same for the number in the gold answer, "Paragraph 12"."""
    (number,) = re.findall(r"\d+", gold)[:1] or ("",)
    return count(answer, number)


def code_sim(answer: str, gold: str, classes: Sequence[str] = ()) -> float:
    """Likeness of the first line of the answer that is neither fence nor comment."""
    lines = answer.lstrip("\n").split("\n")
    line = next((one for one in lines if not any(mark in one for mark in _NO_CODE)), "")
    return round(100 * difflib.SequenceMatcher(None, line, gold).ratio()) / 100


METRICS: dict[str, Callable[[str, str, Sequence[str]], float]] = {
    **dict.fromkeys(("narrativeqa", "qasper", "multifieldqa_en"), qa_f1),
    **dict.fromkeys(("hotpotqa", "2wikimqa", "musique"), qa_f1),
    **dict.fromkeys(("gov_report", "qmsum", "multi_news"), rouge_l),
    "trec": classification,
    "triviaqa": qa_f1,
    "samsum": rouge_l,
    "passage_count": count,
    "passage_retrieval_en": retrieval,
    **dict.fromkeys(("lcc", "repobench-p"), code_sim),
}
"""The score of each part, in the order of the paper."""
FIRST_LINE = ("trec", "triviaqa", "samsum")
"""Parts of demonstrations, of whose answers only the first line counts."""


def score(subtask: str, answer: str, golds: Sequence[str], classes: Sequence[str] = ()) -> float:
    """Return the best score of an answer over the gold ones."""
    if subtask in FIRST_LINE:
        answer = answer.lstrip("\n").split("\n")[0]
    return max(METRICS[subtask](answer, gold, classes) for gold in golds)


@cache
def _rouge() -> Any:
    from absl.logging import get_absl_handler  # which rouge-score imports
    from rouge_score.rouge_scorer import RougeScorer

    # absl holds what stderr was when it was imported, and closes that as soon as somebody configures logging
    get_absl_handler().python_handler.setStream(sys.__stderr__)
    return RougeScorer(["rougeL"], use_stemmer=False)
