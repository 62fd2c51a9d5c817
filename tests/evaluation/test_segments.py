"""Text that a method learns from."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cells import cell
from kvexp.calibration.prepare import draw_segments
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.model import load_once
from kvexp.prompt import bos_ids, encode
from kvexp.specs import CalibrationSpec


def spec(folder: Path, **more: Any) -> CalibrationSpec:
    (folder / "a.txt").write_text("First text. " * 20)
    (folder / "b.txt").write_text("Second one.")
    return CalibrationSpec("text", path=str(folder), **more)


def test_segments_cover_the_text_in_order(tmp_path: Path) -> None:
    loaded = load_once(cell(tmp_path).model)
    segments = draw_segments(spec(tmp_path, segment=50, tokens=200), loaded, None)
    bos = bos_ids(loaded.tokenizer)
    text = [t for segment in segments for t in segment[len(bos) :]]
    whole = encode(loaded.tokenizer, "First text. " * 20)
    assert text == whole[:200]
    assert all(len(segment) <= 50 and segment[: len(bos)] == bos for segment in segments)


def test_a_corpus_that_is_too_short_is_refused(tmp_path: Path) -> None:
    loaded = load_once(cell(tmp_path).model)
    with pytest.raises(UserError, match=r"has 251 tokens: set calibration.tokens=251 or less"):
        draw_segments(spec(tmp_path, tokens=100_000), loaded, None)


def test_a_method_learns_from_what_it_can(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="method=asm learns from traces, not from text"):
        settings_of(["model=tiny-llama", "method=asm", "calibration=stdlib", f"output_dir={tmp_path}"])
    assert cell(tmp_path).choices["calibration"] == "traces"
