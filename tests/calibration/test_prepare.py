"""Traces with each kind of label, and memories that are found again by what they were made from."""

from __future__ import annotations

import functools
import json

import lightning
import pytest
import torch

import helpers
import kvexp
from kvexp.budget import Budget
from kvexp.calibration.prepare import draw_traces, prepare
from kvexp.errors import UserError
from kvexp.methods.memory.asm import ASM
from kvexp.specs import CalibrationSpec
from kvexp.tasks.intents import Intents

trainer = functools.partial(lightning.Trainer, accelerator="cpu", devices=1)
SEED = 3


@pytest.fixture(scope="module")
def loaded():
    return kvexp.load("tiny-llama")


@pytest.fixture(scope="module")
def task(loaded):
    return Intents(context_tokens=300).load(loaded.tokenizer, seed=SEED)


def drawn(spec, task, loaded):
    return draw_traces(spec, task, loaded, task.context, SEED)


def test_labels_none_gold_and_wrong(task, loaded):
    none, gold, wrong = (
        drawn(CalibrationSpec(n=6, labels=x), task, loaded) for x in ("none", "gold", "wrong")
    )
    answers = dict(zip(task.answer_ids, task.labels, strict=True))
    sources = task.traces(6, "gold", SEED)
    for i, source in enumerate(sources):
        query = tuple(source.query_ids)
        assert none[i] == query
        assert gold[i] == query + tuple(source.answer_ids) and tuple(source.answer_ids) in answers
        other = wrong[i][len(query) :]
        assert wrong[i][: len(query)] == query and other in answers and other != tuple(source.answer_ids)
    assert len(set(none)) == 6


def brute_force(loaded, context, query, task) -> int:
    """The label of largest probability when only labels can follow: one plain forward for each label."""
    paths = [(*ids, task.end_id) for ids in task.label_ids]
    totals = []
    for path in paths:
        table = helpers.plain_logits(loaded.model, [*context.ids, *query, *path])[-len(path) - 1 : -1]
        total = 0.0
        for at, token in enumerate(path):
            allowed = sorted({other[at] for other in paths if other[:at] == path[:at]})
            total += float(table[at, allowed].log_softmax(0)[allowed.index(token)])
        totals.append(total)
    return max(range(len(totals)), key=totals.__getitem__)


def test_labels_of_the_model_are_its_answers_under_the_context(task, loaded):
    spec = CalibrationSpec(n=5, labels="model", batch_size=2)
    traces, queries = drawn(spec, task, loaded), drawn(CalibrationSpec(n=5), task, loaded)
    for trace, query in zip(traces, queries, strict=True):
        best = brute_force(loaded, task.context, query, task)
        assert trace == (*query, *task.answer_ids[best])


def made(tmp_path, loaded, task, method=None, n=6, budget=8, seed=0, keep=False, traces=None):
    traces = drawn(CalibrationSpec(n=n), task, loaded) if traces is None else traces
    method = method or ASM()
    return prepare(method, loaded, task.context, traces, Budget(budget), seed, tmp_path, 4, trainer, keep)


def test_a_memory_is_built_once_and_found_again(tmp_path, task, loaded):
    memory, folder, built = made(tmp_path, loaded, task)
    assert built and not list(tmp_path.glob("samples-*"))
    again, same, built = made(tmp_path, loaded, task, ASM(lookup="two_level", probe=3))  # as it is looked up
    assert not built and same == folder
    for index, layer in memory.layers.items():
        assert all(torch.equal(x, again.layers[index].tensors[name]) for name, x in layer.tensors.items())
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["model"] == loaded.sha256 and manifest["context"] == task.context.key
    assert manifest["knobs"] == ASM().stored_knobs() and manifest["dtype"] == "torch.float32"
    assert (manifest["budget"], manifest["seed"], manifest["method"]) == ("8", 0, "asm")


@pytest.mark.parametrize("change", [{"method": ASM(aggregate="mean")}, {"budget": 9}, {"seed": 1}, {"n": 7}])
def test_whatever_decides_its_content_makes_another_memory(tmp_path, task, loaded, change):
    first = made(tmp_path, loaded, task)
    other = made(tmp_path, loaded, task, **change)
    assert other[2] and other[1] != first[1]


def test_samples_are_shared_by_methods_that_collect_the_same(tmp_path, task, loaded, monkeypatch):
    _, _, built = made(tmp_path, loaded, task, keep=True)
    [samples] = tmp_path.glob("samples-*")
    from kvexp.calibration.module import Runner

    monkeypatch.setattr(Runner, "_run", lambda *_: pytest.fail("collected again"))
    fresh, _, built = made(
        tmp_path, loaded, task, ASM(layout="shared", aggregate="mean"), budget=5, keep=True
    )
    assert built and list(tmp_path.glob("samples-*")) == [samples]
    monkeypatch.undo()
    alone, _, _ = made(tmp_path / "alone", loaded, task, ASM(layout="shared", aggregate="mean"), budget=5)
    for index, layer in alone.layers.items():
        assert all(torch.equal(x, fresh.layers[index].tensors[name]) for name, x in layer.tensors.items())


def test_no_traces_are_refused_and_a_failing_build_leaves_no_samples(tmp_path, task, loaded):
    with pytest.raises(UserError, match="calibration has nothing to learn from"):
        made(tmp_path, loaded, task, traces=[])
    with pytest.raises(UserError, match="layout=pairs joins 2 heads"):
        made(tmp_path, loaded, task, ASM(layout="pairs"))
    assert not list(tmp_path.glob("samples-*"))


def test_a_saved_memory_of_other_facts_is_refused(tmp_path, task, loaded):
    _, folder, _ = made(tmp_path, loaded, task)
    manifest = json.loads((folder / "manifest.json").read_text())
    (folder / "manifest.json").write_text(json.dumps({**manifest, "traces": "others"}))
    with pytest.raises(UserError, match="built for traces='others', not '"):
        made(tmp_path, loaded, task)
