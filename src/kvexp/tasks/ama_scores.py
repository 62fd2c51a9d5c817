"""How AMA-Bench's answers are scored: token F1, and where it is asked for, a language model as judge.

As in the benchmark's code: F1 over words with multiplicity, in lower case, every mark a space, without a, an
and the; the judge's last yes or no counts. Where it says neither, the answer counts as wrong (there: by its
F1).
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass

from kvexp.notes.units import Ask
from kvexp.tasks.questions import Question

_THINKING = re.compile(r"\A.*</think>|<think>.*", re.DOTALL)  # a template may open it in the prompt
_ANSWER = re.compile(r"^\W*answer\s*(?:\[\d+\])?\s*:(?:\*\*)?", re.IGNORECASE | re.MULTILINE)
_MARKS = re.compile(r"[^\w\s]")
_VERDICT = re.compile(r"\b(yes|no)\b", re.IGNORECASE)
_PROMPT = """\
Judge an answer to a question about what an agent did. It is right if it agrees with the reference answer in \
its facts, says all that the question asks for, and keeps to the question.

Question: {question}
Reference answer: {reference}
Answer to judge: {answer}

Is it right? Say only yes or no."""


def final_answer(text: str) -> str:
    """Return what counts as the answer: what follows the last "Answer:" or "Answer[1]:" that opens a line.

    What is thought aloud before it does not count, nor what is thought without an end.
    """
    return _ANSWER.split(_THINKING.sub("", text))[-1].strip()


def f1(answer: str, reference: str) -> float:
    """Return the F1 over words: the harmonic mean of precision and recall, 1 where both texts have none."""
    ours, theirs = (Counter(_words(text)) for text in (answer, reference))
    words = ours.total() + theirs.total()
    return 2 * (ours & theirs).total() / words if words else 1.0


def judged(ask: Ask, question: str, reference: str, answer: str) -> float:
    """Return 1 where the judge's last yes or no is yes, else 0."""
    said = ask(_PROMPT.format(question=question, reference=reference, answer=answer))
    verdicts = _VERDICT.findall(_THINKING.sub("", said))
    return float(bool(verdicts) and verdicts[-1].lower() == "yes")


@dataclass(frozen=True)
class Scorer:
    """Scores an answer; `judge` is asked where there is one."""

    judge: Ask | None = None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The names of the metrics."""
        return ("f1", "judge") if self.judge else ("f1",)

    def __call__(self, question: Question, text: str) -> dict[str, float]:
        """Return `f1`, and `judge` where there is one."""
        answer, reference = final_answer(text), question.expected[0]
        found = {"f1": f1(answer, reference)}
        if self.judge:
            asked = question.query.removeprefix("Question: ").split("\nAnswer:")[0]
            found["judge"] = judged(self.judge, asked, reference, answer)
        return found


def _words(text: str) -> list[str]:
    return [word for word in _MARKS.sub(" ", text.lower()).split() if word not in ("a", "an", "the")]
