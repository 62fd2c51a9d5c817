"""Prompts made of notes: an instruction, the units that a memory returned for the question, the question.

The header of the context is BOS and the instruction, the same in every prompt of a task; each unit is a chunk
of it, tokenised on its own as it stands after a line break. So a unit is the same tokens wherever it stands,
and its keys and values can be made once and used in every prompt.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, TypeVar

from kvexp.errors import UserError
from kvexp.notes.units import Notes, NotesKind, Turn, Unit
from kvexp.prompt import Context, bos_ids, continuation, encode
from kvexp.tasks.base import at_most
from kvexp.tasks.questions import Question

Item = TypeVar("Item")
Form = Literal["plain", "chat"]
_MARK = "\ufffc"  # stands for the units while a chat is rendered


@dataclass(frozen=True)
class Frame:
    """What stands around the units and the question, for one tokenizer.

    `instruction` ends without a line break. In a chat it opens the user's turn, which the question ends.
    """

    tokenizer: Any
    instruction: str
    form: Form = "plain"

    def context(self, units: Iterable[Unit]) -> Context:
        """Return the context of units, in the order given."""
        return Context(self._header, tuple(self._chunk(unit.text) for unit in units))

    def question(
        self,
        units: Sequence[Unit],
        asked: str,
        gold: str,
        *,
        id: str,
        sample: int,
        expected: tuple[str, ...],
        max_new_tokens: int,
        group: str,
    ) -> Question:
        """Return a question whose query is `asked`, and whose answer is `gold` where it is teacher-forced."""
        query = f"{asked}{self._ends[1]}"
        answer = gold if self._ends[1] else f" {gold}"
        return Question(
            id=id,
            sample=sample,
            context=self.context(units),
            query=query,
            query_ids=tuple(continuation(self.tokenizer, "\n", query)),
            expected=expected,
            max_new_tokens=max_new_tokens,
            group=group,
            answer_ids=tuple(continuation(self.tokenizer, query, answer)) if gold else (),
        )

    @cached_property
    def _ends(self) -> tuple[str, str]:
        """The text before the units, and what follows the question."""
        opening = f"{self.instruction}\n"
        if self.form == "plain":
            return opening, ""
        if not self.tokenizer.chat_template:
            raise UserError("the tokenizer of this model has no chat template: set task.prompt=plain")
        turns = [{"role": "user", "content": f"{opening}{_MARK}"}]
        rendered = self.tokenizer.apply_chat_template(
            turns,
            tokenize=False,
            add_generation_prompt=True,
            enable_thinking=False,  # answers are short: a template that knows the word leaves thinking out
        )
        before, _, after = rendered.partition(_MARK)
        return before, after

    @cached_property
    def _header(self) -> tuple[int, ...]:
        bos = bos_ids(self.tokenizer) if self.form == "plain" else ()
        return bos + tuple(encode(self.tokenizer, self._ends[0]))

    @cached_property
    def _chunks(self) -> dict[str, tuple[int, ...]]:
        return {}

    def _chunk(self, text: str) -> tuple[int, ...]:
        if text not in self._chunks:
            self._chunks[text] = tuple(continuation(self.tokenizer, "\n", text))
        return self._chunks[text]


def drawn(every: Sequence[Item], n: int | None, stream: str, knob: str) -> list[Item]:
    """Return `n` items, chosen by the random stream of that name, in their order; all where `n` is None.

    Raises UserError where there are none (`knob` is what left them out), or fewer than `n`.
    """
    if not every:
        raise UserError(f"the data has no question that {knob} allows: leave it out, or choose more")
    at_most("task.n", n, len(every))
    chosen = range(len(every)) if n is None else random.Random(stream).sample(range(len(every)), n)
    return [every[place] for place in sorted(chosen)]


@dataclass
class Filled:
    """A memory of one kind, filled with turns, for the questions on them."""

    kind: NotesKind
    turns: Sequence[Turn]

    @cached_property
    def notes(self) -> Notes:
        """The memory; it is filled at the first question."""
        notes = self.kind.open()
        for turn in self.turns:
            notes.add(turn)
        return notes
