"""gpqa_cot: questions of GPQA that a search does not answer, with their authors' explanations as context.

GPQA: A Graduate-Level Google-Proof Q&A Benchmark (Rein et al., 2023, arXiv 2311.12022). Its authors ask that
the questions are not published, so they come from the hub alone (where access is granted on request), and the
samples of a run hold no question. The 198 of "diamond" are the test; demonstrations and traces are the rows
of "extended" that are not among them. The order of the four options is drawn for each question, whatever the
seed.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.tasks.questions import Question
from kvexp.tasks.shots import Shot, ShotsTask

LETTERS = "ABCD"
_COLUMNS = ("Correct Answer", "Incorrect Answer 1", "Incorrect Answer 2", "Incorrect Answer 3")
_SAID = re.compile(r"answer\s*(?:is|:)\s*\*{0,2}\(?([A-D])\b", re.IGNORECASE)
_LETTER = re.compile(r"\(([A-D])\)")


@dataclass(frozen=True)
class GpqaCot(ShotsTask):
    """`source`: the set on the hub; it is never read from a data folder."""

    id: ClassVar[str] = "gpqa_cot"
    header: ClassVar[str] = "Reason about each question, then name the right option by its letter.\n"
    query_word: ClassVar[str] = "Question"
    answer_word: ClassVar[str] = "Answer"
    keeps_queries: ClassVar[bool] = False

    source: str = "hf://datasets/Idavidrein/gpqa"

    def shots(self, data_dir: str | None) -> tuple[list[Shot], list[Shot]]:
        """See `ShotsTask.shots`; `data_dir` has no part in it."""
        test = [_shot(f"diamond-{i}", row) for i, row in enumerate(hub_rows(self.source, "gpqa_diamond"))]
        train = [_shot(f"extended-{i}", row) for i, row in enumerate(hub_rows(self.source, "gpqa_extended"))]
        return train, test

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; the hub is not asked."""
        return None

    def score(self, question: Question, text: str) -> dict[str, float]:
        """Return whether the letter that `text` ends on is the right one."""
        return {"accuracy": float(chosen(text) == question.expected[0])}


def chosen(text: str) -> str | None:
    """Return the letter after the last "answer is", else the last letter in brackets, else None."""
    found = _SAID.findall(text) or _LETTER.findall(text)
    return found[-1].upper() if found else None


def hub_rows(source: str, config: str) -> list[dict[str, Any]]:
    """Return the rows of one part of the set, from the hub; raises UserError where it cannot be read."""
    import datasets

    try:
        return list(datasets.load_dataset(source.removeprefix("hf://datasets/"), config, split="train"))
    except Exception as error:  # the hub's client has many of its own
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{source} ({config}) cannot be read from the hub ({reason}): ask its authors for access there"
            " and log in; it is in no data folder"
        ) from error


def _shot(name: str, row: Mapping[str, Any]) -> Shot:
    question, options = str(row["Question"]).strip(), [str(row[column]).strip() for column in _COLUMNS]
    order = random.Random(f"gpqa/{question}").sample(range(len(options)), len(options))
    listed = "\n".join(f"({letter}) {options[i]}" for letter, i in zip(LETTERS, order, strict=True))
    right = LETTERS[order.index(0)]
    explanation = str(row.get("Explanation") or "").strip()
    said = f"{explanation}\nThe answer is ({right})." if explanation else f"The answer is ({right})."
    return Shot(name, f"{question}\n{listed}", said, (right,))
