"""passkey: facts early in a long text, each asked for on its own after the text, by the depth of the fact.

Made so that a model of 135M parameters can answer with its whole cache: a fact is one sentence, the question
repeats it up to the answer, and the answer is one word, of one token where the tokenizer allows. After the
passkey retrieval of Landmark Attention (Mohtashami & Jaggi, 2023, arXiv 2305.16300), with words for its
digits, which small models copy badly, and with several facts in a text, so that one encoded context serves
several questions. The log-probability of the answer tells more than accuracy where few answers are right.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.prompt import continuation
from kvexp.tasks.base import Task, at_least, at_most
from kvexp.tasks.fitting import cut
from kvexp.tasks.passkey_text import NAMES, build, draw, take
from kvexp.tasks.questions import Question, QuestionSet
from kvexp.tasks.texts import Text, load_texts, texts_sha256


@dataclass(frozen=True)
class Passkey(Task):
    """The knobs of passkey.

    `context_tokens`: length of a context in tokens, BOS included. `n`: contexts. `n_facts`: facts in each.
    `region`: the share of the context, from its start, in whose equal parts the facts lie, one in the middle
    of each. `source`: the text around them, any source of `kvexp.tasks.texts.load_texts`.
    """

    id: ClassVar[str] = "passkey"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True

    context_tokens: int = 2048
    n_facts: int = 8
    region: float = 0.35
    n: int = 4
    source: str = "stdlib"

    def __post_init__(self) -> None:
        at_least("task.context_tokens", self.context_tokens, 64)
        at_least("task.n_facts", self.n_facts, 1)
        at_most("task.n_facts", self.n_facts, len(NAMES))
        at_least("task.n", self.n, 1)
        if not 0 < self.region <= 1:
            raise UserError(
                f"task.region={self.region} is no share of the context: set it above 0 and up to 1"
            )

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions, context by context; those of one context share it.

        Raises:
            UserError: the facts do not fit, the texts are missing, or the tokenizer merges context and query.
        """
        self.check_asked(split, limit)
        texts = load_texts(self.source, data_dir)
        stream = f"{self.id}/{seed}" + ("" if split == "test" else f"/{split}")
        contexts = self.n if limit is None else min(self.n, -(-limit // self.n_facts))
        questions: list[Question] = []
        for index in range(contexts):
            rng = random.Random(f"{stream}/{index}")
            questions += self._questions(tokenizer, texts, rng, index)
        return QuestionSet(
            questions=questions[:limit],
            score=score,
            metrics=("accuracy",),
            data_sha256=texts_sha256(texts),
            stop=("\n",),
            notes={"source": self.source},
        )

    def _questions(
        self, tokenizer: Any, texts: Sequence[Text], rng: random.Random, index: int
    ) -> list[Question]:
        pieces = take(tokenizer, texts, self.context_tokens, rng)
        facts = draw(tokenizer, self.n_facts, self.region, pieces, rng)
        text = build(tokenizer, pieces, facts, self.context_tokens)
        prompts = [cut(tokenizer, text, fact.question) for fact in facts]
        answers = [tuple(continuation(tokenizer, fact.question, f" {fact.word}")) for fact in facts]
        return [
            Question(
                id=f"{index}-{place}",
                sample=index * self.n_facts + place,
                context=prompts[0].context,
                query=prompt.query,
                query_ids=prompt.query_ids,
                expected=(fact.word,),
                max_new_tokens=len(answer) + 2,
                group=f"depth {round(100 * fact.depth)}%",
                answer_ids=answer,
            )
            for place, (fact, prompt, answer) in enumerate(zip(facts, prompts, answers, strict=True))
        ]


def score(question: Question, text: str) -> dict[str, float]:
    """Return `accuracy`: 1 if the first word of the answer is the one expected, whatever the case."""
    word = text.split()[0] if text.split() else ""
    return {"accuracy": float(word.strip(".,;:!?\"'()").casefold() == question.expected[0].casefold())}
