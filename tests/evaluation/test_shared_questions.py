"""Questions that share one context: a memory serves them, in parts where the model cannot read it at once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.model import load_once
from kvexp.run import run

RULES = "".join(f"Rule {n}: no team may sign more than {n} players in a year.\n\n" for n in range(60))


@pytest.fixture(scope="module")
def league(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data")
    (folder / "nba").mkdir()
    rows = [
        {
            "id": f"comp_0-{n}",
            "level": 0,
            "team_situations": [f"Team A has {n} players."],
            "player_situations": ["Player A is free."],
            "operations": ["A. Team A signs Player A."],
            "answer": False,
        }
        for n in range(3)
    ]
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / "nba" / "test.jsonl.gz").write_bytes(gzip.compress(text.encode()))
    (folder / "nba" / "reference_rules.txt.gz").write_bytes(gzip.compress(RULES.encode()))
    return folder


def small(league: Path, folder: Path, *words: str) -> Any:
    common = ["model=tiny-llama", "task=nba", "task.max_new_tokens=4", "logger=none", "calibration.n=12"]
    [settings] = settings_of([*common, f"data_dir={league}", f"output_dir={folder}", *words])
    return settings


def test_a_rulebook_beyond_the_model_is_remembered_in_parts(
    league: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = small(league, tmp_path, "method=asm", "budget=32", "calibration.labels=gold")
    loaded = load_once(settings.model)
    monkeypatch.setattr(loaded.model.config, "max_position_embeddings", 3000)
    record = run(settings)
    assert record["status"] == "complete" and record["metrics"]["accuracy"]["n"] == 3
    assert record["cache"]["parts"] >= 2 and record["cache"]["looked_up"] > 0
    assert f"its memory is built in {record['cache']['parts']} parts" in caplog.text
    empty = run(small(league, tmp_path, "method=asm", "budget=32", "calibration.empty_prefix=true"))
    assert empty["cache"]["parts"] == 1 and empty["cache"]["context_tokens"] < 1200  # the header alone


def test_a_rulebook_beyond_the_model_is_refused_in_the_prompt(
    league: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import dataclasses

    from kvexp import model

    settings = small(league, tmp_path, "method=full")
    loaded = dataclasses.replace(load_once(settings.model), context_limit=3000)
    monkeypatch.setattr(model, "load_once", lambda spec, **more: loaded)
    with pytest.raises(UserError, match=r"^a context of \d+ tokens exceeds the 3000 .* take method=asm"):
        run(settings)


def test_labels_of_a_model_are_refused_where_there_are_none(league: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"calibration\.labels=model needs a set of labels"):
        run(small(league, tmp_path, "method=asm", "budget=32", "calibration.labels=model"))
