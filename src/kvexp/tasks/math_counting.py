r"""math_counting: counting and probability of MATH (Hendrycks et al., 2021), worked solutions as context.

`accuracy` compares the final answer by meaning, as math500 does; `first_box` is the score of ManyICLBench,
the first `\boxed{...}` letter for letter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.tasks.datasets import load_rows
from kvexp.tasks.math_answers import boxes, extract_answer, same_answer
from kvexp.tasks.questions import Question
from kvexp.tasks.shots import Shot, ShotsTask

NAME = "math_counting_and_probability"


@dataclass(frozen=True)
class MathCounting(ShotsTask):
    """A question's group is its level. `source`: where the rows are read without a data folder."""

    id: ClassVar[str] = "math_counting"
    header: ClassVar[str] = r"Solve each problem, and put its final answer into \boxed{}." + "\n"
    query_word: ClassVar[str] = "Problem"
    answer_word: ClassVar[str] = "Solution"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "first_box")

    source: str = "hf://datasets/EleutherAI/hendrycks_math"

    def shots(self, data_dir: str | None) -> tuple[list[Shot], list[Shot]]:
        """See `ShotsTask.shots`; a row whose solution boxes no answer is left out."""
        train, test = (self._of(split, data_dir) for split in ("train", "test"))
        return train, test

    def score(self, question: Question, text: str) -> dict[str, float]:
        """Return `accuracy` and `first_box`."""
        answer, gold = extract_answer(text), question.expected[0]
        first = next(iter(boxes(text)), None)
        return {
            "accuracy": float(answer is not None and same_answer(answer, gold)),
            "first_box": float(first == gold),
        }

    def _of(self, split: str, data_dir: str | None) -> list[Shot]:
        rows: list[dict[str, Any]] = load_rows(
            NAME, split, data_dir, ("question", "solution"), source=self.source
        )
        found = []
        for i, row in enumerate(rows):
            boxed = boxes(row["solution"])
            if boxed:
                shot = Shot(f"{split}-{i}", row["question"], row["solution"].strip(), (boxed[-1],))
                found.append(shot._replace(group=str(row.get("level", ""))))
        return found
