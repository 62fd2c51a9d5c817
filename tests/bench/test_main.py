"""The command itself: what it lists, and its errors."""

from __future__ import annotations

import errno
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
    assert main(["decoed"]) == 2
    assert capsys.readouterr().err.startswith(
        "kvexp.bench: there is no part 'decoed', did you mean 'decode'? Parts: attention, decode"
    )
    assert main(["foo"]) == 2
    assert "no part 'foo'. Parts: attention, decode" in capsys.readouterr().err
    assert main(["decode", "--against"]) == 2
    assert "write against=VALUE" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("quantised bits=2,3", "method.bits"),
        ("decode methods=full,nope", "no method 'nope'"),
        ("memory methods=nope,full", "no method 'nope'"),
        ("scoring method=full budget=full", "nothing is scored"),
        *((f"{one} output_dir=/dev/null", "output_dir=/dev/null") for one in PARTS if one != "attention"),
    ],
)
def test_words_are_checked_before_anything_is_built(
    line: str,
    told: str,
    words: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("kvexp.bench.decoder.load_once", load)
    monkeypatch.setattr("kvexp.bench.prefill.load_once", load)
    name, *own = line.split()
    shared = [word for word in words if not any(word.split("=")[0] == one.split("=")[0] for one in own)]
    assert main([name, *own, *shared]) == 2
    said = capsys.readouterr().err
    assert said.startswith("kvexp.bench: ") and told in said and said.count("\n") == 1


@pytest.mark.parametrize(
    "error",
    [
        OSError(errno.ENOSPC, "No space left on device"),
        RuntimeError("I/O error: No space left on device (os error 28)"),
    ],
)
def test_a_disk_that_fills_while_measuring_is_one_sentence(
    error: Exception, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr("kvexp.bench.decoder.load_once", full)
    assert main(["memory", "methods=full", *words]) == 1
    said = capsys.readouterr().err
    assert said.startswith("kvexp.bench: ") and said.count("\n") == 1
    assert "(No space left on device): make room there, or choose another output_dir" in said


def test_a_report_that_finds_no_room_is_named(
    part, words: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    assert main(["memory", "methods=full", "context=16", "new=1", *words]) == 1
    assert "/bench/memory/tiny-llama.json cannot be used (No space left" in capsys.readouterr().err


def test_other_errors_of_a_part_keep_their_traceback(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("kvexp.bench.__main__._run", lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        main(["memory"])


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
