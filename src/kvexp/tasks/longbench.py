"""longbench: the sixteen English parts of LongBench, long prompts that each have a context of their own.

LongBench: A Bilingual, Multitask Benchmark for Long Context Understanding (Bai et al., 2024, arXiv
2308.14508), in the templates of lm-eval, with the authors' limits on new tokens. Prompts that are too long
lose the middle of their context, as the authors do, while instruction and question stay whole (theirs may
lose a part of the instruction). `average` is the paper's: the mean over parts of their means. Prompts are
plain text, for all parts (the authors take a chat template where answers are not of demonstrations or code).
"""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import yaml

from kvexp.errors import UserError
from kvexp.prompt import bos_ids, continuation, encode
from kvexp.tasks import longbench_scores, metrics
from kvexp.tasks.base import Task, at_least, one_of
from kvexp.tasks.datasets import hub_table
from kvexp.tasks.fitting import cut_nearest
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.questions import Question, QuestionSet
from kvexp.tasks.texts import data_file, read_jsonl

SUBTASKS = tuple(longbench_scores.METRICS)
_LIMITS = {128: ("narrativeqa", "qasper", "samsum"), 64: ("multifieldqa_en", "trec", "lcc", "repobench-p")}
_LIMITS[512] = ("gov_report", "qmsum", "multi_news")
NEW_TOKENS = dict.fromkeys(SUBTASKS, 32) | {name: n for n, names in _LIMITS.items() for name in names}
"""Tokens of an answer."""
_CONTEXT, _INPUT = "{{context}}", "{{input}}"


@dataclass(frozen=True)
class LongBench(Task):
    """The knobs of longbench.

    `subtask`: one part, several with commas between them, or "all".
    `length`: tokens of a prompt, at most; beyond that the middle of its context goes.
    `n`: the first so many questions of each part (null: all). `n_validation`: questions of each part, from
    its end, that are held out for `split=validation` (0: none, the published test).
    `max_new_tokens`: instead of the authors' limit of each part. `source`: where the hub has the set.
    """

    id: ClassVar[str] = "longbench"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True

    subtask: str = "all"
    length: int = 7500
    n: int | None = None
    n_validation: int = 0
    max_new_tokens: int | None = None
    source: str = "hf://datasets/Xnhyacinth/LongBench"

    def __post_init__(self) -> None:
        at_least("task.length", self.length, 512)
        at_least("task.n", self.n, 1)
        at_least("task.n_validation", self.n_validation, 0)
        at_least("task.max_new_tokens", self.max_new_tokens, 1)
        for name in self.subtasks:
            one_of("task.subtask", name, (*SUBTASKS, "all"))

    @property
    def subtasks(self) -> tuple[str, ...]:
        """The parts chosen, each once."""
        words = [word.strip() for word in self.subtask.split(",")]
        return SUBTASKS if "all" in words else tuple(dict.fromkeys(words))

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions in rounds of one of every part, in published order; no seed changes it.

        Raises:
            UserError: data cannot be read, there is no such split, or a question leaves no room in `length`.
        """
        self.check_asked(split, limit)
        if split != "test" and not self.n_validation:
            raise UserError(
                "longbench has no split=validation of its own: set task.n_validation=5, or leave it out"
            )
        rows = {name: self._rows(name, data_dir) for name in self.subtasks}
        parts = {name: self._part(split, own) for name, own in rows.items()}
        rounds = range(max(map(len, parts.values()), default=0))
        asked = [(name, part[i]) for i in rounds for name, part in parts.items() if i < len(part)][:limit]
        return QuestionSet(
            questions=[self._question(tokenizer, i, name, row) for i, (name, row) in enumerate(asked)],
            score=score,
            metrics=("score",),
            data_sha256=_sha256(rows),
            notes={
                "source": data_dir or self.source,
                "questions": {name: len(own) for name, own in parts.items()},
            },
            overall=average if len(self.subtasks) > 1 else None,
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; the hub is not asked."""
        try:
            return data_dir and _sha256({name: self._rows(name, data_dir) for name in self.subtasks})
        except UserError:  # the files are gone: nothing to compare with
            return None

    def _part(self, split: str, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        first = len(rows) - self.n_validation
        if first < 1:
            raise UserError(
                f"task.n_validation={self.n_validation} leaves no question of a part of {len(rows)}: lower it"
            )
        return rows[first:] if split == "validation" else rows[:first][: self.n]

    def _rows(self, name: str, data_dir: str | None) -> list[dict[str, Any]]:
        member = f"longbench/{name}/test.jsonl.gz"
        if (path := data_file(data_dir, member)) is not None:
            rows = read_jsonl(path)
        elif data_dir is not None:
            raise UserError(f"data_dir={data_dir} has no {member}: set data_dir=PATH to a folder that has it")
        else:
            rows = [dict(row) for row in hub_table(self.source, name, "test", member)]
        for row in rows:
            row["input"] = row.get("input", row.get("question", ""))  # lm-eval's copy calls it `question`
            if not (isinstance(row.get("context"), str) and row.get("answers")):
                raise UserError(f"{path or self.source} has a row of {name} without context or answers")
        return rows

    def _question(self, tokenizer: Any, sample: int, name: str, row: Mapping[str, Any]) -> Question:
        before, after = (text.replace(_INPUT, row["input"]) for text in templates()[name])
        text = self._shortened(tokenizer, before + row["context"], after)
        context, query, query_ids = cut_nearest(tokenizer, text, after)
        golds = tuple(map(str, row["answers"]))
        return Question(
            id=f"{name}-{row.get('_id', sample)}",
            sample=sample,
            context=context,
            query=query,
            query_ids=query_ids,
            expected=(*golds, *(f"class: {one}" for one in row.get("all_classes") or ())),
            max_new_tokens=self.max_new_tokens or NEW_TOKENS[name],
            group=name,
            answer_ids=tuple(continuation(tokenizer, query, f" {golds[0]}")),
        )

    def _shortened(self, tokenizer: Any, text: str, after: str) -> str:
        room = self.length - len(encode(tokenizer, after)) - len(bos_ids(tokenizer))
        if room < 256:
            raise UserError(
                f"task.length={self.length} leaves {room} tokens of context: set"
                f" task.length={2 * self.length}"
            )
        ids = encode(tokenizer, text)
        if len(ids) <= room:
            return text
        half = room // 2 - 1  # parts of characters at the cut may take a token more
        ends = (ids[:half], ids[-half:])
        return "".join(tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in ends)


@cache
def templates() -> dict[str, tuple[str, str]]:
    """Return each part's prompt up to and behind the context, from lm-eval; `{{input}}` is the question."""
    spec = importlib.util.find_spec("lm_eval")
    if spec is None or not spec.submodule_search_locations:
        raise UserError("the templates of LongBench are those of lm-eval: install lm-eval 0.4.13")
    folder, found = Path(spec.submodule_search_locations[0], "tasks", "longbench"), {}
    for name in SUBTASKS:
        try:
            text = yaml.load((folder / f"{name}.yaml").read_text(encoding="utf-8"), _Loader)["doc_to_text"]
            before, after = text.replace("{{question}}", _INPUT).split(_CONTEXT)
        except (OSError, KeyError, ValueError, yaml.YAMLError) as error:
            raise UserError(
                f"the installed lm-eval has no template of {name} as kvexp knows it: install lm-eval 0.4.13"
            ) from error
        found[name] = (before, after)
    return found


def score(question: Question, text: str) -> dict[str, float]:
    """Return the `score` of a question's part."""
    classes = [one.removeprefix("class: ") for one in question.expected if one.startswith("class: ")]
    golds = question.expected[: len(question.expected) - len(classes)]
    return {"score": longbench_scores.score(question.group, text, golds, classes)}


def average(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return `average`, the mean over parts of their means; its error takes them as independent."""
    parts: dict[str, list[float]] = {}
    for sample in samples:
        parts.setdefault(sample["group"], []).append(sample["scores"]["score"])
    means = [metrics.mean(values, True) for values in parts.values()]
    value = sum(one["value"] for one in means) / len(means)
    errors = [one["stderr"] for one in means]
    stderr = None if None in errors else sum(e * e for e in errors if e is not None) ** 0.5 / len(means)
    return {"average": {"value": value, "stderr": stderr, "n": len(samples), "higher_is_better": True}}


class _Loader(yaml.SafeLoader):
    """Reads lm-eval's files, whose tags name functions that are not wanted here."""


_Loader.add_multi_constructor("!", lambda loader, suffix, node: None)


def _sha256(rows: Mapping[str, Sequence[Mapping[str, Any]]]) -> str:
    return rows_sha256(
        *(
            [(name, row["input"], row["context"], *map(str, row["answers"])) for row in own]
            for name, own in rows.items()
        )
    )
