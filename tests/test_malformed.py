"""Malformed inputs: each is told in one sentence, with an exit code that is not zero, and overwrites nothing.

Configurations go through the command line; the rest goes through `run`, whose UserError is exit code 2
(`tests/test_cli.py`), and through the tools that read a folder of results.
"""

from __future__ import annotations

import dataclasses
import functools
import gzip
import hashlib
import json
import logging
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cells import cell, samples_of
from kvexp import cli, status
from kvexp.errors import UserError
from kvexp.report.csv_logger import CsvLogger
from kvexp.report.loggers import Job
from kvexp.run import run
from kvexp.schema import Settings

FULL = "kvexp.methods.baseline.full.Full"
TRUNCATE = "kvexp.methods.baseline.truncate.Truncate"

# A file of one's own in the folder `mine`, the words that use it, and a part of the sentence.
FILES: dict[str, tuple[str, str | bytes, list[str], str]] = {
    "not YAML": ("method/bad.yaml", "# x\nkeep: [", ["method=bad"], "bad.yaml"),
    "not UTF-8": ("method/bad.yaml", b"# x\nkeep: '\xff'\n", ["method=bad"], "bad.yaml"),
    "a list": ("method/bad.yaml", "# x\n- a\n", ["method=bad"], "bad"),
    "empty": ("method/bad.yaml", "", ["method=bad"], "no method is chosen"),
    "no class": ("method/bad.yaml", "# x\nkeep: tail\n", ["method=bad"], "names no class"),
    "no module": ("method/bad.yaml", "# x\n_target_: nope.Nope\n", ["method=bad"], "cannot be imported"),
    "a function": ("method/bad.yaml", "# x\n_target_: os.system\n", ["method=bad"], "no class"),
    "another class": ("method/bad.yaml", "# x\n_target_: pathlib.Path\n", ["method=bad"], "no dataclass"),
    "a task as method": (
        "method/bad.yaml",
        "# x\n_target_: kvexp.tasks.intents.Intents\n",
        ["method=bad"],
        "is no method",
    ),
    "planned": (
        "task/bad.yaml",
        "# x\nname: bad\nplanned: true\nwhy: no data\n",
        ["task=bad"],
        "cannot run yet: no data",
    ),
    "a method as task": ("task/bad.yaml", f"# x\n_target_: {FULL}\n", ["task=bad"], "is no task"),
    "an unknown knob": ("method/bad.yaml", f"# x\n_target_: {TRUNCATE}\nkeap: x\n", ["method=bad"], "'keep'"),
    "a wrong knob": ("method/bad.yaml", f"# x\n_target_: {TRUNCATE}\nkeep: 3\n", ["method=bad"], "one of"),
    "a wrong source": (
        "model/bad.yaml",
        "# x\nname: bad\nsource: usb\n",
        ["model=bad"],
        "model.source is one of",
    ),
    "a wrong corpus": ("calibration/bad.yaml", "# x\nname: 7\n", ["calibration=bad"], "calibration.name is"),
    "a wrong logger": ("logger/bad.yaml", "# x\nname: paper\n", ["logger=bad"], "logger.name is one of"),
    "no trainer": ("trainer/bad.yaml", "# x\n_target_: os.system\n", ["trainer=bad"], "lightning.Trainer"),
    "an experiment without its method": (
        "experiment/bad.yaml",
        "# @package _global_\n# x\ndefaults:\n  - override /method: nope\n",
        ["experiment=bad"],
        "nope",
    ),
    "an experiment of a wrong key": (
        "experiment/bad.yaml",
        "# @package _global_\n# x\nbudgte: 3\n",
        ["experiment=bad"],
        "budgte",
    ),
    "a grid of a wrong shape": (
        "experiment/bad.yaml",
        "# @package _global_\n# x\nhydra:\n  mode: MULTIRUN\n  sweeper:\n    params: [a]\n",
        ["experiment=bad"],
        "experiment/bad",
    ),
}

WORDS = {
    "a budget in hexadecimal": (["budget=0x10"], "is not a budget"),
    "a budget with an exponent": (["budget=1e3"], "is not a budget"),
    "a budget in other digits": (["budget=٣"], "is not a budget"),
    "a share of nothing": (["budget=0%"], "leaves no row"),
    "a trainer of strange parts": (
        ["trainer=cpu", "+trainer.callbacks=[{_target_: os.system}]"],
        "may not be made of os.system",
    ),
    "a list as seed": (["seed=[1,2]"], "seed"),
    "a mapping as method": (["method={a:1}"], "method"),
    "data in a file": (["data_dir=FILE"], "is not a folder"),
    "output in a file": (["output_dir=FILE"], "cannot be used"),
}


def _flip(data: bytes, place: int = -5) -> bytes:
    place %= len(data)
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


GOOD = "".join(
    json.dumps({"text": f"text {i} of {i % 8}", "label": f"label_{i % 8}"}) + "\n" for i in range(1600)
)
# Bytes of test.jsonl.gz of a benchmark whose other split is sound, and a part of the sentence.
DATA: dict[str, tuple[bytes, str]] = {
    "not gzip": (GOOD.encode(), "test.jsonl.gz"),
    "cut off": (gzip.compress(GOOD.encode())[:-200], "test.jsonl.gz"),
    "not JSON": (gzip.compress(GOOD.encode() + b"{not\n"), "test.jsonl.gz"),
    "a line that is no object": (gzip.compress(GOOD.encode() + b"[1]\n"), "test.jsonl.gz"),
    "no label": (gzip.compress(GOOD.encode() + b'{"text": "a"}\n'), "test.jsonl.gz"),
    "no text": (gzip.compress(GOOD.encode() + b'{"label": "label_0"}\n'), "test.jsonl.gz"),
    "a number as text": (
        gzip.compress(GOOD.encode() + b'{"text": 3, "label": "label_0"}\n'),
        "test.jsonl.gz",
    ),
    "not UTF-8": (gzip.compress(GOOD.encode() + b'{"text": "\xff", "label": "a"}\n'), "test.jsonl.gz"),
    "of damaged bytes": (_flip(gzip.compress(GOOD.encode()), 3000), "test.jsonl.gz"),
    "empty": (gzip.compress(b""), "holds no row"),
}


def record_of(settings: Settings) -> dict[str, Any]:
    return json.loads((settings.run_dir / "record.json").read_text())


def _without(key: str) -> Callable[[dict[str, Any]], Any]:
    return lambda record: {name: value for name, value in record.items() if name != key}


# What became of a complete record.json.
RECORDS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "a list": lambda record: [record],
    "another schema": lambda record: record | {"schema": 2},
    "no schema": _without("schema"),
    "no status": _without("status"),
    "no metrics": lambda record: record | {"metrics": {}},
    "a metric that is text": lambda record: record | {"metrics": {"accuracy": {"value": "0.5"}}},
    "an error in a complete one": lambda record: record | {"error": "no"},
    "no provenance": _without("provenance"),
    "bytes below zero": lambda record: record | {"cache": record["cache"] | {"bytes_peak": -1}},
    "a number that is none": lambda record: record | {"fidelity": {"kl": float("nan")}},
    "choices without a method": lambda record: record | {"choices": {"model": "a"}},
}


def _lines(change: Callable[[list[bytes]], list[bytes]]) -> Callable[[Path], None]:
    def damage(folder: Path) -> None:
        path = folder / "samples.jsonl"
        path.write_bytes(b"".join(change(path.read_bytes().splitlines(keepends=True))))

    return damage


def _text(name: str, text: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_text(text) and None


# What became of an interrupted run's folder.
FOLDERS: dict[str, Callable[[Path], None]] = {
    "inputs that are no JSON": _text("inputs.json", "{"),
    "inputs of a wrong kind": _text("inputs.json", '{"model_sha256": 3}'),
    "inputs of other data": _text("inputs.json", '{"data_sha256": "00"}'),
}

# Lines of samples that cannot be read: kept beside, and done again.
LINES: dict[str, Callable[[Path], None]] = {
    "a damaged line of samples": _lines(lambda rows: [rows[0], b"{broken\n", *rows[2:]]),
    "samples without ids": _lines(lambda rows: [b'{"answer": 1}\n'] * len(rows)),
    "binary samples": _lines(lambda rows: [b"\x00\xff\n"] * 9),
}

# What became of the folder of a calibration artefact.
ARTEFACTS: dict[str, Callable[[Path], Any]] = {
    "a manifest that is no JSON": _text("manifest.json", "{"),
    "a manifest that is a list": _text("manifest.json", "[]"),
    "an empty manifest": _text("manifest.json", "{}"),
    "a manifest that is cut off": lambda f: (f / "manifest.json").write_bytes(
        (f / "manifest.json").read_bytes()[:99]
    ),
    "a binary manifest": lambda f: (f / "manifest.json").write_bytes(b"\xff\x00"),
    "tensors that are gone": lambda f: _tensors(f).unlink(),
    "tensors that are cut off": lambda f: _tensors(f).write_bytes(_tensors(f).read_bytes()[:-9]),
    "tensors of which one bit changed": lambda f: _tensors(f).write_bytes(_flip(_tensors(f).read_bytes())),
    "tensors that are a pickle": lambda f: _tensors(f).write_bytes(b"\x80\x04K\x01."),
    "tensors that are empty": lambda f: _tensors(f).write_bytes(b""),
}


def _tensors(folder: Path) -> Path:
    (path,) = folder.glob("*.safetensors")
    return path


def hashes(folder: Path) -> dict[Path, str]:
    """The sha256 of every file below a folder."""
    return {
        path: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*") if path.is_file()
    }


def refused(action: Callable[[], Any], kept: Path, part: str = "", but: tuple[str, ...] = ()) -> str:
    """Return the sentence of the UserError that `action` raises; no file below `kept` may change for it.

    Files named in `but` are those that a run writes anew each time it starts.
    """
    before = hashes(kept)
    with pytest.raises(UserError) as caught:
        action()
    after = hashes(kept)
    assert {p: h for p, h in before.items() if p.name not in but} == {
        p: after.get(p) for p in before if p.name not in but
    }
    sentence = str(caught.value)
    assert part in sentence, sentence
    assert "\n" not in sentence and 10 < len(sentence) < 400, sentence
    return sentence


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


class Spoken(logging.Handler):
    """Keeps what is logged."""

    def __init__(self, level: int) -> None:
        super().__init__(level)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def in_one_line(words: list[str], part: str, capsys: Any, folder: Path) -> None:
    before = hashes(folder)
    spoken = Spoken(logging.WARNING)  # a library's own line, which a process without handlers prints too
    logging.getLogger().addHandler(spoken)
    code = cli.main(words)
    assert spoken.lines == []
    told = capsys.readouterr()
    assert code in (1, 2) and told.out == ""
    assert told.err.startswith("kvexp: ") and told.err.count("\n") == 1, told.err
    assert part in told.err, told.err
    assert hashes(folder) == before


@pytest.mark.parametrize("name", FILES)
def test_configuration_files(name: str, tmp_path: Path, capsys: Any) -> None:
    path, text, words, part = FILES[name]
    file = tmp_path / "mine" / path
    file.parent.mkdir(parents=True)
    file.write_bytes(text if isinstance(text, bytes) else text.encode())
    in_one_line(["-cd", "mine", "model=tiny-llama", *words], part, capsys, tmp_path)


@pytest.mark.parametrize("name", WORDS)
def test_words(name: str, tmp_path: Path, capsys: Any) -> None:
    words, part = WORDS[name]
    (tmp_path / "file").write_text("a file")
    written = [word.replace("FILE", str(tmp_path / "file")) for word in words]
    in_one_line(["method=full", "model=tiny-llama", *written], part, capsys, tmp_path)


@functools.cache
def benchmark() -> Settings:
    more = ("task=banking77", "method=no_context", "task.n_labels=4", "task.context_tokens=300")
    return cell(Path("/no"), *more)


@pytest.mark.parametrize("name", DATA)
def test_data_files(name: str, tmp_path: Path) -> None:
    data, part = DATA[name]
    folder = tmp_path / "data/banking77"
    folder.mkdir(parents=True)
    for split in ("train", "validation"):
        (folder / f"{split}.jsonl.gz").write_bytes(gzip.compress(GOOD.encode()))
    (folder / "test.jsonl.gz").write_bytes(data)
    settings = dataclasses.replace(
        benchmark(),
        data_dir=str(tmp_path / "data"),
        output_dir=tmp_path / "out",
        store_dir=tmp_path / "store",
    )
    refused(lambda: run(settings), tmp_path / "data", part)


@pytest.fixture(scope="module")
def done(tmp_path_factory: Any) -> Iterator[Settings]:
    """A complete cell of ASM, with its store: copied, then damaged."""
    settings = cell(tmp_path_factory.mktemp("done"), "limit=8", "task.context_tokens=300", "calibration.n=12")
    run(settings)
    yield settings


def copied(done: Settings, folder: Path, record: bool) -> Settings:
    """The same cell in another folder, with its store; without the record it was interrupted."""
    shutil.copytree(done.output_dir, folder / "out")
    settings = dataclasses.replace(done, output_dir=folder / "out", store_dir=folder / "out/store")
    if not record:
        (settings.run_dir / "record.json").unlink()
    return settings


@pytest.mark.parametrize("name", RECORDS)
def test_records(name: str, done: Settings, tmp_path: Path, capsys: Any) -> None:
    settings = copied(done, tmp_path, record=True)
    path = settings.run_dir / "record.json"
    path.write_text(json.dumps(RECORDS[name](record_of(done))))
    refused(lambda: run(settings), tmp_path, "record.json cannot be read")
    assert status.main([str(settings.output_dir)]) == 1
    assert "broken" in capsys.readouterr().out


@pytest.mark.parametrize("data", [b"", b"{", b"\xff\xfe", b"null"])
def test_records_that_are_no_json(data: bytes, done: Settings, tmp_path: Path) -> None:
    settings = copied(done, tmp_path, record=True)
    (settings.run_dir / "record.json").write_bytes(data)
    refused(lambda: run(settings), tmp_path, "start with resume=false")
    assert status.main([str(settings.output_dir)]) == 1


@pytest.mark.parametrize("name", FOLDERS)
def test_interrupted_runs(name: str, done: Settings, tmp_path: Path) -> None:
    settings = copied(done, tmp_path, record=False)
    FOLDERS[name](settings.run_dir)
    refused(
        lambda: run(settings),
        tmp_path,
        "start with resume=false",
        but=("config.yaml", "memory.json", ".lock"),
    )


@pytest.mark.parametrize("name", LINES)
def test_lines_of_samples(name: str, done: Settings, tmp_path: Path, caplog: Any) -> None:
    settings = copied(done, tmp_path, record=False)
    LINES[name](settings.run_dir)
    damaged = (settings.run_dir / "samples.jsonl").read_bytes()
    assert run(settings)["status"] == "complete"
    assert (settings.run_dir / "samples.jsonl.damaged-1").read_bytes() == damaged
    assert "cannot be read: it is kept as samples.jsonl.damaged-1" in caplog.text
    assert samples_of(settings) == samples_of(done)


@pytest.mark.parametrize("name", ARTEFACTS)
def test_artefacts(name: str, done: Settings, tmp_path: Path) -> None:
    settings = copied(done, tmp_path, record=False)
    shutil.rmtree(settings.run_dir)
    (folder,) = settings.store_dir.glob("asm-*")
    ARTEFACTS[name](folder)
    refused(lambda: run(settings), settings.store_dir, str(folder), but=(".lock",))


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "cell,a\n1,2,3\n"])
def test_a_results_file_that_is_not_ours(text: str, tmp_path: Path) -> None:
    (tmp_path / "results.csv").write_text(text)
    logger = CsvLogger()
    choices = {"method": "full", "model": "tiny", "task": "intents", "budget": 1, "seed": 0}
    logger.start(Job("00", tmp_path / "cell", tmp_path, choices))
    refused(lambda: logger.finish("failed", "x"), tmp_path, "results.csv", but=(".results.lock",))
