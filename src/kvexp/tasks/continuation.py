"""continuation: long texts go on, teacher-forced, while rows leave the cache: perplexity, KL and agreement.

The honest measure of fidelity for a model that is too small for reasoning benchmarks: each text is read up to
`prefill` tokens, then fed on in blocks, and the distribution of every next token is compared with that of
attention to everything.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.prompt import bos_ids, encode
from kvexp.tasks.base import Task, at_least
from kvexp.tasks.texts import load_texts, texts_sha256


@dataclass(frozen=True)
class Stretch:
    """A text as token ids, `length` of the task, BOS included."""

    id: str
    sample: int
    ids: tuple[int, ...]


@dataclass(frozen=True)
class TextSet:
    """The texts of a split; the first `prefill` tokens of each are read at once, those behind are scored."""

    texts: list[Stretch]
    prefill: int
    block: int
    data_sha256: str


@dataclass(frozen=True)
class Continuation(Task):
    """The knobs of continuation.

    `source`: any source of `kvexp.tasks.texts.load_texts`. `n`: texts, disjoint stretches of the source.
    `prefill`: tokens that are read before anything is compressed. `length`: tokens of a text in all.
    `block`: tokens fed together and scored as one unit, at most; a method that evicts more often gets smaller
    ones, so that it evicts where it would while decoding.
    """

    id: ClassVar[str] = "continuation"
    kind: ClassVar[str] = "continuation"
    shared_context: ClassVar[bool] = False

    source: str = "stdlib"
    n: int = 4
    prefill: int = 1024
    length: int = 2048
    block: int = 128

    def __post_init__(self) -> None:
        at_least("task.n", self.n, 1)
        at_least("task.prefill", self.prefill, 1)
        at_least("task.block", self.block, 1)
        if self.length < self.prefill + 2:
            raise UserError(
                f"task.length={self.length} leaves nothing to score behind task.prefill={self.prefill}: set"
                f" task.length={self.prefill + self.block} or more"
            )

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> TextSet:
        """Return `n` stretches; each opens with a text of the source and runs on into the next ones."""
        self.check_asked(split, limit)
        texts = load_texts(self.source, data_dir)
        random.Random(f"{self.id}/{split}/{seed}").shuffle(texts)
        bos = bos_ids(tokenizer)
        stretches: list[Stretch] = []
        name, ids = "", list(bos)
        for text in texts:
            name = name or text.name
            ids += encode(tokenizer, text.text if len(ids) == len(bos) else "\n\n" + text.text)
            if len(ids) >= self.length:
                stretches.append(Stretch(name, len(stretches), tuple(ids[: self.length])))
                name, ids = "", list(bos)
            if len(stretches) == self.n:
                chosen = stretches if limit is None else stretches[:limit]
                return TextSet(chosen, self.prefill, self.block, texts_sha256(texts))
        raise UserError(
            f"task.source={self.source} has {len(stretches)} stretches of task.length={self.length} tokens:"
            f" set task.n={max(1, len(stretches))} or less, or a smaller task.length"
        )
