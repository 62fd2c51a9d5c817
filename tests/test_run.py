"""One cell from its command line to its files, on tiny models; grids; and the embedded model once."""

from __future__ import annotations

import dataclasses
import json
import logging
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import yaml

from cells import cell, samples_of, words
from kvexp import cli, embedded, tiny
from kvexp import run as run_module
from kvexp.budget import Budget
from kvexp.errors import UserError
from kvexp.evaluation import labels
from kvexp.measure.answered import NothingHappened
from kvexp.methods.baseline.full import Full
from kvexp.report.record import COUNTERS, PROVENANCE, STORAGE, TIMING
from kvexp.report.samples import FIELDS
from kvexp.run import run
from kvexp.tasks.session import Session


@pytest.fixture(autouse=True)
def plain_logging() -> Iterator[None]:
    """Hydra sets up logging for a process; give it back to the tests."""
    root = logging.getLogger()
    before = root.level, list(root.handlers)
    yield
    root.setLevel(before[0])
    for handler in [handler for handler in root.handlers if handler not in before[1]]:
        root.removeHandler(handler)
        handler.close()


def read(path: Path) -> Any:
    return json.loads(path.read_text(encoding="utf-8"))


def lines(settings: Any) -> list[dict[str, Any]]:
    return [json.loads(row) for row in samples_of(settings).splitlines()]


def test_the_files_of_a_run(tmp_path: Path) -> None:
    settings = cell(tmp_path)
    record = run(settings)
    folder = settings.run_dir
    assert folder.parent == tmp_path / "intents/tiny-llama/asm/b64" and folder.name == settings.cell
    assert record == read(folder / "record.json")
    assert (record["schema"], record["cell"], record["status"], record["error"]) == (
        1,
        settings.cell,
        "complete",
        None,
    )
    chosen = {"model": "tiny-llama", "method": "asm", "task": "intents", "budget": 64, "seed": 0}
    assert chosen.items() <= record["choices"].items()
    assert {"accuracy", "accuracy_calibrated", "accuracy_free", "macro_f1"} <= set(record["metrics"])
    assert all(
        set(metric) == {"value", "stderr", "n", "higher_is_better"} and metric["n"] == 12
        for metric in record["metrics"].values()
    )
    cache = record["cache"]
    assert {*STORAGE, *COUNTERS} <= set(cache)
    assert cache["entries_peak"] == cache["entries_nominal"] == 64 < cache["context_tokens"] <= 700
    assert cache["looked_up"] > 0 and cache["evicted"] == cache["reused"] == cache["recomputed"] == 0
    assert cache["cost_storage_rows"] == pytest.approx(cache["kv_token_equivalents"], abs=0.1)
    assert set(record["timing"]) == set(TIMING) and min(record["timing"].values()) > 0
    assert record["timing"]["prepare_s"] + record["timing"]["encode_s"] < record["timing"]["total_s"]
    assert record["fidelity"] is None
    assert set(PROVENANCE) <= set(record["provenance"])
    assert len(record["provenance"]["data_sha256"]) == len(record["provenance"]["model_sha256"]) == 64
    assert record["provenance"]["command"] == settings.command
    assert yaml.safe_load((folder / "config.yaml").read_text()) == settings.config
    memory = read(folder / "memory.json")
    assert memory["built"] and Path(memory["folder"]).parent == tmp_path / "store"
    rows = lines(settings)
    assert [row["id"] for row in rows] == [f"test-{i}" for i in range(12)]
    assert all(tuple(row) == FIELDS for row in rows)


def test_a_seed_names_its_samples(tmp_path: Path) -> None:
    first, second, other = (cell(tmp_path / name) for name in ("a", "b", "c"))
    other = cell(tmp_path / "c", "seed=1")
    for settings in (first, second, other):
        run(settings)
    assert samples_of(first) == samples_of(second) != samples_of(other)
    assert first.cell == second.cell != other.cell
    assert {row["seed"] for row in lines(other)} == {1}


def test_batch_sizes_change_no_byte_of_a_cell(tmp_path: Path) -> None:
    one, several = (
        cell(tmp_path / "a", "fidelity=true", "batch_size=5"),
        cell(tmp_path / "b", "fidelity=true"),
    )
    assert one.cell == several.cell
    ours, theirs = (run(settings)["fidelity"].pop("by_position") for settings in (one, several))
    assert samples_of(one) == samples_of(several)
    assert ours.pop("queries") == theirs.pop("queries") == 12
    for name in ours:
        assert ours[name] == pytest.approx(theirs[name], abs=2e-4)


def test_fidelity_of_a_memory_is_told_by_position_and_by_layer(tmp_path: Path) -> None:
    fidelity = run(cell(tmp_path, "fidelity=true"))["fidelity"]
    assert fidelity["kl"] > 0 and 0 <= fidelity["top1_agreement"] <= 1 and fidelity["n"] == 12
    decay = fidelity["by_position"]
    assert [len(decay[name]) for name in ("kl", "top1_agreement", "mass_full", "mass_method")] == [32] * 4
    assert decay["queries"] == 12
    layers = fidelity["by_layer"]
    assert set(layers) == {"relative_error", "log_z_error"}
    assert all(len(values) == 3 and min(values) > 0 for values in layers.values())


def test_a_budget_without_a_demonstration_is_said(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for budget, said in (("60", 1), ("300", 0)):
        caplog.clear()
        run(cell(tmp_path, "method=truncate", f"budget={budget}", "limit=1"))
        told = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
        assert [f"budget={budget} holds no demonstration" in line for line in told] == [True] * said, told


def test_a_context_beyond_the_model_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    settings = cell(tmp_path, "method=full", "limit=4")
    loaded = run_module.model.load_once(settings.model)

    def limited(limit: int, *words: str) -> None:
        small = dataclasses.replace(loaded, context_limit=limit)
        monkeypatch.setattr(run_module.model, "load_once", lambda spec, **more: small)
        caplog.clear()
        run(cell(tmp_path / str(limit), *words, "limit=4"))

    for limit, told in ((650, True), (4000, False)):  # a context of 645 tokens, and queries behind it
        limited(limit, "method=full")
        assert ("that this model was made for: lower task.context_tokens" in caplog.text) == told
    with pytest.raises(
        UserError, match="a context of 645 tokens exceeds the 400 that this model was made for"
    ):
        limited(400, "method=full")
    endless = ("method=streaming_llm", "budget=64", "method.rope=in_cache", "method.prefill=chunks")
    limited(400, *endless)  # no distance exceeds 64 tokens
    with pytest.raises(UserError, match="exceeds the 400"):
        limited(400, *endless[:3])


class Lazy(Full):
    """A method that claims to evict and does not."""

    id: ClassVar[str] = "lazy"
    uses_budget: ClassVar[bool] = True
    expects: ClassVar[tuple[str, ...]] = ("evicted",)


def test_a_method_that_does_nothing_fails(tmp_path: Path) -> None:
    settings = dataclasses.replace(cell(tmp_path), method=Lazy(), budget=Budget(64))
    with pytest.raises(NothingHappened):
        run(settings)
    record = read(settings.run_dir / "record.json")
    assert record["status"] == "failed" and "lazy declares that it counts 'evicted'" in record["error"]
    assert record["metrics"]["accuracy"]["n"] == 12 and record["cache"]["entries_peak"] > 64
    fits = dataclasses.replace(cell(tmp_path / "fits"), method=Lazy(), budget=Budget(700))
    assert run(fits)["status"] == "complete"


@pytest.mark.parametrize("method", ["asm", "truncate"])
def test_a_budget_beyond_the_context_is_served(tmp_path: Path, method: str) -> None:
    settings = cell(tmp_path, f"method={method}", "budget=9000")
    assert len(settings.remarks()) == 1
    record = run(settings)
    assert record["status"] == "complete" and record["cache"]["entries_nominal"] == 9000
    if method == "truncate":  # everything fits: it is full attention
        assert record["cache"]["entries_peak"] == record["cache"]["context_tokens"]
        full = cell(tmp_path, "method=full")
        run(full)
        assert samples_of(settings) == samples_of(full)


@pytest.mark.parametrize("method", ["full", "asm"])
def test_the_empty_prefix_control_sees_the_header_alone(
    tmp_path: Path, method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoded = []
    context = Session.context
    monkeypatch.setattr(
        Session, "context", lambda self, it, *more: encoded.append(it.ids) or context(self, it, *more)
    )
    settings = cell(tmp_path, f"method={method}", "calibration.empty_prefix=true")
    record = run(settings)
    whole = settings.task.load(tiny.tokenizer(), seed=0, limit=12)
    assert set(encoded) == {whole.context.header} and len(whole.context.header) > 10
    assert record["cache"]["context_tokens"] == len(whole.context.header)
    lengths = [len(whole.context.header) + len(document.query_ids) for document in whole.documents]
    assert [row["prompt_tokens"] for row in lines(settings)] == lengths
    assert settings.cell != cell(tmp_path, f"method={method}").cell


def test_traces_may_be_labelled_by_the_model(tmp_path: Path) -> None:
    cells = [cell(tmp_path, f"calibration.labels={kind}") for kind in ("none", "gold", "wrong", "model")]
    memories = []
    for settings in cells:
        assert run(settings)["status"] == "complete"
        memories.append(read(settings.run_dir / "memory.json")["manifest"]["trace_tokens"])
    assert memories[0] < min(memories[1:])  # a label adds tokens to each trace
    assert len({samples_of(settings) for settings in cells}) >= 3


def test_a_rank_that_nobody_wants_leaves_the_folder_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A launcher has started two processes, and the trainer is for one."""
    monkeypatch.setenv("RANK", "1")
    settings = cell(tmp_path, "method=full")
    with pytest.raises(UserError, match=r"process 1 of a job, and its trainer wants one.*trainer\.devices"):
        run(settings)
    assert not settings.run_dir.exists()


def test_loggers_hear_how_a_run_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[Any] = []
    deaf = SimpleNamespace(
        start=lambda job: heard.append(job.choices["method"]),
        metrics=lambda record: heard.append(record["status"]),
        samples=lambda rows: heard.append(len(rows)),
        finish=lambda status, error=None: heard.append((status, error)),
    )
    monkeypatch.setattr(run_module, "make_logger", lambda **knobs: deaf)
    run(cell(tmp_path))
    assert heard == ["asm", "complete", 12, ("complete", None)]
    for error, outcome in ((KeyboardInterrupt(), "preempted"), (RuntimeError("boom"), "failed")):
        heard.clear()
        monkeypatch.setattr(labels.LabelEvaluation, "score", raiser(error))
        with pytest.raises(type(error)):
            run(cell(tmp_path, "method=full"))
        assert heard == ["full", (outcome, str(error) or "KeyboardInterrupt")]


def raiser(error: BaseException) -> Any:
    def score(self: Any, documents: Any) -> Any:
        raise error

    return score


def test_wandb_offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run of W&B lies under the run folder (about 5 s: wandb starts a process of its own)."""
    monkeypatch.setenv("WANDB_SILENT", "true")
    for name in ("CONFIG_DIR", "CACHE_DIR"):
        monkeypatch.setenv(f"WANDB_{name}", str(tmp_path / name))
    settings = cell(tmp_path, "method=full", "logger=wandb", "logger.mode=offline")
    assert run(settings)["status"] == "complete"
    (log,) = settings.run_dir.glob("wandb/offline-run-*/*.wandb")
    deadline = time.monotonic() + 30
    while b"intents/accuracy_calibrated" not in log.read_bytes():  # wandb writes on after `finish` returned
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_grid_goes_on_after_a_cell_that_fails(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """The third cell cannot hold the prompt's header. One table holds all, with differences to full."""
    lacking = words(tmp_path, "method=full,truncate", "budget=20,300")
    assert cli.main(["-m", *lacking]) == 1
    out, err = capfd.readouterr()
    statuses = {
        (path.parts[-4], path.parts[-3]): read(path)["status"] for path in tmp_path.rglob("record.json")
    }
    assert statuses == {
        ("full", "bfull"): "complete",
        ("truncate", "b20"): "failed",
        ("truncate", "b300"): "complete",
    }
    assert ": budget=20 is smaller than the prompt's header of 35 tokens, use budget=35 or more\n" in err
    assert err.endswith("kvexp: 1 of 4 cells failed\n") and "Traceback" not in err
    assert out.count("truncate") >= 3 and "failed" in out and "difference to full, paired by item" in out


FETCHED = embedded.cache_folder() / embedded.SMOLLM2.member.rsplit("/", 1)[-1]


@pytest.mark.skipif(not FETCHED.is_file(), reason="the embedded model has not been fetched")
def test_the_embedded_model(tmp_path: Path) -> None:
    """Real weights, small (about 15 s on one core)."""
    common = (
        "model=smollm2-135m",
        "limit=8",
        "task.context_tokens=512",
        "task.n_labels=12",
        "calibration.n=40",
    )
    full = run(cell(tmp_path, *common, "method=full"))
    asm = run(cell(tmp_path, *common, "method=asm"))
    for record in (full, asm):
        assert {"accuracy", "accuracy_calibrated", "accuracy_free"} <= set(record["metrics"])
        assert record["status"] == "complete" and 400 < record["cache"]["context_tokens"] <= 512
    assert asm["cache"]["looked_up"] > 0 and asm["cache"]["entries_peak"] <= 64
    assert full["cache"]["looked_up"] == 0
    assert asm["cache"]["bytes_peak"] < full["cache"]["bytes_peak"] / 4
