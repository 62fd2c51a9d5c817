"""Label tasks: score documents batch by batch, through the adapter, into lines of samples.jsonl.

Each document is scored three ways from one forward of its query: the label with the largest probability over
the label trie (`accuracy`), the same after subtracting each label's mean log-probability over unlabelled
queries under the same method and context (`accuracy_calibrated`), and the first line of free greedy
generation (`accuracy_free`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, TypeVar

import torch
from lm_eval.api.instance import Instance

from kvexp.prompt import Context
from kvexp.tasks.adapter import KVLM, query_instance
from kvexp.tasks.base import Document, TaskSet
from kvexp.tasks.fidelity import compared
from kvexp.tasks.metrics import first_line, same
from kvexp.tasks.trie import Trie, calibrated, label_bias

Item = TypeVar("Item")


class Reference(Protocol):
    """What a method is compared with: an adapter, or what is known of one."""

    def answer_distributions(
        self, instances: Sequence[Instance], answers: Sequence[Sequence[int]]
    ) -> list[torch.Tensor]:
        """Return for each document the log-probabilities [n, V] at its n teacher-forced answer tokens."""
        ...


class LabelEvaluation:
    """Scores the documents of a task set with an adapter, and with a reference beside it for fidelity."""

    def __init__(
        self, adapter: KVLM, task: TaskSet, context: Context, seed: int, reference: Reference | None = None
    ) -> None:
        self.adapter, self.task, self.context, self.seed = adapter, task, context, seed
        self.reference = reference
        self.trie = Trie.build(task.label_ids, task.end_id)
        self.stopped = adapter.stopper(task.stop)
        self.bias: torch.Tensor | None = None

    def instances(self, documents: Sequence[Document]) -> list[Instance]:
        """Return one lm-eval Instance for each document, context and query apart."""
        return [self.instance(d.query_ids, d.query) for d in documents]

    def instance(self, query_ids: Sequence[int], query: str = "") -> Instance:
        """Return the Instance of one query on this evaluation's context."""
        return query_instance(self.context, query_ids, query)

    def measure_bias(self, batch_size: int) -> None:
        """Average each label's log-probability over the unlabelled calibration queries."""
        scores = [
            self.adapter.label_scores([self.instance(query) for query in queries], self.trie)
            for queries in batched(sorted(self.task.calibration_queries, key=len), batch_size)
        ]
        self.bias = label_bias(torch.cat(scores))

    def score(self, documents: Sequence[Document]) -> list[dict[str, Any]]:
        """Return the samples of one batch."""
        assert self.bias is not None, "measure_bias comes first"
        instances = self.instances(documents)
        scores = self.adapter.label_scores(instances, self.trie)
        raw = scores.argmax(-1).tolist()
        unbiased = calibrated(scores, self.bias).argmax(-1).tolist()
        made, ends = self.adapter.continue_all(instances, self.task.max_new_tokens, self.stopped)
        fidelity = self.fidelity(instances, documents)
        samples = []
        for row, document in enumerate(documents):
            text = self.adapter.tokenizer.decode(made[row], skip_special_tokens=True)
            answers = {
                "answer": self.task.labels[raw[row]],
                "answer_calibrated": self.task.labels[unbiased[row]],
                "answer_free": first_line(text, self.task.stop),
            }
            samples.append(
                {
                    "id": document.id,
                    "sample": document.sample,
                    "seed": self.seed,
                    "query": document.query,
                    **answers,
                    "expected": document.expected,
                    "scores": {**self._correct(document, answers), **fidelity[row]},
                    "prompt_tokens": len(self.context) + len(document.query_ids),
                    "new_tokens": len(made[row]),
                    "stop": ends[row],
                }
            )
        return samples

    def _correct(self, document: Document, answers: dict[str, str]) -> dict[str, float]:
        names = {
            "answer": "accuracy",
            "answer_calibrated": "accuracy_calibrated",
            "answer_free": "accuracy_free",
        }
        found = {names[name]: float(same(answer, document.expected)) for name, answer in answers.items()}
        if self.task.permutation is not None:  # what the permuted context says
            shown = self.task.permutation[document.expected]
            found["accuracy_permuted"] = float(answers["answer"] == shown)
            found["accuracy_permuted_calibrated"] = float(answers["answer_calibrated"] == shown)
        return found

    def fidelity(
        self, instances: Sequence[Instance], documents: Sequence[Document]
    ) -> list[dict[str, float]]:
        """KL(full || method) in nats and top-1 agreement, means over a document's teacher-forced answer."""
        if self.reference is None:
            return [{} for _ in documents]
        answers = [d.expected_ids for d in documents]
        ours = self.adapter.answer_distributions(instances, answers)
        full = self.reference.answer_distributions(instances, answers)
        return [compared(p, q) for p, q in zip(full, ours, strict=True)]


def batched(items: Sequence[Item], size: int) -> list[Sequence[Item]]:
    """Cut items into runs of `size`, the last one shorter where they do not come out even."""
    return [items[at : at + size] for at in range(0, len(items), size)]


def by_length(documents: Sequence[Document]) -> list[Document]:
    """Order documents by the length of their query, so that a batch holds few pads; ties stay in order."""
    return sorted(documents, key=lambda document: len(document.query_ids))
