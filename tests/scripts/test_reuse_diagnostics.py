from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest

from kvexp.tasks.texts import Text


@pytest.fixture
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """No benchmark data: prompts are passages of the standard library."""
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


def test_table_files_and_pictures(script, bare, tmp_path: Path, capsys, monkeypatch) -> None:
    diagnostics = script("reuse_diagnostics")
    pages = [Text(f"{i}", f"The {i} things of page {i} are {i * i}. " * 200) for i in range(12)]
    monkeypatch.setattr(diagnostics, "load_texts", {"stdlib": pages}.__getitem__)
    own = ["prompts=1", "encoded=alone,behind_header"]
    assert diagnostics.main([*own, "model=tiny-llama", f"output_dir={tmp_path}"]) == 0
    printed = capsys.readouterr().out
    folder = tmp_path / "reuse_diagnostics" / "tiny-llama"
    report = json.loads((folder / "report.json").read_text())
    assert report["source"] == "stdlib" and report["unit_tokens"] == 10 * 96
    assert report["held_out"]["alone"]["agentkvshift"] < 10 * 96
    for one in ("alone", "behind_header"):
        layers = report["layers"][one]
        explained = [layer["keys"]["explained"] for layer in layers[1:]]
        assert report["means"][one]["keys"]["explained"] == pytest.approx(sum(explained) / 2, rel=1e-4)
        assert report["means"][one]["values"]["first"] == layers[1]["values"]["first"]
        assert layers[0]["keys"]["relative"] < 1e-10
        assert (
            f"| {one} | K before RoPE | {diagnostics.percent(sum(explained) / 2)} | 64 to 86 % |" in printed
        )
        assert f"{one}: the mean of a unit explains" in printed
    with (folder / "heads.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * 3 * 3 * 2  # encodings, layers, kinds of rows, KV heads
    assert {path.stem for path in folder.glob("*.png")} == {
        *("explained", "energy", "top1", "held_out", "spectra"),
    }


def figures(keys: float, values: float, top: float) -> dict:
    parts = {"keys": keys, "values": values}
    return {"alone": {p: {"explained": x, "removed": {"top_unweighted": top}} for p, x in parts.items()}}


def test_the_sentence_says_what_was_found(script) -> None:
    verdict = script("reuse_diagnostics").verdict
    assert verdict(figures(0.7, 0.8, 0.1)).endswith("the paper's 64 to 86 % is found here.")
    assert "is found for keys alone here. The unweighted" in verdict(figures(0.7, 0.1, -0.1))
    said = verdict(figures(0.38, 0.13, -0.04))
    assert "explains 38 % of the residual energy of K and 13 % of V" in said
    assert "is not found here" in said and "makes the keys and values of the others worse" in said


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["prompts=0"], "write a number above 0, such as prompts=12"),
        (["encoded=nowhere"], "write encoded=behind_header,old_context,alone"),
        (["method=cacheblend"], "use method=agentkvshift"),
        (["task=banking77", "model=tiny-llama"], "use task=locomo"),
        (["method.probes=query", "model=tiny-llama", "prompts=1"], "use method.probes=divergence"),
    ],
)
def test_a_wrong_word_is_a_sentence(script, bare, words: list[str], says: str, capsys) -> None:
    assert script("reuse_diagnostics").main(words) == 2
    assert says in capsys.readouterr().err
