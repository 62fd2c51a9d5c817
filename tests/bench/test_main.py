"""The command itself: what it lists, and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvexp.bench.__main__ import PARTS, main, words_of


def test_every_part_is_a_module_that_says_how_it_is_called(part, capsys: pytest.CaptureFixture[str]) -> None:
    for name in PARTS:
        assert f"python -m kvexp.bench {name}" in part(name).__doc__
        assert main([name, "--help"]) == 0
    assert main([]) == 0
    listed = capsys.readouterr().out.split("PART --help")[-1]
    assert all(name in listed for name in PARTS)


def test_errors_are_one_sentence(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["decoed"]) == 1
    assert capsys.readouterr().err.startswith("kvexp.bench: decoed is no part, did you mean")
    assert main(["decode", "--against"]) == 1
    assert "write against=VALUE" in capsys.readouterr().err


def test_flags_are_words() -> None:
    words = words_of(["--against", "kvpress", "--new=4", "budget=32"])
    assert words == ["against=kvpress", "new=4", "budget=32"]


def test_quantised_rows_take_fewer_bytes(part, words) -> None:
    numbers = ["context=64", "new=2", "repeats=1", "bits=2,8", "method.residual=16", "method.group=16"]
    assert part("quantised").main([*numbers, *words]) == 0
    folder = Path(words[-1].removeprefix("output_dir=")) / "bench" / "quantised"
    sides = json.loads((folder / "tiny-llama.json").read_text())["sides"]
    held = [sides[name]["bytes"] for name in ("kivi 2 bits", "kivi 8 bits", "full")]
    assert held[0] < held[1] < held[2] and sides["full"]["times"] == [1.0, 1.0, 1.0]


def test_memory_by_hand(part, words) -> None:
    assert (
        part("memory").main(["methods=full,streaming_llm", "context=64", "budget=20", "new=3", *words]) == 0
    )
    folder = Path(words[-1].removeprefix("output_dir=")) / "bench" / "memory"
    found = json.loads((folder / "tiny-llama.json").read_text())["methods"]
    rows = {name: [found[name][moment]["rows"] for moment in ("prompt", "answer")] for name in found}
    assert rows == {"full": [64, 67], "streaming_llm": [20, 20]}
    assert found["full"]["answer"]["storage"] >= found["full"]["answer"]["counted"]
