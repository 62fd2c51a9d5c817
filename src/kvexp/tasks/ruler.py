"""RULER: thirteen tasks of retrieval, tracking, counting and reading whose prompts are made at any length.

RULER: What's the Real Context Size of Your Long-Context Language Models? (Hsieh et al., 2024,
arXiv 2404.06654), in the templates of lm-eval, with the numbers of needles, hops and words of the paper.

Departures: every sample draws its own vocabulary, order and solved example, and keys do not repeat within a
sample; prose is parted into sentences by punctuation, with no trained splitter; 20 samples a subtask (the
paper: 500); sizes are fitted to the token, answer included, where the paper counts in steps; questions for
reading are drawn from all, and for SQuAD from its first version. Unlike lm-eval, common words are asked after
a solved example, as in the paper, and a question for reading counts as answered by any of its answers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from itertools import count
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.prompt import bos_ids, continuation, encode
from kvexp.tasks import ruler_niah, ruler_qa, ruler_words
from kvexp.tasks.base import Task, at_least, one_of
from kvexp.tasks.fitting import cut, largest
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.questions import Question, QuestionSet
from kvexp.tasks.ruler_material import load_templates, load_words
from kvexp.tasks.ruler_parts import Material, Recipe, Sample
from kvexp.tasks.texts import ESSAYS, data_file, load_texts

READING = {"qa_squad": "squad", "qa_hotpot": "hotpot"}
GENERATED = (*ruler_niah.NIAH, "vt", "cwe", "fwe")
SUBTASKS = (*GENERATED, *READING)
NEW_TOKENS = {"niah": 128, "vt": 30, "cwe": 120, "fwe": 50, "qa": 32}
"""Tokens of an answer, by the first word of a subtask."""


@dataclass(frozen=True)
class Ruler(Task):
    """The knobs of RULER.

    `subtask`: one, several with commas between them, "all" (the eleven that are generated) or "all13".
    `length`: tokens of context, query and answer together, at most; `n`: samples of each subtask.
    `haystack`: the prose that hides needles: "auto" (essays where the data folder has them, else stdlib), or
    any source of `kvexp.tasks.texts.load_texts`.
    `depths`: percentages at which needles lie, taken in turn (null: as published, 40 equally spaced depths in
    prose and any place between lines).
    """

    id: ClassVar[str] = "ruler"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True

    subtask: str = "all"
    length: int = 4096
    n: int = 20
    haystack: str = "auto"
    depths: tuple[int, ...] | None = None

    def __post_init__(self) -> None:
        at_least("task.length", self.length, 256)
        at_least("task.n", self.n, 1)
        for name in self.subtasks:
            one_of("task.subtask", name, (*SUBTASKS, "all", "all13"))
        if self.depths is not None and not (self.depths and all(0 <= depth <= 100 for depth in self.depths)):
            raise UserError("task.depths is a list of percentages: set task.depths=[0,50,100], or null")

    @property
    def context_tokens(self) -> int:
        """What a share as a budget is of: `length`, which the context shares with query and answer."""
        return self.length

    @property
    def subtasks(self) -> tuple[str, ...]:
        """The subtasks chosen, each once."""
        sets = {"all": GENERATED, "all13": SUBTASKS}
        words = (word.strip() for word in self.subtask.split(","))
        return tuple(dict.fromkeys(name for word in words for name in sets.get(word, (word,))))

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions, in rounds of one sample of every subtask.

        Raises:
            UserError: a subtask does not fit into `length`, data is missing, or the tokenizer merges context
                and question.
        """
        self.check_asked(split, limit)
        material, notes = self._material(data_dir)
        readings = {
            name: ruler_qa.load_reading(READING[name], data_dir) for name in self.subtasks if name in READING
        }
        each = self.n if limit is None else min(self.n, -(-limit // len(self.subtasks)))
        made = []
        for name in self.subtasks:
            stream = f"ruler/{name}/{seed}" + ("" if split == "test" else f"/{split}")
            recipes = _recipes(name, stream, split, material, readings.get(name))
            made.append(_Writer(tokenizer, name, self.length).questions(recipes, each))
        in_rounds = [question for samples in zip(*made, strict=True) for question in samples][:limit]
        return QuestionSet(
            questions=[replace(question, sample=i) for i, question in enumerate(in_rounds)],
            score=score,
            metrics=("match",),
            data_sha256=_sha256(material, readings),
            notes=notes,
        )

    def _material(self, data_dir: str | None) -> tuple[Material, dict[str, Any]]:
        source = self.haystack
        if source == "auto":
            source = "stdlib" if data_file(data_dir, ESSAYS) is None else "essays"
        in_prose = any(
            name in ruler_niah.NIAH and ruler_niah.NIAH[name].haystack == "prose" for name in self.subtasks
        )
        text = " ".join(text.text for text in load_texts(source, data_dir)) if in_prose else ""
        words = load_words(data_dir)
        material = Material(load_templates(), words, tuple(text.split()), self.depths, self.length)
        return material, {"haystack": source if in_prose else None, "words": words.origin}


@dataclass(frozen=True)
class _Writer:
    """Makes samples of one subtask into questions of at most `length` tokens."""

    tokenizer: Any
    subtask: str
    length: int

    def questions(self, recipes: Iterator[Recipe], n: int) -> list[Question]:
        """The first `n` samples; reading leaves out those whose own paragraphs do not fit."""
        guess, found = 0, list[Question]()
        for index, recipe in enumerate(recipes):
            size, sample = self._fit(recipe, guess or recipe.low + 8)
            if sample is None and self.subtask in READING:
                continue
            if sample is None:
                break
            guess = size
            found.append(self._question(sample, index))
            if len(found) == n:
                return found
        remedy = f"set task.n={len(found)} or less, or" if found else "leave that subtask out, or"
        raise UserError(
            f"task.length={self.length} holds only {len(found)} of {n} samples of {self.subtask}: "
            f"{remedy} set task.length={2 * self.length}"
        )

    def _fit(self, recipe: Recipe, guess: int) -> tuple[int, Sample | None]:
        tried: dict[int, Sample] = {}

        def cost(size: int) -> int:
            tried[size] = sample = recipe.render(size)
            return len(encode(self.tokenizer, sample.context + sample.query))

        room = self.length - new_tokens(self.subtask) - len(bos_ids(self.tokenizer))
        size = largest(cost, room, recipe.low, recipe.high, guess, slack=room // 200)
        return (0, None) if size is None else (size, tried[size])

    def _question(self, sample: Sample, index: int) -> Question:
        context, query, query_ids = cut(self.tokenizer, sample.context, sample.query)
        return Question(
            id=f"{self.subtask}-{index}",
            sample=index,
            context=context,
            query=query,
            query_ids=query_ids,
            expected=sample.expected,
            max_new_tokens=new_tokens(self.subtask),
            group=self.subtask,
            answer_ids=tuple(continuation(self.tokenizer, query, sample.answer)),
        )


def new_tokens(subtask: str) -> int:
    """Return how many tokens an answer may have."""
    return NEW_TOKENS[subtask.split("_")[0]]


def score(question: Question, text: str) -> dict[str, float]:
    """Return `match`: the share of the references in the answer; for reading 1 if any of them is in it.

    A reference counts where it is a substring, whatever the case.
    """
    answer = text.lower()
    found = [reference.lower() in answer for reference in question.expected]
    return {"match": float(any(found)) if question.group in READING else sum(found) / len(found)}


def _recipes(
    name: str, stream: str, split: str, material: Material, reading: ruler_qa.Reading | None
) -> Iterator[Recipe]:
    """The samples of a subtask; sample i draws from a stream of its own, whatever was drawn before."""
    rngs = (random.Random(f"{stream}/{index}") for index in count())
    if reading is not None:
        rows = reading.order(split, random.Random(stream))
        for row, rng in zip(rows, rngs, strict=False):
            yield ruler_qa.recipe(reading, row, material, rng)
        return
    makers: dict[str, Callable[..., Recipe]] = {
        "vt": ruler_words.variable_tracking,
        "cwe": ruler_words.common_words,
        "fwe": ruler_words.frequent_words,
    }
    for index, rng in enumerate(rngs):
        if name in makers:
            yield makers[name](material, rng)
        else:
            yield ruler_niah.recipe(ruler_niah.NIAH[name], material, rng, index)


def _sha256(material: Material, readings: dict[str, ruler_qa.Reading]) -> str:
    """Name what the samples are made from."""
    templates = asdict(material.templates)
    return rows_sha256(
        [[key, str(value)] for key, value in templates.items()],
        [material.words.all, material.haystack],
        [[name, reading.sha256] for name, reading in readings.items()],
    )
