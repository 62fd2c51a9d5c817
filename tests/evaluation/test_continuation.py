"""Continuation end to end on a tiny model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from cells import samples_of
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.model import load_once
from kvexp.run import run

WORDS = (
    "model=tiny-llama",
    "task=continuation",
    "task.n=2",
    "task.prefill=60",
    "task.length=140",
    "logger=none",
)


def settings(folder: Path, *words: str) -> Any:
    [found] = settings_of([*WORDS, f"output_dir={folder}", *words])
    return found


def lines(of: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in samples_of(of).splitlines()]


def test_full_attention_is_its_own_reference(tmp_path: Path) -> None:
    full = settings(tmp_path, "method=full", "task.block=32")
    record = run(full)
    assert record["metrics"]["kl"]["value"] == pytest.approx(0, abs=1e-6)
    assert record["metrics"]["top1_agreement"]["value"] == 1
    loaded = load_once(full.model)
    for text, line in zip(full.load_task(loaded.tokenizer).texts, lines(full), strict=True):
        logits = loaded.model(torch.tensor([text.ids])).logits[0].float().log_softmax(-1)
        following = torch.tensor(text.ids[61:])
        nll = -logits[60:-1].gather(1, following[:, None])[:, 0]
        assert line["scores"]["nll"] == pytest.approx(float(nll.mean()), abs=2e-3)
        spans = [float(part.mean()) for part in nll.split(32)]
        assert line["blocks"]["nll"] == pytest.approx(spans, abs=2e-3)
        assert len(line["blocks"]["kl"]) == 3  # 79 scored tokens


@pytest.mark.parametrize("budget", [40, 75])
def test_blocks_are_what_decoding_token_by_token_is(budget: int, tmp_path: Path) -> None:
    """Rows leave at the same places, whether the cache is full at once or fills up on the way."""
    words = ("method=rkv", "method.interval=16", "method.trigger=slack", f"budget={budget}")
    blocks = settings(tmp_path / "blocks", *words)
    single = settings(tmp_path / "single", *words, "task.block=1")
    record, other = run(blocks), run(single)
    assert record["cache"]["evicted"] == other["cache"]["evicted"] > 0
    for one, two in zip(lines(blocks), lines(single), strict=True):
        for name, value in one["scores"].items():
            assert value == pytest.approx(two["scores"][name], abs=2e-3), name
    assert record["metrics"]["kl"]["value"] > 0.01


def test_a_budget_that_holds_the_text_loses_nothing(tmp_path: Path) -> None:
    record = run(settings(tmp_path, "method=knorm", "method.interval=8", "budget=140"))
    assert record["metrics"]["kl"]["value"] == pytest.approx(0, abs=1e-5)
    assert record["cache"]["evicted"] == 0 if "evicted" in record["cache"] else True


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves nothing to score"):
        settings(tmp_path, "method=full", "task.length=60")
    with pytest.raises(UserError, match=r"stretches of task\.length=9000000 tokens"):
        run(settings(tmp_path, "method=full", "task.length=9000000"))
