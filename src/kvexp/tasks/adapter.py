"""kvexp as a model of lm-eval: whole Instances in, scores out, everything through the method.

An Instance of our own tasks carries its context and query apart (`doc["context"]`, `doc["query_ids"]`): the
context is encoded once and every query runs on a fork. An Instance of a stock task is one flat prompt and runs
as a query on an empty context, which is right for `full` only. Both go through `QueryBatch`; lm-eval's own HFLM is
not inherited, since it scores in plain forwards that would bypass the method.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM

from kvexp.errors import UserError
from kvexp.progress import track
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch
from kvexp.tasks.session import Session
from kvexp.tasks.trie import Trie

NOTHING = Context((), ())


class KVLM(TemplateLM):
    """Serves Instances through a Session; call it inside `session.method.attach(model, memory)`."""

    def __init__(self, session: Session, batch_size: int = 32, max_new_tokens: int = 256) -> None:
        super().__init__()
        self.session, self.batch_size, self.max_new_tokens = session, batch_size, max_new_tokens
        self.tokenizer = session.loaded.tokenizer
        self._latest: tuple[tuple[int, ...], QueryBatch] | None = None

    @property
    def eot_token_id(self) -> int:
        """The token that ends a text."""
        return self.tokenizer.eos_token_id

    @property
    def prefix_token_id(self) -> int:
        """What an empty prompt is scored after: BOS where there is one, as in lm-eval's HFLM."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else bos

    @property
    def max_length(self) -> int:
        """The model's context length in tokens."""
        return self.session.loaded.context_limit

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids without special tokens, unless they are asked for."""
        return self.tokenizer.encode(string, add_special_tokens=bool(add_special_tokens))

    def batch(self, instances: Sequence[Instance]) -> QueryBatch:
        """Run the queries of instances that share a context; the latest batch is kept and not run twice."""
        key = tuple(id(instance.doc) for instance in instances)
        if self._latest is None or self._latest[0] != key:
            doc = instances[0].doc
            queries = [instance.doc["query_ids"] for instance in instances]
            self._latest = key, self.session.run(doc["context"], queries)
        return self._latest[1]

    def label_scores(self, instances: Sequence[Instance], trie: Trie) -> torch.Tensor:
        """Return log-probabilities [B, labels] over the labels of a trie; one instance a document."""
        batch = self.batch(instances)
        logits = {0: batch.logits[:, list(trie.nodes[0].children)]}
        for number, node in enumerate(trie.nodes[1:], 1):
            after = batch.extend([list(node.path)] * len(instances))[:, -1]
            logits[number] = after[:, list(node.children)]
        return trie.scores(logits)

    def answer_distributions(
        self, instances: Sequence[Instance], answers: Sequence[Sequence[int]]
    ) -> list[Any]:
        """Return for each document the log-probabilities [n, V] at its n teacher-forced answer tokens."""
        batch = self.batch(instances)
        first = batch.logits.log_softmax(-1)[:, None]  # [B, 1, V]
        if max(len(a) for a in answers) > 1:
            more = batch.extend([list(a[:-1]) for a in answers]).log_softmax(-1)
            first = torch.cat([first, more], dim=1)
        return [rows[: len(answer)] for rows, answer in zip(first, answers, strict=True)]

    def continue_all(
        self, instances: Sequence[Instance], max_new_tokens: int, stopped: Callable[[list[int]], str | None]
    ) -> tuple[list[list[int]], list[str]]:
        """Return greedy continuations of the instances' queries and why each ended."""
        batch = self.batch(instances)
        with self.session.watch("decode"):
            made, ends = batch.generate(max_new_tokens, stopped)
        self.session.decoded += sum(len(ids) - 1 for ids in made)  # the first token comes with the query
        return made, ends

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[tuple[str, str], list[int], list[int]]],
        disable_tqdm: bool = False,
        **_: Any,
    ) -> list[tuple[float, bool]]:
        """Score continuations of flat prompts: (sum of log-probabilities, whether greedy decoding gives it)."""
        results: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i][1]) - len(requests[i][2]))
        batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
        for rows in track(batches, "scoring", len(batches), "batches"):
            pairs = [self._fitted(requests[i][1], requests[i][2]) for i in rows]
            docs = [{"context": NOTHING, "query_ids": context} for context, _ in pairs]
            instances = [Instance("loglikelihood", doc, (), 0) for doc in docs]
            tables = self.answer_distributions(instances, [answer for _, answer in pairs])
            for i, table, (_, answer) in zip(rows, tables, pairs, strict=True):
                ids = torch.tensor(answer, device=table.device)
                value = table.gather(-1, ids[:, None]).sum()
                results[i] = float(value), bool((table.argmax(-1) == ids).all())
        return results

    def _fitted(self, context: list[int], answer: list[int]) -> tuple[list[int], list[int]]:
        """Cut an over-long prompt on the left, as lm-eval does."""
        return context[max(0, len(context) + len(answer) - self.max_length - 1) :], answer

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts greedily until a stop string, an end token or the task's length limit."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        for members in groups.values():
            options = dict(requests[members[0]].args[1])
            if options.get("do_sample") or options.get("temperature"):
                raise UserError(
                    "this task samples its answers, and task=lm_eval decodes greedily: choose another task"
                )
            until = options.get("until") or []
            until = [until] if isinstance(until, str) else list(until)
            limit = options.get("max_gen_toks") or options.get("max_new_tokens") or self.max_new_tokens
            prompts = {i: self.tok_encode(requests[i].args[0])[-(self.max_length - limit) :] for i in members}
            order = sorted(members, key=lambda i: -len(prompts[i]))
            batches = [order[i : i + self.batch_size] for i in range(0, len(order), self.batch_size)]
            for rows in track(batches, "generating", len(batches), "batches"):
                docs = [{"context": NOTHING, "query_ids": prompts[i]} for i in rows]
                instances = [Instance("generate_until", doc, (), 0) for doc in docs]
                made, _ = self.continue_all(instances, limit, self.stopper(until))
                for i, ids in zip(rows, made, strict=True):
                    answers[i] = cut(self.tokenizer.decode(ids, skip_special_tokens=True), until)
        return answers

    def loglikelihood_rolling(self, requests: list[Instance], disable_tqdm: bool = False) -> list[float]:
        """Refuse: perplexity over documents has no query that a method could serve."""
        raise UserError(
            "tasks of rolling perplexity have no query to serve, choose another task for task.name"
        )

    def stopper(self, until: Sequence[str]) -> Callable[[list[int]], str | None]:
        """Return a function that says why generated ids end here ("eos", "stop"), or None to go on."""
        ends = ends_of(self.session.model, self.tokenizer)

        def stopped(ids: list[int]) -> str | None:
            if ids[-1] in ends:
                return "eos"
            text = self.tokenizer.decode(ids) if until else ""
            return "stop" if any(stop in text for stop in until) else None

        return stopped


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """Return every token id that ends a generation: the tokenizer's and all of the model's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    several = declared if isinstance(declared, list | tuple) else [declared]
    return {int(i) for i in (*several, tokenizer.eos_token_id) if i is not None}


def cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    places = [text.find(stop) for stop in until if stop and stop in text]
    return text[: min(places)] if places else text
