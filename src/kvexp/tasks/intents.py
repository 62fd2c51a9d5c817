"""`intents`: a many-shot task made from a seed, that a model of 135M parameters can learn from its context.

Guests write to a hotel desk; each intent has a few phrasings, varied by openers and slots, and an opaque
label that nobody can guess without the context. It tests recall of a map from pattern to label out of
near-duplicates (same phrasing, other opener or slot), not generalisation to phrasings that the context lacks.

Splits: queries are unique, balanced over labels, and occur neither in the context nor in a trace. Traces are
distinct and differ from the calibration queries. Otherwise short utterances repeat: within the context, and
between the context and the traces or calibration queries.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.prompt import continuation
from kvexp.tasks.base import at_least, at_most
from kvexp.tasks.intents_rows import Intent, IntentsDraw, UniqueRows, slot
from kvexp.tasks.intents_text import COLOURS, TOPICS, Topic
from kvexp.tasks.labels import LabelTask, Row

_SPARE = 4  # utterances of each phrasing that the queries leave to the context and the traces


@dataclass(frozen=True)
class Intents(LabelTask):
    """The generated task and its knobs.

    `n_labels`: intents, at most 16.
    `phrasings`: ways to say each, at most 8 (4 where all have a slot); more are harder.
    `slots`: "some" (about half of the phrasings have a slot, at least one of each intent) or "all" (harder).
    `label_kind`: "colours" (opaque, one token each), "descriptive", or "associated" (a related word).
    `order` of the context: "rounds" (each holds every label once: every truncation is balanced) or "random".
    `n_test`: queries of a split.
    """

    id: ClassVar[str] = "intents"
    header: ClassVar[str] = "Classify the query by its intent.\n"

    n_labels: int = 12
    phrasings: int = 3
    slots: Literal["some", "all"] = "some"
    label_kind: Literal["colours", "descriptive", "associated"] = "colours"
    order: Literal["rounds", "random"] = "rounds"
    n_test: int = 150

    def __post_init__(self) -> None:
        super().__post_init__()
        at_least("task.n_labels", self.n_labels, 2)
        at_most("task.n_labels", self.n_labels, len(TOPICS))
        at_least("task.phrasings", self.phrasings, 1)
        at_most("task.phrasings", self.phrasings, 8)
        at_least("task.n_test", self.n_test, 1)
        if self.slots == "all" and self.phrasings > 4:
            raise UserError(
                f"task.phrasings={self.phrasings} is too many for task.slots=all, since 4 have a slot: "
                "set task.phrasings=4 or less"
            )

    def draw(self, tokenizer: Any, seed: int, split: str, data_dir: str | None) -> IntentsDraw:
        """Draw intents, queries and calibration queries; the context and the traces follow on demand."""
        intents = self._intents(tokenizer, seed)
        unique = UniqueRows(intents, spare=_SPARE)
        # Only a context for validation has to lack the validation queries.
        names = ("test", "calibration") if split == "test" else ("test", "validation", "calibration")
        rows = {name: self._unique(unique, name, seed) for name in names}
        return IntentsDraw(
            stream=f"{self.id}/{seed}",
            intents=intents,
            order=self.order,
            labels=tuple(sorted(intent.label for intent in intents)),
            queries=tuple(rows[split]),
            held_out=tuple(row for name in rows if name != "calibration" for row in rows[name]),
            calibration=tuple(rows["calibration"]),
        )

    def _intents(self, tokenizer: Any, seed: int) -> tuple[Intent, ...]:
        rng = random.Random(f"{self.id}/{seed}/intents")
        topics = rng.sample(TOPICS, self.n_labels)
        drawn = [self._phrasings(rng, topic) for topic in topics]
        if self.label_kind == "colours":
            labels = rng.sample(_one_token_first(tokenizer, self.n_labels, self.answer_word), self.n_labels)
        else:
            labels = [getattr(topic, self.label_kind) for topic in topics]
        return tuple(Intent(label, phrasings) for label, phrasings in zip(labels, drawn, strict=True))

    def _phrasings(self, rng: random.Random, topic: Topic) -> tuple[str, ...]:
        candidates = [phrasing for phrasing in topic.phrasings if self.slots == "some" or slot(phrasing)]
        while True:
            drawn = rng.sample(candidates, self.phrasings)
            # A phrasing without a slot varies by eight openers alone: too little to make up an intent.
            if any(map(slot, drawn)):
                return tuple(drawn)

    def _unique(self, unique: UniqueRows, name: str, seed: int) -> list[Row]:
        knob = "n_calibration" if name == "calibration" else "n_test"
        size = getattr(self, knob)
        rows = unique.rows(random.Random(f"{self.id}/{seed}/{name}"), size, name, balanced=True)
        if len(rows) < size:
            raise UserError(
                f"task.{knob}={size} asks for more distinct queries than the generator has left: "
                f"set task.{knob}={max(len(rows), 1)} or less"
            )
        return rows


def _one_token_first(tokenizer: Any, n: int, answer_word: str) -> Sequence[str]:
    """The colours that are one token after a space, or all of them where fewer than `n` are.

    One token each makes the label trie one step deep; longer labels cost more steps but score as correctly.
    """
    single = [word for word in COLOURS if len(continuation(tokenizer, f"{answer_word}:", f" {word}")) == 1]
    return single if len(single) >= n else COLOURS
