"""`python -m kvexp.report`: the files it writes, what it says, and its mistakes in one sentence."""

from __future__ import annotations

import subprocess
import sys

import pytest

from kvexp.report import __main__ as command
from kvexp.report import page, paper_figures


@pytest.fixture
def runs(tmp_path, make_record, make_samples, store, monkeypatch):
    monkeypatch.setattr(page, "plot_library", lambda: "lib")
    store(tmp_path / "runs/f", make_record("full", "full"), make_samples([1, 1]))
    store(tmp_path / "runs/s", make_record("snapkv", 512), make_samples([1, 0]))
    return tmp_path / "runs"


def test_one_command_writes_everything(runs, tmp_path, monkeypatch, capsys):
    pytest.importorskip("matplotlib")
    drawn = []
    monkeypatch.setattr(paper_figures, "draw_figures", lambda data, folder: drawn.append(folder))
    out = tmp_path / "report"
    assert command.main([str(runs), "--out", str(out)]) == 0
    assert capsys.readouterr().out == f"report: {out}/index.html\n"
    names = {path.name for path in out.iterdir()}
    assert names == {"index.html", "report.md", "rows.csv", "differences.csv", "cells.csv"} and drawn == [
        out / "figures"
    ]
    # Its own folder holds no run, so that it may lie inside of what it reports.
    assert command.main([str(tmp_path), "--out", str(out), "--tables"]) == 0


def test_tables_need_no_plot_library(runs, tmp_path, monkeypatch, capsys):
    for name in ("matplotlib", "vl_convert"):
        monkeypatch.setitem(sys.modules, name, None)
    out = tmp_path / "report"
    assert command.main([str(runs), "--out", str(out)]) == 2
    assert "pip install 'kvexp[report]'" in capsys.readouterr().err and not out.exists()
    assert command.main([str(runs), "--out", str(out), "--tables"]) == 0
    assert capsys.readouterr().out == f"report: {out}/report.md\n"
    assert "| snapkv | 512 |" in (out / "report.md").read_text()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nowhere"], "nowhere is no folder: name one that holds runs, such as outputs"),
        (["--experiment", "nothing"], "nothing"),
    ],
)
def test_mistakes(words, said, runs, tmp_path, capsys):
    folder = [] if words[0] == "nowhere" else [str(runs)]
    assert command.main([*folder, *words, "--out", str(tmp_path / "r"), "--tables"]) == 2
    found = capsys.readouterr().err
    assert found.startswith("kvexp: ") and said in found and found.count("\n") == 1


def test_a_place_that_cannot_be_written_is_one_sentence(runs, tmp_path, monkeypatch, capsys):
    file = tmp_path / "file"
    file.write_text("kept")

    def full(data, folder):
        raise OSError(28, "No space left on device")

    for out in ("/proc/nope", file, file / "below"):
        assert command.main([str(runs), "--out", str(out), "--tables"]) == 1
        found = capsys.readouterr()
        assert found.err.startswith("kvexp: ") and found.err.count("\n") == 1 and not found.out
        assert "cannot be used (" in found.err and "with --out" in found.err
    assert file.read_text() == "kept"
    monkeypatch.setattr(paper_figures, "draw_figures", full)
    assert command.main([str(runs), "--out", str(tmp_path / "out")]) == 1
    assert "the output cannot be used (No space left on device)" in capsys.readouterr().err


def test_nothing_heavy_is_loaded_for_help():
    code = (
        "import sys\nimport kvexp.report.__main__ as m\n"
        "heavy = {'torch', 'matplotlib', 'vl_convert', 'hydra', 'numpy'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
