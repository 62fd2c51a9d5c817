"""Tasks of questions end to end on a tiny model."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cells import cell, samples_of
from kvexp import model
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.evaluation.length import warn_of_questions
from kvexp.evaluation.questions import every, planned
from kvexp.model import load_once
from kvexp.prompt import Context
from kvexp.report.collect import collect
from kvexp.run import run
from kvexp.tasks.batch import QueryBatch
from kvexp.tasks.session import Session

PASSKEY = ("task=passkey", "task.context_tokens=200", "task.n=2", "task.n_facts=3", "limit=null")
INTENTS = ("task=intents", "task.context_tokens=300", "task.n_labels=4", "task.n_calibration=4", "limit=4")
DFS = ("task=recursive_state_query", "task.steps=6:10:2", "task.n_per_step=2", "task.max_new_tokens=12")


def small(folder: Path, *words: str) -> Any:
    """A cell of `words` alone: the label task's own words have no part in it."""
    common = ["model=tiny-llama", "logger=none", f"output_dir={folder}", *words]
    [settings] = settings_of(common)
    return settings


def test_passkey_is_scored_by_group_and_logprob(tmp_path: Path) -> None:
    settings = small(tmp_path, *PASSKEY[:-1], "method=full")
    record = run(settings)
    groups = [name for name in record["metrics"] if name.startswith("accuracy [")]
    assert len(groups) == 3 and record["metrics"]["logprob"]["n"] == 6
    lines = [json.loads(line) for line in samples_of(settings).splitlines()]
    assert len({line["id"] for line in lines}) == len(lines) == 6
    # The log-probability is that of a plain forward over the whole text.
    loaded = load_once(settings.model)
    task = settings.load_task(loaded.tokenizer)
    question = task.questions[4]
    ids = [*question.context.ids, *question.query_ids, *question.answer_ids]
    logits = loaded.model(torch.tensor([ids])).logits[0].float().log_softmax(-1)
    n = len(question.answer_ids)
    expected = sum(float(logits[-n - 1 + i, token]) for i, token in enumerate(question.answer_ids))
    assert lines[4]["scores"]["logprob"] == pytest.approx(expected, abs=2e-3)


@pytest.mark.parametrize("method", ["full", "snapkv"])
def test_the_batch_changes_nothing(method: str, tmp_path: Path) -> None:
    words = [*DFS, f"method={method}", "budget=200", "temperature=0.8", "top_p=0.95", "samples=2"]
    one = small(tmp_path / "one", *words, "batch_size=1")
    many = small(tmp_path / "many", *words, "batch_size=8")
    record, other = run(one), run(many)
    assert samples_of(one) == samples_of(many)
    assert record["metrics"] == other["metrics"] and not collect([tmp_path / "many"]).problems
    lines = [json.loads(line) for line in samples_of(one).splitlines()]
    cut_short = [line["stop"] == "length" for line in lines]
    assert record["metrics"]["truncated"]["value"] == pytest.approx(sum(cut_short) / len(cut_short))
    assert any(cut_short)
    assert lines[0]["answer"] != lines[1]["answer"]  # two samples of one question
    if method == "snapkv":
        assert record["cache"]["evicted"] > 0 and record["cache"]["entries_peak"] == 200
        assert record["cache"]["entries_peak_prompt"] > 1000


def test_a_method_that_evicts_while_decoding_is_counted_whole(tmp_path: Path) -> None:
    words = (*DFS, "method=rkv", "budget=100", "method.interval=4", "method.trigger=slack")
    cache = run(small(tmp_path, *words))["cache"]
    assert cache["entries_peak"] == 104  # budget + interval, before rows leave
    assert 100 <= cache["entries_mean"] <= 103


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words = (*DFS, "method=full", "batch_size=2")
    whole = small(tmp_path / "whole", *words)
    run(whole)
    settings, generate, calls = small(tmp_path / "cut", *words), QueryBatch.generate, []

    def failing(self: QueryBatch, *args: Any, **more: Any) -> Any:
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("killed")
        return generate(self, *args, **more)

    with monkeypatch.context() as patch:
        patch.setattr(QueryBatch, "generate", failing)
        with pytest.raises(RuntimeError, match="killed"):
            run(settings)
    assert len(samples_of(settings).splitlines()) == 4  # two batches of two
    assert run(settings)["status"] == "complete"
    assert samples_of(settings) == samples_of(whole)


@pytest.mark.parametrize("words", ["method.query_aware=true", "method.prefill=off method.interval=2"])
def test_a_run_that_lacks_its_record_alone_tells_what_the_method_did(words: str, tmp_path: Path) -> None:
    """Rows that leave with the query or later are gone as well when all answers were on disk."""
    settings = small(tmp_path, *PASSKEY[:-1], "method=snapkv", "budget=64", *words.split())
    first, before = run(settings), samples_of(settings)
    (settings.run_dir / "record.json").unlink()
    again = run(settings)
    assert again["status"] == "complete" and samples_of(settings) == before
    assert again["metrics"] == first["metrics"]
    for name in ("entries_peak", "context_tokens", "storage"):
        assert again["cache"][name] == first["cache"][name]
    assert 0 < again["cache"]["evicted"] <= first["cache"]["evicted"]


@pytest.mark.parametrize(
    ("words", "beyond", "told"),
    [
        (PASSKEY[:-1], "prompt", "lower task.context_tokens"),
        (DFS, "prompt", "lower task.steps"),
        (DFS, "answer", "lower task.max_new_tokens"),
    ],
)
def test_prompts_beyond_the_model_are_said(
    words: tuple[str, ...], beyond: str, told: str, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    settings = small(tmp_path, *words, "method=full")
    loaded = load_once(settings.model)
    questions = settings.load_task(loaded.tokenizer).questions
    session = Session(loaded, settings.method, None, settings.budget)
    longest = max(len(q.context) + len(q.query_ids) + q.max_new_tokens for q in questions)
    limit = longest - 1
    if beyond == "prompt":
        limit = max(len(q.context) + len(q.query_ids) for q in questions) - 1
    for fits in (longest, None):
        session.loaded = dataclasses.replace(loaded, context_limit=fits)
        warn_of_questions(session, settings.task, questions)
    assert not caplog.messages
    session.loaded = dataclasses.replace(loaded, context_limit=limit)
    warn_of_questions(session, settings.task, questions)
    assert caplog.messages == [
        f"texts of up to {longest} tokens exceed the {limit} that this model was made for: {told}"
    ]


def test_a_run_says_that_its_prompts_are_too_long(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = small(tmp_path, *PASSKEY[:-1], "method=full")
    loaded = dataclasses.replace(load_once(settings.model), context_limit=205)
    monkeypatch.setattr(model, "load_once", lambda spec, **more: loaded)
    run(settings)
    assert "exceed the 205 that this model was made for: lower task.context_tokens" in caplog.text


@pytest.mark.parametrize("words", [PASSKEY[:-1], INTENTS])
def test_a_context_that_the_model_cannot_read_is_refused(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(tmp_path, *words, "method=full")
    loaded = dataclasses.replace(load_once(settings.model), context_limit=150)
    monkeypatch.setattr(model, "load_once", lambda spec, **more: loaded)
    with pytest.raises(UserError, match=r"^a context of \d+ tokens exceeds the 150 that this model was made"):
        run(settings)
    assert run(small(tmp_path, *words, "method=truncate", "budget=120"))["status"] == "complete"


def test_batches_hold_one_context_or_contexts_of_like_length() -> None:
    class Q:
        def __init__(self, name: str, length: int) -> None:
            self.id, self.context = name, Context((), (tuple(range(length)),))

    questions = [Q("a", 5), Q("b", 90), Q("c", 5), Q("d", 7), Q("e", 80)]
    plans = [[one.id for one in batch] for batch in planned(questions, 2, 1)]  # type: ignore[arg-type]
    assert plans == [["a", "c"], ["d", "e"], ["b"]]
    assert [one.id for one in every(questions[:1], 2)] == ["a/0", "a/1"]  # type: ignore[arg-type]


def test_sampling_is_refused_where_it_means_nothing(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="samples no answers"):
        cell(tmp_path, "temperature=0.5")
    with pytest.raises(UserError, match="equal answers come from greedy decoding"):
        small(tmp_path, *DFS, "method=full", "samples=3")
    with pytest.raises(UserError, match=r"top_p=0\.9 has no part in greedy decoding"):
        small(tmp_path, *DFS, "method=full", "top_p=0.9")
    with pytest.raises(UserError, match="compares along known answers"):
        small(tmp_path, *DFS, "method=full", "fidelity=true")
