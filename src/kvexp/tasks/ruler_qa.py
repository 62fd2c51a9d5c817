"""RULER's two subtasks of reading: a question whose paragraphs lie among those of other questions."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvexp.errors import UserError
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.ruler_parts import Material, Recipe, Sample
from kvexp.tasks.texts import data_file, read_jsonl

HUB = {"squad": ("rajpurkar/squad", None), "hotpot": ("hotpotqa/hotpot_qa", "distractor")}


@dataclass(frozen=True)
class Asked:
    """A question, the paragraphs that belong to it, its accepted answers, and the article ("": unknown)."""

    question: str
    paragraphs: tuple[str, ...]
    answers: tuple[str, ...]
    title: str = ""


@dataclass(frozen=True)
class Reading:
    """The questions of a set in published order."""

    rows: tuple[Asked, ...]

    @property
    def sha256(self) -> str:
        """The sha256 of the rows."""
        return rows_sha256([[r.question, *r.paragraphs, "", *r.answers, r.title] for r in self.rows])

    def order(self, split: str, rng: random.Random) -> list[Asked]:
        """Return the rows of a split, shuffled: every fifth row is for validation, the others for test."""
        rows = [row for i, row in enumerate(self.rows) if (i % 5 == 4) == (split == "validation")]
        rng.shuffle(rows)
        return rows

    def others(self, row: Asked, rng: random.Random) -> list[str]:
        """Return the paragraphs of other questions, shuffled, those of the same article first."""
        own = set(row.paragraphs)
        near: dict[str, None] = {}
        far: dict[str, None] = {}
        for other in self.rows:
            same = bool(row.title) and other.title == row.title
            (near if same else far).update(dict.fromkeys(p for p in other.paragraphs if p not in own))
        drawn = [list(near), [paragraph for paragraph in far if paragraph not in near]]
        for part in drawn:
            rng.shuffle(part)
        return drawn[0] + drawn[1]


def recipe(reading: Reading, row: Asked, material: Material, rng: random.Random) -> Recipe:
    """Return the sample of a row; a unit is a document, its own paragraphs among them."""
    others = reading.others(row, rng)
    stream = rng.getrandbits(64)

    def render(n: int) -> Sample:
        documents = [*row.paragraphs, *others[: n - len(row.paragraphs)]]
        random.Random(stream).shuffle(documents)
        frame = material.templates.document
        context = "\n\n".join(frame.format(i=i, document=text) for i, text in enumerate(documents, 1))
        body, question = material.templates.qa.fill(context, query=row.question)
        return Sample(body, question, row.answers, f" {row.answers[0]}")

    return Recipe(render, low=len(row.paragraphs), high=len(row.paragraphs) + len(others))


def load_reading(name: str, data_dir: str | None) -> Reading:
    """Return the set `squad` or `hotpot`.

    It is read from `ruler/<name>.jsonl.gz` of the data folder, rows of `question`, `context` (paragraphs),
    `answers` and, where known, `title` (article); or where there is no such file from the hub, the published
    rows for validation. Raises UserError when neither can be read.
    """
    path = data_file(data_dir, f"ruler/{name}.jsonl.gz")
    rows = _of_hub(name) if path is None else [_checked(row, path) for row in read_jsonl(path)]
    return Reading(tuple(rows))


def _checked(row: dict[str, Any], path: Path) -> Asked:
    question, title = row.get("question"), row.get("title", "")
    lists = [row.get(key) for key in ("context", "answers")]
    if isinstance(question, str) and isinstance(title, str) and all(map(_are_texts, lists)):
        return Asked(question, tuple(row["context"]), tuple(row["answers"]), title)
    raise UserError(f"{path} has a row without question, context (a list) and answers: write it anew")


def _are_texts(given: Any) -> bool:
    return isinstance(given, list) and bool(given) and all(isinstance(item, str) for item in given)


def _of_hub(name: str) -> list[Asked]:
    import datasets

    hub_id, config = HUB[name]
    try:
        table = datasets.load_dataset(hub_id, config, split="validation")
        return list(_squad(table) if name == "squad" else _hotpot(table))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise UserError(
            f"{hub_id} cannot be read from the hub ({reason}): set data_dir=PATH to a folder that has"
            f" ruler/{name}.jsonl.gz, or take task.subtask=all, which leaves qa out"
        ) from error


def _squad(table: Iterable[Any]) -> Iterable[Asked]:
    for row in table:
        answers = tuple(dict.fromkeys(row["answers"]["text"]))
        yield Asked(row["question"], (row["context"],), answers, row["title"])


def _hotpot(table: Iterable[Any]) -> Iterable[Asked]:
    for row in table:
        parts = zip(row["context"]["title"], row["context"]["sentences"], strict=True)
        paragraphs = tuple(f"{title}\n{''.join(text)}" for title, text in parts)
        yield Asked(row["question"], paragraphs, (row["answer"],))
