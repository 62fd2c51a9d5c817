"""Problems with one final answer, solved by free reasoning: what AIME and MATH500 have in common.

The protocol is that of "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression", with a
prompt in our own words: plain text that asks to reason step by step and to box the answer, sampled with
temperature 0.6 and top-p 0.95 up to a total length. Departure: its grader also takes a hundredth and the
hundredfold of an answer for right; here they are wrong.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.tasks.base import Task, at_least, at_most
from kvexp.tasks.datasets import load_rows
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.math_answers import extract_answer, same_answer, same_integer
from kvexp.tasks.questions import Question, QuestionSet
from kvexp.tasks.whole_prompt import cut_last, prompt_ids

_INSTRUCTION = (
    "Solve the problem below. Reason step by step, write every step down, and end with the final answer "
    r"inside \boxed{}."
)


@dataclass(frozen=True)
class MathProblems(Task):
    r"""A set of problems and its knobs.

    `prompt`: "plain" (instruction, problem and the word "Solution", as text to go on with) or "chat"
    (instruction and problem as the user's turn of the model's chat template).
    `max_total_tokens`: prompt and answer together; the answer may take what the prompt leaves.
    `n`: the first so many problems (null: all).
    """

    kind: ClassVar[str] = "questions"
    splits: ClassVar[tuple[str, ...]] = ("test",)
    shared_context: ClassVar[bool] = False
    integers: ClassVar[bool]
    """Whether answers are integers from 0 to 999 rather than any expression."""

    prompt: Literal["plain", "chat"] = "plain"
    max_total_tokens: int = 32768
    n: int | None = None

    def __post_init__(self) -> None:
        at_least("task.max_total_tokens", self.max_total_tokens, 1)
        at_least("task.n", self.n, 1)

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the problems in published order; no seed changes it.

        Raises UserError for a validation split, which the sets lack, for a prompt that leaves no room for an
        answer, and for a chat with a tokenizer that has no chat template.
        """
        self.check_asked(split, limit)
        rows = self._rows(data_dir)
        at_most("task.n", self.n, len(rows))
        return QuestionSet(
            questions=[
                self._question(tokenizer, sample, row) for sample, row in enumerate(rows[: self.n][:limit])
            ],
            score=self.score,
            metrics=("accuracy",),
            data_sha256=_sha256(rows),
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; the hub is not asked."""
        if data_dir is None:
            return None
        try:
            return _sha256(self._rows(data_dir))
        except UserError:  # the files are gone: nothing to compare with
            return None

    def score(self, question: Question, text: str) -> dict[str, float]:
        """Return {"accuracy": 1.0} when the final answer in `text` is the expected one, else 0.0."""
        answer = extract_answer(text)
        same = same_integer if self.integers else same_answer
        return {"accuracy": float(answer is not None and same(answer, question.expected[0]))}

    def _rows(self, data_dir: str | None) -> list[dict[str, str]]:
        return load_rows(self.id, "test", data_dir, ("question", "answer"))

    def _question(self, tokenizer: Any, sample: int, row: Mapping[str, Any]) -> Question:
        text = f"{_INSTRUCTION}\n\nProblem: {row['question'].strip()}"
        chat = self.prompt == "chat"
        ids = prompt_ids(tokenizer, text if chat else f"{text}\n\nSolution:", chat=chat)
        room = self.max_total_tokens - len(ids)
        if room < 1:
            raise UserError(
                f"task.max_total_tokens={self.max_total_tokens} leaves no answer to a prompt of {len(ids)} "
                f"tokens: set task.max_total_tokens={len(ids) + 1024} or more"
            )
        context, query, query_ids = cut_last(tokenizer, ids)
        return Question(
            id=str(row.get("id", f"test-{sample}")),
            sample=sample,
            context=context,
            query=query,
            query_ids=query_ids,
            expected=(row["answer"],),
            max_new_tokens=room,
            group="/".join(str(row[key]) for key in ("subject", "level") if row.get(key)),
        )


def _sha256(rows: Sequence[Mapping[str, Any]]) -> str:
    return rows_sha256([(str(row.get("id", "")), row["question"], row["answer"]) for row in rows])
