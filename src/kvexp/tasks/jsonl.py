"""jsonl: questions of your own, from a file with one object a line: context, query and answer.

`answer` is a text or number, or a list of them of which any counts; `id`, which no two lines share, and
`group` (metrics are also given by group) may be there. A context that many questions share is encoded once.
Scores: `f1` over words (LongBench's), `exact_match` (case and spacing apart) and `contains` (an answer stands
somewhere in what was said), the best over the answers.
"""

from __future__ import annotations

import gzip
import json
import math
import random
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.prompt import continuation
from kvexp.tasks.base import Task, at_least
from kvexp.tasks.fitting import cut_nearest
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.longbench_scores import qa_f1
from kvexp.tasks.metrics import same
from kvexp.tasks.questions import Question, QuestionSet


@dataclass(frozen=True)
class Jsonl(Task):
    r"""The knobs of jsonl.

    `path`: the file, .jsonl or .jsonl.gz. `between`: text between context and query, and `after`: text behind
    the query, from which the answer goes on (the default: a line "Answer:").
    `n`: the first so many questions (null: all). `n_validation`: questions, drawn once, that are held out for
    `split=validation`. `max_new_tokens`: length of an answer. `first_line`: an answer ends with its line.
    """

    id: ClassVar[str] = "jsonl"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True

    path: str | None = None
    between: str = "\n\n"
    after: str = "\nAnswer:"
    n: int | None = None
    n_validation: int = 0
    max_new_tokens: int = 64
    first_line: bool = True

    def __post_init__(self) -> None:
        at_least("task.n", self.n, 1)
        at_least("task.n_validation", self.n_validation, 0)
        at_least("task.max_new_tokens", self.max_new_tokens, 1)

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions in the order of the file; raises UserError for a file that cannot be used."""
        self.check_asked(split, limit)
        rows = self._rows()
        if not 0 <= self.n_validation < len(rows):
            raise UserError(
                f"task.n_validation={self.n_validation} leaves none of {len(rows)} questions: lower it"
            )
        if split != "test" and not self.n_validation:
            raise UserError("split=validation needs questions that are held out: set task.n_validation=50")
        held = set(random.Random(self.id).sample(range(len(rows)), self.n_validation))
        asked = [row for i, row in enumerate(rows) if (i in held) == (split != "test")]
        return QuestionSet(
            questions=[
                self._question(tokenizer, sample, row) for sample, row in enumerate(asked[: self.n][:limit])
            ],
            score=score,
            metrics=("f1", "exact_match", "contains"),
            data_sha256=_sha256(rows),
            stop=("\n",) if self.first_line else (),
            notes={"source": str(self.path)},
        )

    def check_data(self) -> None:
        """See `Task.check_data`."""
        self._rows()

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`."""
        try:
            return _sha256(self._rows())
        except UserError:  # the file is gone: nothing to compare with
            return None

    def _rows(self) -> list[dict[str, Any]]:
        if not self.path:
            raise UserError("task=jsonl needs task.path=FILE, with one object a line: context, query, answer")
        path = Path(self.path).expanduser()
        try:
            raw = path.read_bytes()
            text = (gzip.decompress(raw) if path.suffix == ".gz" else raw).decode("utf-8-sig")
        except (OSError, EOFError, ValueError, zlib.error) as error:
            raise UserError(f"task.path={self.path} cannot be read ({error})") from error
        rows: list[dict[str, Any]] = []
        seen: dict[str, int] = {}
        for number, line in enumerate(text.split("\n"), 1):
            if not line.strip():
                continue
            row = _row(line, f"line {number} of {self.path}", f"line-{len(rows)}")
            first = seen.setdefault(row["id"], number)
            if first != number:
                raise UserError(
                    f"lines {first} and {number} of {self.path} have one id, '{row['id']}': give each"
                    " line its own, or none (a line without is line-0, line-1, ... by its place)"
                )
            rows.append(row)
        if not rows:
            raise UserError(f"task.path={self.path} holds no question: write one object a line")
        return rows

    def _question(self, tokenizer: Any, sample: int, row: Mapping[str, Any]) -> Question:
        context, query, ids = cut_nearest(tokenizer, row["context"] + self.between, row["query"] + self.after)
        return Question(
            id=row["id"],
            sample=sample,
            context=context,
            query=query,
            query_ids=ids,
            expected=row["answer"],
            max_new_tokens=self.max_new_tokens,
            group=row["group"],
            answer_ids=tuple(continuation(tokenizer, query, f" {row['answer'][0]}")),
        )


def score(question: Question, text: str) -> dict[str, float]:
    """Return `f1`, `exact_match` and `contains`, each the best over the expected answers."""
    golds = question.expected
    said = " ".join(text.casefold().split())
    return {
        "f1": max(qa_f1(text, gold) for gold in golds),
        "exact_match": float(any(same(text, gold) for gold in golds)),
        "contains": float(any(" ".join(gold.casefold().split()) in said for gold in golds)),
    }


def _row(line: str, where: str, unnamed: str) -> dict[str, Any]:
    """Return context, query, answer, id (`unnamed` where the line has none) and group of a line, as texts."""
    try:
        row = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error}): write one object a line") from error
    if not isinstance(row, dict):
        raise UserError(f"{where} is no object: write context, query and answer between braces")
    for key in ("context", "query"):
        if not isinstance(row.get(key), str) or not row[key].strip():
            raise UserError(f"{where} has no text '{key}': give it context, query and answer")
    answers = row.get("answer")
    answers = answers if isinstance(answers, list) else [answers]
    if not answers or not all(_is_plain(one) and str(one).strip() for one in answers):
        raise UserError(f"{where} has no 'answer': give it a text, or a list of texts of which any counts")
    for key, default in (("id", unnamed), ("group", "")):
        row[key] = default if row.get(key) is None else row[key]
        if not _is_plain(row[key]):
            raise UserError(f"{where}: '{key}' is no text: write a text or a number, or leave it out")
    texts = {key: str(row[key]) for key in ("context", "query", "id", "group")}
    found = {**texts, "answer": tuple(map(str, answers))}
    try:
        "".join((*texts.values(), *found["answer"])).encode()
    except UnicodeEncodeError as error:
        raise UserError(
            f"{where} has half a character ({error.reason}): write the whole character"
        ) from error
    return found


def _is_plain(value: object) -> bool:
    """Whether a value is a text or a finite number."""
    if isinstance(value, float):
        return math.isfinite(value)  # 1e999 is read as infinity
    return isinstance(value, str | int) and not isinstance(value, bool)


def _refuse(name: str) -> None:
    raise ValueError(f"{name} is no number")


def _sha256(rows: list[dict[str, Any]]) -> str:
    return rows_sha256([(row["context"], row["query"], *row["answer"]) for row in rows])
