"""nba: does any operation of basketball teams break the rulebook, the context of all problems?

RuleArena (Zhou et al., 2024, arXiv 2412.08972). The context is the rulebook, 20 thousand tokens, a chunk for
each of its lines; a query states teams, players and operations, and the answer ends with a sentence of a
fixed form. `accuracy` is the published score: that sentence is in the answer, asterisks apart. It can also be
hit in the midst of an argument, so `accuracy_last` compares the last sentence of that form alone.

Departures: instruction and figures are in our own words, without a solved example; blank lines of the
rulebook go, so that no tokenizer merges two chunks; problems come in an order of ours that no seed changes,
so that the first few are of all levels. The benchmark has neither traces nor a validation split: both are
made by `kvexp.tasks.nba_made`.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.notes.units import Unit, as_unit
from kvexp.prompt import Context, continuation
from kvexp.tasks.base import Task, Trace, at_least
from kvexp.tasks.nba_data import LEVELS, Problem, load_problems, load_rules, sha256
from kvexp.tasks.nba_made import made
from kvexp.tasks.noted import Form, Frame
from kvexp.tasks.questions import Question, QuestionSet

INSTRUCTION = """\
You advise basketball teams on the salary rules of their league. Below are its rules. After them come facts \
about some teams and players, and operations that the teams carry out in order. Tell whether an operation \
breaks a rule.
Figures: the Salary Cap is $140,588,000 in this Salary Cap Year (2024-25) and was $136,000,000 in the one \
before; the Average Player Salary of the one before was $9,700,000; the Luxury Tax is $170,814,000, the \
First Apron Level $178,132,000, the Second Apron Level $188,931,000. A team salary that is given leaves out \
contracts which end with the 2023-24 year.
Rules:"""
ASK = """\
Name the exceptions that matter, then end with "Answer: False." if no rule is broken, or with \
"Answer: True. Illegal Operation: X. Problematic Team: Y." for the letters of the operation and the team.
Response:"""
_SENTENCE = re.compile(r"Answer: (?:False|True\. Illegal Operation: [A-Z]\. Problematic Team: [A-Z])")
N_VALIDATION = 100


@dataclass(frozen=True)
class Nba(Task):
    """The knobs of nba.

    `levels`: the levels that are asked (0 to 2); `n`: the first so many problems (null: all).
    `prompt`: "plain" or "chat" (the user's turn of the model's chat template).
    `max_new_tokens`: length of an answer. `source`: where problems and rules are read without a data folder.
    """

    id: ClassVar[str] = "nba"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = True
    known_answers: ClassVar[bool] = True
    units: ClassVar[bool] = True

    levels: tuple[int, ...] = LEVELS
    n: int | None = None
    prompt: Form = "plain"
    max_new_tokens: int = 2048
    source: str = "gh://SkyRiver-2000/RuleArena/main/nba"

    def __post_init__(self) -> None:
        at_least("task.n", self.n, 1)
        at_least("task.max_new_tokens", self.max_new_tokens, 1)
        if not self.levels or not set(self.levels) <= set(LEVELS):
            raise UserError("task.levels is a list of numbers from 0 to 2: set task.levels=[0,1,2]")

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the problems ("test"), or made ones ("validation"); no seed changes them.

        Raises UserError where data cannot be read, and for a tokenizer that cannot serve a shared context.
        """
        self.check_asked(split, limit)
        problems, rules = load_problems(data_dir, self.source), load_rules(data_dir, self.source)
        published = frozenset(one.facts for one in problems)
        frame = Frame(tokenizer, INSTRUCTION, self.prompt)
        context = frame.context(Unit(str(i), as_unit(rule), ()) for i, rule in enumerate(rules))
        asked = (
            self._asked(problems)
            if split == "test"
            else list(islice(_own("validation", published), N_VALIDATION))
        )
        return QuestionSet(
            questions=[
                self._question(frame, context, i, one) for i, one in enumerate(asked[: self.n][:limit])
            ],
            score=score,
            metrics=("accuracy", "accuracy_last"),
            data_sha256=sha256(problems, rules),
            notes={"source": data_dir or self.source, "context_tokens": len(context)},
            context=context,
            trace_source=NbaTraces(frame, published),
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; nothing is fetched."""
        try:
            return data_dir and sha256(load_problems(data_dir, ""), load_rules(data_dir, ""))
        except UserError:  # the files are gone: nothing to compare with
            return None

    def _asked(self, problems: list[Problem]) -> list[Problem]:
        chosen = [one for one in problems if one.level in self.levels]
        random.Random(f"{self.id}/test").shuffle(chosen)
        return chosen

    def _question(self, frame: Frame, context: Context, sample: int, one: Problem) -> Question:
        question = frame.question(
            (),
            f"{one.text}\n{ASK}",
            f"{one.target}.",
            id=one.id,
            sample=sample,
            expected=(one.target,),
            max_new_tokens=self.max_new_tokens,
            group=f"level {one.level}" if self.levels != (one.level,) else "",
        )
        return replace(question, context=context)


@dataclass(frozen=True)
class NbaTraces:
    """Draws made problems as traces; none states the facts of a published problem."""

    frame: Frame
    published: frozenset[str] = field(repr=False)

    def traces(self, n: int, labels: str, seed: int) -> list[Trace]:
        """See `QuestionSet.traces`; there are as many as wanted."""
        return [self._trace(one, labels) for one in islice(_own(f"traces/{seed}", self.published), n)]

    def _trace(self, one: Problem, labels: str) -> Trace:
        question = self.frame.question(
            (),
            f"{one.text}\n{ASK}",
            f"{one.target}.",
            id=one.id,
            sample=0,
            expected=(),
            max_new_tokens=1,
            group="",
        )
        end = continuation(self.frame.tokenizer, ".", "\n")
        return Trace(one.id, question.query_ids, (*question.answer_ids, *end) if labels == "gold" else ())


def score(question: Question, text: str) -> dict[str, float]:
    """Return whether the expected sentence is in the answer, and whether the last such sentence is it."""
    plain, target = text.replace("**", ""), question.expected[0]
    said = _SENTENCE.findall(plain)
    return {"accuracy": float(target in plain), "accuracy_last": float(bool(said) and said[-1] == target)}


def _own(stream: str, published: frozenset[str]) -> Iterator[Problem]:
    """Yield made problems with distinct facts, none of them published."""
    seen = set(published)
    for one in made(f"nba/{stream}"):
        if one.facts not in seen:
            seen.add(one.facts)
            yield one
