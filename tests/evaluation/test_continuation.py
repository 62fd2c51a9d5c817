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
from kvexp.evaluation.continuation import blocks
from kvexp.model import load_once
from kvexp.report.collect import collect
from kvexp.run import run
from kvexp.tasks.continuation import TextSet

WORDS = (
    "model=tiny-llama",
    "task=continuation",
    "task.n=2",
    "task.prefill=60",
    "task.length=140",
    "logger=none",
)
LAZY = "{name: lazyeviction, interval: 12, recent: 12, alpha: 0.02}"
KIVI = ("method=kivi", "method.group=8", "method.residual=8")
OVER = "method.of={name: rkv, interval: 16, trigger: slack}"


def settings(folder: Path, *words: str) -> Any:
    [found] = settings_of([*WORDS, f"output_dir={folder}", *words])
    return found


def lines(of: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in samples_of(of).splitlines()]


def test_full_attention_is_its_own_reference(tmp_path: Path) -> None:
    full = settings(tmp_path, "method=full", "task.block=32")
    record = run(full)
    assert not collect([tmp_path]).problems  # the report takes it for whole
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


@pytest.mark.parametrize(
    "words",
    [
        ("method=rkv", "budget=75", "method.interval=16", "method.trigger=slack"),
        ("method=rkv", "budget=40", "method.interval=40"),  # more than a block, at multiples of 40
        ("method=two_phase", "budget=40", f"method.at_decode={LAZY}"),  # sees each token's attention apart
    ],
    ids=lambda words: words[0],
)
def test_blocks_are_what_decoding_token_by_token_is(words: tuple[str, ...], tmp_path: Path) -> None:
    """Rows leave at the same places, whether the cache is full at once or fills up on the way."""
    blocks = settings(tmp_path / "blocks", *words, "task.block=32")
    single = settings(tmp_path / "single", *words, "task.block=1", f"store_dir={blocks.store_dir}")
    record, other = run(blocks), run(single)
    assert record["cache"]["evicted"] == other["cache"]["evicted"] > 0
    for one, two in zip(lines(blocks), lines(single), strict=True):
        for name, value in one["scores"].items():
            assert value == pytest.approx(two["scores"][name], abs=2e-3), name
    assert record["metrics"]["kl"]["value"] > 0.01


@pytest.mark.parametrize(
    ("words", "counted"),
    [
        (KIVI, 91),  # of 99 rows, all but eight values
        ((*KIVI, "method.values=blocks"), 88),
        (("method=ott", "method.group=16", "method.residual=10", "method.outliers=1", "method.skip=0"), 80),
        ((*KIVI, OVER, "budget=40"), 3 * (40 - 8)),  # at the prompt's end, and 16 and 32 tokens later
    ],
    ids=["rows", "blocks", "ott", "over rkv"],
)
def test_rows_are_packed_as_token_by_token(words: tuple[str, ...], counted: int, tmp_path: Path) -> None:
    words = (*words, "task.length=100")
    blocks = settings(tmp_path / "blocks", *words, "task.block=32")
    single = settings(tmp_path / "single", *words, "task.block=1", f"store_dir={blocks.store_dir}")
    record, other = run(blocks), run(single)
    assert record["cache"]["quantised"] == other["cache"]["quantised"] == 3 * 2 * counted  # layers, texts
    held, whole = (
        max(one["cache"][name] for one in (record, other)) for name in ("bytes_peak", "bytes_full")
    )
    assert held < 0.6 * whole
    for one, two in zip(lines(blocks), lines(single), strict=True):
        for name, value in one["scores"].items():
            assert value == pytest.approx(two["scores"][name], abs=2e-3), name
    assert record["metrics"]["kl"]["value"] > 0.01


@pytest.mark.parametrize(
    ("words", "ends"),
    [
        (("method=full", "budget=40"), [80, 100, 120, 139]),
        (("method=rkv", "budget=40", "method.trigger=slack"), [76, 92, 108, 124, 139]),
        (("method=rkv", "budget=75", "method.trigger=slack"), [80, 91, 107, 123, 139]),
        (
            ("method=rkv", "budget=40", "method.prefill=off", "method.trigger=slack"),
            [61, 77, 93, 109, 125, 139],
        ),
        (("method=rkv", "budget=40"), [64, 80, 96, 112, 128, 139]),
        (("method=rkv", "budget=40", "method.query_aware=true"), [61, 64, 80, 96, 112, 128, 139]),
        (("method=rkv", "budget=40", "method.interval=70"), [70, 90, 110, 130, 139]),
        (("method=rkv", "budget=full"), [80, 100, 120, 139]),
        (("method=lazyeviction", "budget=40", "method.recent=12"), list(range(61, 140))),
        (KIVI, list(range(61, 140))),
        (("method=kivi",), [80, 100, 120, *range(128, 140)]),
        ((*KIVI, "method.decode=false"), [80, 100, 120, 139]),
        ((*KIVI, "method.of=truncate", "budget=40"), list(range(68, 140))),  # no chunk fits: eight rows fed
        (("method=ott", "method.group=16", "method.residual=20"), [68, 84, 100, 116, 132, 139]),
        ((*KIVI, OVER, "budget=40"), [76, 92, 108, 124, 139]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_blocks_end_where_rows_leave(words: tuple[str, ...], ends: list[int], tmp_path: Path) -> None:
    fixed = words[0] in ("method=full", "method=kivi", "method=ott") or "method.interval=70" in words
    interval = () if fixed else ("method.interval=16",)
    found = settings(tmp_path, *words, *interval, "task.block=20")
    cut = list(blocks(found, TextSet([], 60, 20, ""), 139))
    assert [end for _, end in cut] == ends
    assert [at for at, _ in cut] == [60, *ends[:-1]]


def test_a_budget_that_holds_the_text_loses_nothing(tmp_path: Path) -> None:
    record = run(settings(tmp_path, "method=knorm", "method.interval=8", "budget=140"))
    assert record["metrics"]["kl"]["value"] == pytest.approx(0, abs=1e-5)
    assert record["cache"]["evicted"] == 0 if "evicted" in record["cache"] else True


def test_a_text_that_is_too_short_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="leaves nothing to score"):
        settings(tmp_path, "method=full", "task.length=60")
    with pytest.raises(UserError, match=r"stretches of task\.length=9000000 tokens"):
        run(settings(tmp_path, "method=full", "task.length=9000000"))
