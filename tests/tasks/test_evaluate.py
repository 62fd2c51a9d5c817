"""Scoring of label tasks: by hand with a scripted adapter, and over tiny models in batches of any size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import helpers
from helpers import Calibration
from kvexp import tiny
from kvexp.budget import Budget
from kvexp.methods.base import Method
from kvexp.methods.baseline.full import Full
from kvexp.methods.baseline.truncate import Truncate
from kvexp.methods.memory.asm import ASM
from kvexp.prompt import Context
from kvexp.report.samples import line
from kvexp.tasks.adapter import KVLM
from kvexp.tasks.base import Document, TaskSet
from kvexp.tasks.evaluate import LabelEvaluation, batched
from kvexp.tasks.intents import Intents
from kvexp.tasks.scores import fidelity_summary, label_metrics
from kvexp.tasks.session import Session

TOKENIZER = tiny.tokenizer()


def ids(text: str) -> tuple[int, ...]:
    return tuple(TOKENIZER.encode(text, add_special_tokens=False))


LABELS = ("blue", "green", "red")
CONTEXT = Context(ids("Say it.\n"), (ids("a: red\n"), ids("b: blue\n")))
CALIBRATION = [list(ids(f"unknown {i}:")) for i in range(3)]


def task(expected: Sequence[str], permutation: dict[str, str] | None = None) -> TaskSet:
    """A task of one document for each expected label."""
    return TaskSet(
        context=CONTEXT,
        documents=[
            Document(f"test-{i}", i, f"query {i}:", ids(f"query {i}:"), label, ids(f" {label}"))
            for i, label in enumerate(expected)
        ],
        labels=LABELS,
        label_ids=tuple(ids(f" {label}") for label in LABELS),
        answer_ids=tuple(ids(f" {label}\n") for label in LABELS),
        end_id=ids("\n")[0],
        calibration_queries=CALIBRATION,
        data_sha256="0" * 64,
        stop=("\n",),
        max_new_tokens=7,
        permutation=permutation,
    )


class Scripted:
    """An adapter that answers from a script: label scores, continuations and distributions by query."""

    tokenizer = TOKENIZER

    def __init__(self, scores: dict[str, list[float]], texts: Sequence[str] = (), tables: Any = None) -> None:
        self.scores, self.texts, self.tables = scores, list(texts), tables
        self.asked: list[list[str]] = []

    def stopper(self, stop: Sequence[str]) -> Any:
        """The stop strings themselves."""
        return stop

    def label_scores(self, instances: Sequence[Any], trie: Any) -> torch.Tensor:
        """Scores of the script, for queries on the right context."""
        assert all(instance.doc["context"] is CONTEXT for instance in instances)
        self.asked.append([TOKENIZER.decode(instance.doc["query_ids"]) for instance in instances])
        return torch.tensor([self.scores[query] for query in self.asked[-1]])

    def continue_all(self, instances: Sequence[Any], limit: int, stopped: Any) -> Any:
        """Texts of the script."""
        made = [list(ids(text)) for text in self.texts[: len(instances)]]
        return made, ["stop" if text.endswith("\n") else "length" for text in self.texts]

    def answer_distributions(self, instances: Sequence[Any], answers: Sequence[Any]) -> list[torch.Tensor]:
        """Distributions of the script."""
        return [torch.tensor(rows).log() for rows in self.tables]


SCORES = {
    "unknown 0:": [-0.1, -3.0, -3.0],
    "unknown 1:": [-0.1, -3.0, -3.0],
    "unknown 2:": [-1.0, -0.6, -4.5],  # the mean over all three: [-0.4, -2.2, -3.5]
    "query 0:": [-0.3, -2.0, -1.8],  # raw blue; less the bias [0.1, 0.2, 1.7]: red
    "query 1:": [-0.2, -2.5, -3.6],  # [0.2, -0.3, -0.1]: blue both ways
    "query 2:": [-0.9, -0.8, -3.0],  # raw green; [-0.5, 1.4, 0.5]: green
}
TEXTS = [" red\n", " blue herring\n", " greener"]


def scored(tasks: TaskSet, adapter: Any, reference: Any = None) -> list[dict[str, Any]]:
    evaluation = LabelEvaluation(adapter, tasks, CONTEXT, 5, reference)
    evaluation.measure_bias(2)
    return evaluation.score(tasks.documents)


def test_calibration_subtracts_the_mean_over_unlabelled_queries() -> None:
    adapter = Scripted(SCORES, TEXTS)
    samples = scored(task(["red", "blue", "blue"]), adapter)
    assert adapter.asked[:2] == [["unknown 0:", "unknown 1:"], ["unknown 2:"]]
    assert [sample["answer"] for sample in samples] == ["blue", "blue", "green"]
    assert [sample["answer_calibrated"] for sample in samples] == ["red", "blue", "green"]
    metrics = label_metrics(samples)
    assert metrics["accuracy"]["value"] == pytest.approx(1 / 3)
    assert metrics["accuracy_calibrated"]["value"] == pytest.approx(2 / 3)
    # blue: 1 right, 1 wrongly given, 1 missed: 1/2; green 0 and red 0; then blue 2/3, red 1, green 0
    assert metrics["macro_f1"]["value"] == pytest.approx(0.5 / 3)
    assert metrics["macro_f1_calibrated"]["value"] == pytest.approx((2 / 3 + 1) / 3)
    assert set(metrics) == {
        "accuracy",
        "accuracy_calibrated",
        "accuracy_free",
        "macro_f1",
        "macro_f1_calibrated",
    }


def test_free_generation_answers_with_its_first_line() -> None:
    samples = scored(task(["red", "blue", "green"]), Scripted(SCORES, TEXTS))
    assert [sample["answer_free"] for sample in samples] == ["red", "blue herring", "greener"]
    assert [sample["scores"]["accuracy_free"] for sample in samples] == [1.0, 0.0, 0.0]
    assert [sample["stop"] for sample in samples] == ["stop", "stop", "length"]
    assert [sample["new_tokens"] for sample in samples] == [5, 14, 8]
    assert samples[0] | {"scores": {}} == {
        "id": "test-0",
        "sample": 0,
        "seed": 5,
        "query": "query 0:",
        "answer": "blue",
        "answer_calibrated": "red",
        "answer_free": "red",
        "expected": "red",
        "scores": {},
        "prompt_tokens": 8 + 7 + 8 + 8,
        "new_tokens": 5,
        "stop": "stop",
    }


def test_permuted_labels_are_scored_both_ways() -> None:
    shown = {"red": "blue", "blue": "green", "green": "red"}
    samples = scored(task(["red", "blue", "blue"], shown), Scripted(SCORES, TEXTS))
    assert [sample["scores"]["accuracy"] for sample in samples] == [0.0, 1.0, 0.0]
    assert [sample["scores"]["accuracy_permuted"] for sample in samples] == [1.0, 0.0, 1.0]
    assert [sample["scores"]["accuracy_permuted_calibrated"] for sample in samples] == [0.0, 0.0, 1.0]
    assert label_metrics(samples)["accuracy_permuted"]["value"] == pytest.approx(2 / 3)


def test_fidelity_is_the_mean_over_answer_tokens_of_kl_from_full() -> None:
    full = [[[0.5, 0.5], [0.9, 0.1]], [[0.2, 0.8]]]
    ours = [[[0.25, 0.75], [0.9, 0.1]], [[0.2, 0.8]]]
    reference = Scripted(SCORES, tables=full)
    samples = scored(task(["red", "blue"]), Scripted(SCORES, TEXTS, ours), reference)
    kl = 0.5 * math.log(0.5 / 0.25) + 0.5 * math.log(0.5 / 0.75)
    assert samples[0]["scores"]["kl"] == pytest.approx(kl / 2, abs=1e-6)
    assert samples[0]["scores"]["top1_agreement"] == 0.5  # a tie goes to the lower index
    assert samples[1]["scores"]["kl"] == 0 and samples[1]["scores"]["top1_agreement"] == 1
    summary = fidelity_summary(samples, {"kl": [1.0]})
    assert summary["kl"] == pytest.approx(kl / 4, abs=1e-6) == summary["kl_median"]
    assert summary["top1_agreement"] == 0.75 and summary["n"] == 2
    assert summary["by_position"] == {"kl": [1.0]}
    assert "kl" not in label_metrics(samples) and "by_position" not in fidelity_summary(samples, None)


def test_batches_hold_everything_in_order() -> None:
    assert batched([1, 2, 3, 4, 5], 2) == [[1, 2], [3, 4], [5]]
    assert batched([], 3) == []


TASK = Intents(context_tokens=700, n_labels=4, n_test=10, n_calibration=9)


def evaluated(method: Method, family: str, batch_size: int, folder: Path, fidelity: bool = False) -> Any:
    """The samples of a real task under a method on a tiny model."""
    model, tasks, budget = helpers.model(family), TASK.load(TOKENIZER, seed=1), Budget(128)
    memory = None
    if method.needs_calibration:
        traces = [trace.query_ids for trace in tasks.traces(12, "none", 1)]
        memory = method.prepare(model, Calibration(tasks.context, traces, folder), budget)
    loaded = SimpleNamespace(model=model, tokenizer=TOKENIZER)
    reference = KVLM(Session(loaded, Full(), None, Budget(None)), batch_size) if fidelity else None
    samples: list[dict[str, Any]] = []
    with method.attach(model, memory):
        adapter = KVLM(Session(loaded, method, memory, budget), batch_size)
        evaluation = LabelEvaluation(adapter, tasks, tasks.context, 1, reference)
        evaluation.measure_bias(batch_size)
        for documents in batched(tasks.documents, batch_size):
            samples += evaluation.score(documents)
    return samples


@pytest.mark.parametrize("family", ["llama", "gpt_oss"])
@pytest.mark.parametrize("method", [Full(), Truncate(), ASM(aggregate="mean")], ids=lambda method: method.id)
def test_batches_of_unequal_queries_change_no_byte(method: Method, family: str, tmp_path: Path) -> None:
    lengths = {len(document.query_ids) for document in TASK.load(TOKENIZER, seed=1).documents}
    assert len(lengths) > 3
    one, eight, three = (
        [line(sample) for sample in evaluated(method, family, size, tmp_path / str(size), fidelity=True)]
        for size in (1, 8, 3)
    )
    assert one == eight == three


def test_full_differs_from_itself_in_nothing(tmp_path: Path) -> None:
    samples = evaluated(Full(), "qwen3", 4, tmp_path, fidelity=True)
    summary = fidelity_summary(samples, None)
    assert summary["kl"] == summary["kl_median"] == summary["kl_stderr"] == 0
    assert summary["top1_agreement"] == 1


def test_a_method_that_changes_answers_shows_in_its_fidelity(tmp_path: Path) -> None:
    samples = evaluated(replace(Truncate(), keep="head"), "qwen3", 4, tmp_path, fidelity=True)
    assert fidelity_summary(samples, None)["kl"] > 0.01
