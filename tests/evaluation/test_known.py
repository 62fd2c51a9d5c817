"""Full attention at known answers: computed by the first cell of a task, and found by the others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from cells import samples_of
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.evaluation import known, reference
from kvexp.evaluation.known import KnownAnswers
from kvexp.model import load_once
from kvexp.prompt import Context
from kvexp.run import run

PASSKEY = "task=passkey task.context_tokens=200 task.n=2 task.n_facts=3 batch_size=2"


INTENTS = "task=intents task.context_tokens=300 task.n_labels=3 task.n_calibration=2 limit=5 batch_size=2"


def cell(folder: Path, *words: str, task: str = PASSKEY) -> Any:
    common = ["model=tiny-llama", "logger=none", "fidelity=true", *task.split(), f"output_dir={folder}"]
    [settings] = settings_of([*common, *words])
    return settings


def scores(settings: Any) -> list[dict[str, float]]:
    return [json.loads(line)["scores"] for line in samples_of(settings).splitlines()]


@pytest.mark.parametrize("task", [PASSKEY, INTENTS], ids=["questions", "labels"])
def test_full_attention_runs_once_for_all_cells(
    task: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    inner = known.Session.context

    def watched(self: Any, *arguments: Any) -> Any:
        if self.method.id == "full":
            encoded.append(arguments)
        return inner(self, *arguments)

    run(cell(tmp_path, "method=snapkv", "budget=60", task=task))
    monkeypatch.setattr(known.Session, "context", watched)
    other = cell(tmp_path, "method=knorm", "budget=60", task=task)
    run(other)
    assert not encoded
    alone = cell(tmp_path / "alone", "method=knorm", "budget=60", task=task)
    run(alone)
    assert encoded and samples_of(other) == samples_of(alone)
    assert all(one["kl"] > 0 for one in scores(other))


def test_full_attention_is_at_no_distance_from_itself(tmp_path: Path) -> None:
    settings = cell(tmp_path, "method=full")
    run(settings)
    assert len(scores(settings)) == 6
    assert all(
        one["kl"] == pytest.approx(0, abs=1e-6) and one["top1_agreement"] == 1 for one in scores(settings)
    )


def test_kept_states_give_the_distributions_of_a_plain_forward(tmp_path: Path) -> None:
    """Answers of several lengths behind contexts and queries of several lengths, kept and not."""
    loaded = load_once(cell(tmp_path, "method=full").model)
    contexts = [Context((), (helpers.tokens(n, seed=n),)) for n in (20, 33)]
    queries = [helpers.tokens(n, seed=50 + n) for n in (3, 5, 4)]
    answers, rows = [helpers.tokens(n, seed=90 + n) for n in (1, 4, 2)], [1, 0, 1]
    kept, anew = KnownAnswers(loaded, tmp_path), KnownAnswers(loaded, None)
    for known_answers in (kept, kept, KnownAnswers(loaded, tmp_path), anew):
        found = known_answers.distributions(contexts, queries, rows, answers)
        for row, query, answer, ours in zip(rows, queries, answers, found, strict=True):
            ids = [*contexts[row].ids, *query, *answer]
            plain = helpers.plain_logits(loaded.model, ids).log_softmax(-1)[-len(answer) - 1 : -1]
            torch.testing.assert_close(ours, plain, rtol=1e-4, atol=1e-4)
    assert len(list(tmp_path.glob("answers-*/manifest.json"))) == 1


def test_a_model_whose_logits_are_made_otherwise_is_asked_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        reference, "logits_of", lambda model, hidden: model.get_output_embeddings()(hidden) * 2
    )
    monkeypatch.setattr(known, "gives_logits", reference.gives_logits)
    settings = cell(tmp_path, "method=full")
    run(settings)
    assert not list(tmp_path.rglob("answers-*"))
    assert all(one["kl"] == 0 for one in scores(settings))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("reference.safetensors", b"half", "reference.safetensors is not what was written"),
        ("reference.safetensors", None, "reference.safetensors is missing"),
        ("manifest.json", b'{"model"', "manifest.json cannot be read"),
    ],
)
def test_what_was_kept_and_is_damaged_is_a_sentence(
    name: str, content: bytes | None, said: str, tmp_path: Path
) -> None:
    run(cell(tmp_path, "method=snapkv", "budget=60"))
    [path, _, *_] = sorted(tmp_path.glob(f"store/answers-*/{name}"))
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(UserError) as error:
        run(cell(tmp_path, "method=knorm", "budget=60"))
    folder = path.parent
    assert str(error.value) == (
        f"the reference in {folder} is damaged ({said}): remove that folder so that it is built again"
    )
