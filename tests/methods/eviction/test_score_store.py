"""Scores of KVzip are made once for all budgets, and whatever was found gives what was made."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from kvexp.methods.eviction.kvzip import KVzip
from kvexp.methods.eviction.reader import Reader

METHOD = KVzip(sinks=2, chunk=16, repeat=(250, 9, 31))
CONTEXT = helpers.context(6, 7, 3, seed=3)


@pytest.fixture
def repeats(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that grows by one for each chunk that is repeated."""
    calls: list[int] = []
    repeat = Reader.repeat

    def counted(self: Reader, *args: Any) -> None:
        calls.append(1)
        repeat(self, *args)

    monkeypatch.setattr(Reader, "repeat", counted)
    return calls


def kept(cache: Any) -> list[torch.Tensor]:
    return [t for layer in cache.layers for _, tensors in layer.tensors_by_batch() for t in tensors]


def encoded(budget: int, folder: Path | None, method: KVzip = METHOD, sha256: str = "a" * 64) -> Any:
    model = helpers.model("llama")
    return method.encode(model, CONTEXT, method.opened(model, folder, sha256), budget)


def test_another_budget_finds_the_scores_and_keeps_the_same_rows(tmp_path: Path, repeats: list[int]) -> None:
    plain, made = encoded(12, None), encoded(12, tmp_path)
    before = len(repeats)
    other, again = encoded(20, tmp_path), encoded(12, tmp_path)
    assert len(repeats) == before and before == 2 * 3  # three chunks of at most 16 of 42 tokens, twice
    assert other.counters["scores_found"] == 1 and "scores_found" not in made.counters
    for one in (made, again):
        for ours, theirs in zip(kept(one), kept(plain), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
        assert one.evictor.meter.summary() == plain.evictor.meter.summary()
    fresh = encoded(20, None)
    for ours, theirs in zip(kept(other), kept(fresh), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


def test_other_weights_knobs_and_damage_are_scored_anew(tmp_path: Path, repeats: list[int]) -> None:
    encoded(12, tmp_path)
    [file] = (tmp_path / "kvzip").iterdir()
    others = [replace(METHOD, sinks=3), replace(METHOD, plus=True)]
    for more in ({"sha256": "b" * 64}, *({"method": method} for method in others)):
        before = len(repeats)
        encoded(12, tmp_path, **more)
        assert len(repeats) > before
    file.write_bytes(file.read_bytes()[:100])
    before = len(repeats)
    encoded(12, tmp_path)
    assert len(repeats) > before and len(list((tmp_path / "kvzip").iterdir())) == 4
