"""kvexp as a model of lm-eval: whole Instances in, scores out, everything through the method.

An Instance of our own tasks carries its context and query apart (`query_instance`): the context is encoded
once and every query runs on a fork. An Instance of a stock task is one flat prompt and runs as a query on an
empty context, which is right for `full` only, and gives the numbers of lm-eval's own HFLM. Both go through
`QueryBatch`; HFLM is not inherited, since it scores in plain forwards that would bypass the method.
"""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, resolve_max_length

from kvexp.errors import UserError
from kvexp.progress import track
from kvexp.prompt import Context
from kvexp.tasks.batch import QueryBatch
from kvexp.tasks.session import Session
from kvexp.tasks.trie import Trie

log = logging.getLogger(__name__)
NOTHING = Context((), ())
IGNORED = (
    "until",
    "max_gen_toks",
    "do_sample",
    "temperature",
    "top_p",
    "top_k",
)  # no part in greedy decoding


class Prompt(NamedTuple):
    """A query and the context that it is asked on."""

    context: Context
    query: Sequence[int]


def query_instance(context: Context, query_ids: Sequence[int], text: str = "", answer: str = "") -> Instance:
    """Return an Instance that carries its context and query apart; `answer` follows the query `text`."""
    return Instance("loglikelihood", {"context": context, "query_ids": query_ids}, (text, answer), 0)


class KVLM(TemplateLM):
    """Serves Instances through a Session; call it inside `session.method.attach(model, memory)`."""

    def __init__(self, session: Session, batch_size: int = 32, max_new_tokens: int = 256) -> None:
        super().__init__()
        self.session, self.batch_size, self.max_new_tokens = session, batch_size, max_new_tokens
        self.tokenizer = session.loaded.tokenizer
        self._latest: tuple[Any, QueryBatch] | None = None

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
        return resolve_max_length(self.session.model.config, self.tokenizer)

    @property
    def tokenizer_name(self) -> str:
        """Name of the tokenizer, for lm-eval's cache of prompts."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def apply_chat_template(self, chat_history: Any, add_generation_prompt: bool = True) -> str:
        """Return a conversation in the model's chat format. Raises UserError where it has none."""
        if not self.tokenizer.chat_template:
            raise UserError("this model has no chat template: leave task.apply_chat_template=false")
        more = {"add_generation_prompt": add_generation_prompt}
        more["continue_final_message"] = not add_generation_prompt
        return self.tokenizer.apply_chat_template(chat_history, tokenize=False, **more)

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        """Token ids; None adds the tokenizer's own special tokens, but never a second BOS, as in HFLM."""
        if add_special_tokens is None:
            add_special_tokens = not string.startswith(self.tokenizer.decode(self.prefix_token_id))
        return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

    def batch(self, instances: Sequence[Instance]) -> QueryBatch:
        """Run the queries of instances that share a context; the latest batch is kept and not run twice."""
        context = instances[0].doc["context"]
        if any(instance.doc["context"].key != context.key for instance in instances):
            raise ValueError("the instances of a batch must share their context")
        queries = tuple(tuple(instance.doc["query_ids"]) for instance in instances)
        if self._latest is None or self._latest[0] != (context.key, queries):
            self._latest = None  # two batches at once would hold twice the memory
            self._latest = (context.key, queries), self.session.run(context, queries)
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
    ) -> list[torch.Tensor]:
        """Return for each document the log-probabilities [n, V] at its n teacher-forced answer tokens."""
        return self.batch(instances).answer_distributions(answers)

    def continue_all(
        self, instances: Sequence[Instance], max_new_tokens: int, stopped: Callable[[list[int]], str | None]
    ) -> tuple[list[list[int]], list[str]]:
        """Return greedy continuations of the instances' queries and why each ended."""
        batch = self.batch(instances)
        with self.session.watch("decode"):
            made, ends = batch.generate(max_new_tokens, stopped)
        self.session.decoded += sum(len(ids) - 1 for ids in made)  # the first token comes with the query
        return made, ends

    def loglikelihood(self, requests: list[Instance], disable_tqdm: bool = False) -> list[tuple[float, bool]]:
        """Score continuations: (sum of log-probabilities, whether greedy decoding gives it)."""
        prompts = [parts_of(request) for request in requests]
        pairs = list(zip(requests, prompts, strict=True))
        flat = iter(super().loglikelihood([r for r, p in pairs if p is None], disable_tqdm=True))
        ours = iter(self._scored([(p, self._encode_pair(*r.args)[1]) for r, p in pairs if p is not None]))
        return [next(flat if prompt is None else ours) for prompt in prompts]

    def _loglikelihood_tokens(
        self, requests: list[tuple[tuple[str, str], list[int], list[int]]], **options: Any
    ) -> list[tuple[float, bool]]:
        """Score continuations of flat prompts; an over-long one is cut on the left, as HFLM does."""
        pairs = []
        for _, context, answer in requests:  # the last token of an answer is never fed
            pairs.append((Prompt(NOTHING, self._cut(context, len(answer) - 1)), answer))
        return self._scored(pairs)

    def _scored(self, pairs: Sequence[tuple[Prompt, Sequence[int]]]) -> list[tuple[float, bool]]:
        results: list[tuple[float, bool]] = [(0.0, False)] * len(pairs)
        for rows in self._batches([prompt for prompt, _ in pairs], "scoring"):
            instances = [query_instance(*pairs[i][0]) for i in rows]
            tables = self.answer_distributions(instances, [pairs[i][1] for i in rows])
            for i, table in zip(rows, tables, strict=True):
                ids = torch.tensor(pairs[i][1], device=table.device)
                value = table.gather(-1, ids[:, None]).sum()
                results[i] = float(value), bool((table.argmax(-1) == ids).all())
        return results

    def _batches(self, prompts: Sequence[Prompt], what: str) -> Iterator[list[int]]:
        """Yield the indices of prompts in batches that share a context, long queries first."""
        order = sorted(range(len(prompts)), key=lambda i: (prompts[i].context.key, -len(prompts[i].query)))
        batches = []
        for _, group in itertools.groupby(order, key=lambda i: prompts[i].context.key):
            rows = list(group)
            batches += [rows[at : at + self.batch_size] for at in range(0, len(rows), self.batch_size)]
        yield from track(batches, what, len(batches), "batches")

    def _cut(self, ids: list[int], reserved: int) -> list[int]:
        """Return the last ids that leave `reserved` tokens of the model's context to an answer."""
        room = self.max_length - reserved
        if room < 1:
            raise UserError(
                f"this task has answers of {reserved} tokens, and the model takes {self.max_length} in all: "
                "choose another model or task"
            )
        if len(ids) > room:
            log.warning("a prompt of %d tokens is cut on the left: the model takes %d", len(ids), room)
        return ids[max(0, len(ids) - room) :]

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Continue prompts greedily until a stop string, an end token or the task's length limit."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = {}
        for i, request in enumerate(requests):
            groups.setdefault(repr(request.args[1]), []).append(i)
        for members in groups.values():
            until, limit = self._greedy(requests[members[0]].args[1])
            prompts, stopped = [self._prompt(requests[i], limit) for i in members], self.stopper(until)
            for rows in self._batches(prompts, "generating"):
                made, _ = self.continue_all([query_instance(*prompts[row]) for row in rows], limit, stopped)
                for row, ids in zip(rows, made, strict=True):
                    answers[members[row]] = cut(self.tokenizer.decode(ids, skip_special_tokens=True), until)
        return answers

    def _greedy(self, arguments: dict[str, Any]) -> tuple[list[str], int]:
        """Return (stop strings, most new tokens); UserError when a task wants more than greedy decoding."""
        options: dict[str, Any] = dict(normalize_gen_kwargs(arguments, self.max_new_tokens))
        more = [key for key in options if key not in IGNORED and (key, options[key]) != ("num_beams", 1)]
        if options["do_sample"] or more:
            wanted = "samples its answers" if options["do_sample"] else f"decodes with {', '.join(more)}"
            raise UserError(f"this task {wanted}, and task=lm_eval decodes greedily: choose another task")
        return list(options["until"] or []), options["max_gen_toks"]

    def _prompt(self, request: Instance, limit: int) -> Prompt:
        if (prompt := parts_of(request)) is not None:
            return prompt
        ids = self._cut(self.tok_encode(request.args[0]), limit)
        return Prompt(NOTHING, ids or [self.prefix_token_id])

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


def parts_of(instance: Instance) -> Prompt | None:
    """Return the context and query of an Instance that carries them apart, None for a flat prompt."""
    doc = instance.doc
    if not isinstance(doc, dict) or not isinstance(doc.get("context"), Context):
        return None
    return Prompt(doc["context"], doc["query_ids"])


def ends_of(model: Any, tokenizer: Any) -> set[int]:
    """Return every token id that ends a generation: the tokenizer's and all of the model's."""
    declared = getattr(model.generation_config, "eos_token_id", None)
    several = declared if isinstance(declared, list | tuple) else [declared]
    return {int(i) for i in (*several, tokenizer.eos_token_id) if i is not None}


def cut(text: str, until: Sequence[str]) -> str:
    """Return the text before the first stop string."""
    places = [text.find(stop) for stop in until if stop and stop in text]
    return text[: min(places)] if places else text
