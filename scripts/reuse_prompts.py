"""What the tables of reuse are measured on: prompts of LoCoMo, and one of them under a method of reuse.

Prompts go round the conversations, so that any number of them covers all. Units are what the memory finds;
where none of them holds evidence, the best one that does takes the place of the last.
"""

from __future__ import annotations

import random
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import replace
from fractions import Fraction
from itertools import islice, zip_longest
from typing import Any

import torch

from kvexp.attention.options import Options, set_options
from kvexp.cache.chunk_store import Chunk, ChunkStore
from kvexp.cache.kv_cache import KVCache
from kvexp.cell import knobs
from kvexp.errors import UserError
from kvexp.methods.baseline.full import Full
from kvexp.methods.reuse.reposition import Reposition
from kvexp.model import load_once
from kvexp.notes.units import Notes, Unit
from kvexp.prompt import Context, continuation
from kvexp.schema import Settings
from kvexp.tasks.adapter import cut, ends_of
from kvexp.tasks.batch import QueryBatch
from kvexp.tasks.fidelity import token_scores
from kvexp.tasks.locomo import Locomo
from kvexp.tasks.locomo_data import Asked, Conversation, load_conversations
from kvexp.tasks.noted import Filled
from kvexp.tasks.questions import Question

Line = dict[str, Any]
_ALL = 10**6  # units: more than any memory holds


class Bench:
    """A model, and the questions that are asked of it."""

    def __init__(self, settings: Settings) -> None:
        if not isinstance(settings.task, Locomo):
            raise UserError("reuse is measured where evidence is known, by unit: take task=locomo")
        self.settings, spec = settings, settings.model
        self.loaded = load_once(spec)
        self.model, self.tokenizer = self.loaded.model, self.loaded.tokenizer
        set_options(self.model, Options(spec.attention, spec.prefill_chunk, spec.compiled))
        self.task = settings.load_task(self.tokenizer)

    def questions(self, count: int) -> list[Question]:
        """Return the first `count` questions; UserError where fewer have evidence and an answer."""
        known = {one.id: one for one in self.task.questions if one.answer_ids}
        every = load_conversations(self.settings.data_dir)
        rounds = zip_longest(*(self._of(one, known) for one in every))
        found = list(islice((one for some in rounds for one in some if one is not None), count))
        if len(found) < count:
            raise UserError(f"prompts={count}, but only {len(found)} questions can be asked: set fewer")
        return found

    def _of(self, talk: Conversation, known: dict[str, Question]) -> Iterator[Question]:
        """Yield the questions on a conversation, each text once, in an order drawn from the seed."""
        assert isinstance(self.settings.task, Locomo)
        filled, turns = Filled(self.settings.task.notes, talk.turns), {turn.id for turn in talk.turns}
        asked = [*{one.question: one for one in talk.asked if one.id in known}.values()]
        random.Random(f"reuse/{self.settings.seed}/{talk.id}").shuffle(asked)
        for one in asked:
            if one.evidence & turns:
                yield self._with_evidence(known[one.id], one, filled.notes)

    def _with_evidence(self, question: Question, asked: Asked, notes: Notes) -> Question:
        def holds(unit: Unit) -> bool:
            return bool(asked.evidence & set(unit.sources))

        chunks = question.context.chunks
        if not any(map(holds, notes.retrieve(asked.question, len(chunks)))):
            text = next(unit.text for unit in notes.retrieve(asked.question, _ALL) if holds(unit))
            chunks = (*chunks[:-1], tuple(continuation(self.tokenizer, "\n", text)))
        return replace(question, context=Context(question.context.header, chunks))


class Prompt:
    """One question: full recompute of it, and what its units are in each store."""

    def __init__(self, bench: Bench, question: Question, answers: bool = False) -> None:
        self.bench, self.question, self.answers = bench, question, answers
        self.model, self.context = bench.model, question.context
        self.exact = Reposition().opened(self.model)
        self._packed: dict[str, ChunkStore] = {}
        cache = Full().encode(self.model, self.context)
        self.reference = self._logits(cache)
        self.full = self._measured(cache, self.reference)

    def under(self, method: Any) -> Line:
        """Return what a method keeps of full recompute, and what it really recomputed."""
        query, store = self.question.query_ids, self.store(method)
        cache = method.encode(self.model, self.context, store, query=query)
        report = cache.report
        line = {
            "union_tokens": report.union,
            "union": report.union_share,
            "computed": report.share,
            "seconds": report.seconds,
        }
        return line | self._measured(cache, self._logits(cache))

    def store(self, method: Any) -> ChunkStore:
        """Return the store of what a method places: units are encoded once, and packed from there."""
        codec = method.codec(self.model)
        if codec is None:
            return self.exact
        if codec.name not in self._packed:
            Reposition().encode(self.model, self.context, self.exact)
            self._packed[codec.name] = store = method.opened(self.model)
            header = self.context.header
            for prefix, ids in [((), header), *((header, unit) for unit in self.context.chunks)]:
                chunk = self.exact.get(prefix, ids, exact=not prefix)
                assert chunk is not None
                if prefix:
                    rows = [chunk.rows(layer) for layer in range(len(chunk.layers))]
                    chunk = Chunk.of(chunk.start, rows, codec)
                store.put(prefix, ids, chunk, exact=not prefix)
        return self._packed[codec.name]

    @torch.no_grad()
    def _logits(self, cache: KVCache) -> torch.Tensor:
        """The logits [T, V] after each token of the question, and of the answer but for its last."""
        ids = [*self.question.query_ids, *self.question.answer_ids[:-1]]
        with Full().attach(self.model):
            batch = torch.tensor([ids], device=self.bench.loaded.device)
            return self.model(batch, cache=cache.fork()).logits[0]

    def _measured(self, cache: KVCache, logits: torch.Tensor) -> Line:
        query, answer = self.question.query_ids, self.question.answer_ids
        following = torch.tensor([*query[1:], *answer], device=logits.device)
        found = token_scores(self.reference, logits, following)
        border = len(query) - 1  # from here on the next token is one of the answer
        line: Line = {"logprob": -float(found["nll"][border:].sum())}
        for name, part in (("question", slice(border)), ("answer", slice(border, None))):
            line[f"kl_{name}"] = float(found["kl"][part].mean())
            line[f"top1_{name}"] = float(found["top1_agreement"][part].mean())
        return line | (self._answered(cache) if self.answers else {})

    def _answered(self, cache: KVCache) -> Line:
        """The scores of the answer that is decoded."""
        bench, stop = self.bench, self.bench.task.stop
        ends = ends_of(self.model, bench.tokenizer)

        def stopped(ids: list[int]) -> str | None:
            if ids[-1] in ends or any(mark in bench.tokenizer.decode(ids) for mark in stop):
                return "stop"
            return None

        with Full().attach(self.model):
            batch = QueryBatch(self.model, cache, [self.question.query_ids])
            [made], _ = batch.generate(self.question.max_new_tokens, stopped)
        text = str(bench.tokenizer.decode(made, skip_special_tokens=True))
        return bench.task.score(self.question, cut(text, stop))


def share_within(lengths: Sequence[int], total: int) -> Fraction:
    """Return the largest share with which units of these lengths give at most `total` tokens together.

    Of a unit of n tokens a share gives ceil(share * n). Where even the smallest gives more, it is returned.
    """
    shares = sorted({Fraction(k, n) for n in lengths for k in range(1, n + 1)})
    place = bisect_right(shares, total, key=lambda share: given(share, lengths))
    return shares[max(0, place - 1)]


def given(share: Fraction, lengths: Sequence[int]) -> int:
    """Return how many tokens of units of these lengths a share gives."""
    return sum(-(-share.numerator * n // share.denominator) for n in lengths)


def knobs_of(method: Any) -> Line:
    """Return the name of a method and all of its knobs, as plain data; of None, nothing."""
    return {} if method is None else {"name": method.id, **knobs(method)}
