"""The bench of decoding: who is held against whom, and what is written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from kvexp.errors import UserError


def test_rivals(part) -> None:
    bench = part("decode")
    sides = ["full", "full compiled", "generate", "knorm", "kvpress knorm", "snapkv", "weights"]
    rivals = [bench.rival_of(name, sides) for name in sides]
    assert rivals == ["generate", "generate", None, "kvpress knorm", None, None, None]


def test_ratios_are_of_blocks_in_the_same_turn(part) -> None:
    bench = part("decode")
    took = {"full": [9.0, 1.0, 2.0, 4.0], "generate": [9.0, 2.0, 6.0, 4.0], "weights": [9.0, 0.5, 1.0, 1.0]}
    sides = {name: iter(values).__next__ for name, values in took.items()}
    found = bench.measured(sides, {"repeats": 3, "new": 8})
    assert found["full"]["seconds"] == [1.0, 2.0, 4.0]  # the first block warms up
    assert found["full"]["tokens_per_s"] == [4.0, 2.0, 8.0]
    assert found["full"]["times"] == [2.0, 1.0, 3.0]
    assert found["full"]["of_weights"] == [0.5, 0.25, 0.5]
    assert "times" not in found["generate"]


def test_a_small_run(part, words) -> None:
    numbers = ["context=64", "budget=32", "new=4", "repeats=1", f"threads={torch.get_num_threads()}"]
    bench = part("decode")
    assert bench.main(["methods=full,streaming_llm", *numbers, *words]) == 0
    folder = Path(words[-1].removeprefix("output_dir=")) / "bench" / "decode"
    [path] = folder.iterdir()
    found = json.loads(path.read_text())
    assert set(found["sides"]) == {"full", "generate", "streaming_llm", "weights"}
    assert all(method["equal"] for method in found["methods"].values())


def test_only_kvpress_is_known(part, words) -> None:
    with pytest.raises(UserError, match="write against=kvpress"):
        part("decode").main(["against=vllm", *words])
