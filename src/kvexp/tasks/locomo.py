"""locomo: questions about months of conversation, answered from the notes that an agent's memory returns.

Evaluating Very Long-Term Conversational Memory of LLM Agents (Maharana et al., 2024, arXiv 2402.17753). Each
question has a context of its own: the units that the memory finds for it, in the order found. Answers are
decoded greedily, 32 tokens at most. Questions on time ask for a date by the dates of the conversation; those
of category 5, whose answer is nowhere in it, offer the wrong answer and "Not mentioned in the conversation"
in an order that is drawn for each question from the seed.

Departures: prompts are in our own words, and a photo that is shared stands as its caption.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.notes.amem import AMem
from kvexp.notes.units import NotesKind
from kvexp.tasks.base import Task, at_least
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.locomo_data import CATEGORIES, Asked, Conversation, load_conversations
from kvexp.tasks.locomo_scores import METRICS, NOT_MENTIONED, gold_answer, score
from kvexp.tasks.noted import Filled, Form, Frame, drawn
from kvexp.tasks.questions import Question, QuestionSet

INSTRUCTION = (
    "These are notes of what two people said to each other over many months, each with the date on which it"
    " was said. Answer the question after them from the notes alone, in a short phrase, and where possible in"
    " the words of the notes."
)
_DATES = "Give an approximate date, worked out from the dates in the notes."
_TWO = "Choose the right answer:"


@dataclass(frozen=True)
class Locomo(Task):
    """The knobs of locomo.

    `notes`: the memory: its name, or {name: NAME, knob: value}; `k`: units that it returns.
    `categories`: the categories that are asked, by their numbers (1 multi-hop, 2 temporal, 3 open-domain,
    4 single-hop, 5 adversarial).
    `n`: questions, drawn from all with the seed, in published order (null: all).
    `prompt`: "plain" or "chat" (the user's turn of the model's chat template).
    `max_new_tokens`: length of an answer.
    """

    id: ClassVar[str] = "locomo"
    kind: ClassVar[str] = "questions"
    splits: ClassVar[tuple[str, ...]] = ("test",)
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True
    units: ClassVar[bool] = True

    notes: NotesKind = field(default_factory=AMem)
    k: int = 10
    categories: tuple[int, ...] = (1, 2, 3, 4, 5)
    n: int | None = None
    prompt: Form = "plain"
    max_new_tokens: int = 32

    def __post_init__(self) -> None:
        for knob in ("k", "n", "max_new_tokens"):
            at_least(f"task.{knob}", getattr(self, knob), 1)
        if not self.categories or not set(self.categories) <= set(CATEGORIES):
            raise UserError("task.categories is a list of numbers from 1 to 5: set task.categories=[1,2,3,4]")

    @property
    def has_units(self) -> bool:
        """Whether a context holds more than one note."""
        return self.k > 1

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions in published order.

        Raises:
            UserError: there is no such split, the data cannot be read or has no such questions, fewer exist
                than are wanted, or a chat is wanted of a tokenizer that has no chat template.
        """
        self.check_asked(split, limit)
        conversations = load_conversations(data_dir)
        chosen = self._chosen(conversations, seed)[:limit]
        frame = Frame(tokenizer, INSTRUCTION, self.prompt)
        filled = {one.id: Filled(self.notes, one.turns) for one in conversations}
        return QuestionSet(
            questions=[
                self._question(frame, filled[one.id], asked, seed, sample)
                for sample, (one, asked) in enumerate(chosen)
            ],
            score=score,
            metrics=METRICS,
            data_sha256=_sha256(conversations),
            stop=("\n",),
            notes={
                "memory": self.notes.id,
                "categories": dict(
                    sorted(Counter(CATEGORIES[asked.category] for _, asked in chosen).items())
                ),
            },
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; nothing is fetched."""
        try:
            return None if data_dir is None else _sha256(load_conversations(data_dir))
        except UserError:  # the files are gone: nothing to compare with
            return None

    def _chosen(self, conversations: Sequence[Conversation], seed: int) -> list[tuple[Conversation, Asked]]:
        every = [
            (one, asked) for one in conversations for asked in one.asked if asked.category in self.categories
        ]
        return drawn(every, self.n, f"{self.id}/{seed}", "task.categories")

    def _question(self, frame: Frame, filled: Filled, asked: Asked, seed: int, sample: int) -> Question:
        category, gold = asked.category, gold_answer(asked.category, asked.answer)
        text, answer = f"Question: {asked.question}", gold
        if category == 5:
            first = random.Random(f"{self.id}/{seed}/{asked.id}").random() < 0.5
            offered = (NOT_MENTIONED, asked.answer) if first else (asked.answer, NOT_MENTIONED)
            text = f"{text} {_TWO}\n(a) {offered[0]}\n(b) {offered[1]}"
            answer = f"({'a' if first else 'b'}) {gold}"
        elif category == 2:
            text = f"{text} {_DATES}"
        return frame.question(
            filled.notes.retrieve(asked.question, self.k),
            f"{text}\nAnswer:",
            answer,
            id=asked.id,
            sample=sample,
            expected=(gold,),
            max_new_tokens=self.max_new_tokens,
            group=CATEGORIES[category] + ("" if category == 5 else " | categories 1-4"),
        )


def _sha256(conversations: Sequence[Conversation]) -> str:
    return rows_sha256(
        [
            row
            for one in conversations
            for row in (
                [one.id],
                *([turn.id, turn.line] for turn in one.turns),
                *([asked.id, asked.question, asked.answer, str(asked.category)] for asked in one.asked),
            )
        ]
    )
