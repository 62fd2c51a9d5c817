"""Compiled twins: made once, anew where a file is not what was written, and done without where need be."""

from __future__ import annotations

import logging
import os
import shutil
from pathlib import Path

import pytest

from kvexp_kernels import native

uncached = native.library.__wrapped__


@pytest.fixture
def source(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A small program, with a cache of its own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("CXX", raising=False)
    folder = tmp_path / "twice"
    folder.mkdir()
    (folder / "native.cpp").write_text('extern "C" int twice(int x) { return 2 * x; }\n')
    return folder / "native.cpp"


def made(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "kvexp" / "native").glob("*"))


@pytest.mark.skipif(native._compiler() is None, reason="there is no C++ compiler here")
def test_a_file_that_is_not_what_was_written_is_made_anew(source: Path, tmp_path: Path) -> None:
    assert uncached(source, "twice").twice(21) == 42
    library, sums = made(tmp_path)[1], made(tmp_path)[0]
    assert (library.suffix, sums.suffix) == (".so", ".sha256")
    whole = library.read_bytes()
    for damaged in (whole[: len(whole) // 2], b"", b"rubbish", whole[:-1] + bytes([whole[-1] ^ 1])):
        library.unlink()  # the loader has the old one mapped
        library.write_bytes(damaged)
        assert uncached(source, "twice").twice(21) == 42
        assert native._whole(library) and len(library.read_bytes()) == len(whole)
    sums.unlink()
    assert uncached(source, "twice").twice(4) == 8


@pytest.mark.skipif(native._compiler() is None, reason="there is no C++ compiler here")
def test_options_may_follow_a_compiler(source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source.write_text('extern "C" int twice(int x) { return FACTOR * x; }\n')
    monkeypatch.setenv("CXX", f"{native._compiler()[0]} -DFACTOR=3")
    assert uncached(source, "twice").twice(2) == 6
    assert uncached(source, "thrice") is None  # it lacks the function


def test_a_compiler_that_fails_is_asked_once(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    count = tmp_path / "count"
    program = tmp_path / "fails"
    program.write_text(f"#!/bin/sh\necho x >> {count}\necho no such flag >&2\nexit 1\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    with caplog.at_level(logging.INFO):
        assert uncached(source) is None and uncached(source) is None
    assert count.read_text() == "x\n"
    [failed] = made(tmp_path)
    assert "no such flag" in failed.read_text() and str(failed) in caplog.text


def test_a_compiler_that_hangs_is_given_up(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native, "SECONDS", 0.2)
    program = tmp_path / "hangs"
    program.write_text(f"#!/bin/sh\nexec {shutil.which('sleep')} 30\n")
    program.chmod(0o755)
    monkeypatch.setenv("CXX", str(program))
    assert uncached(source) is None
    assert [path.suffix for path in made(tmp_path)] == [".failed"]


def test_without_a_compiler_or_a_home(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with caplog.at_level(logging.INFO):
        assert uncached(source) is None
    assert "no C++ compiler" in caplog.text and made(tmp_path) == []
    monkeypatch.setenv("CXX", shutil.which("true") or "true")
    monkeypatch.delenv("XDG_CACHE_HOME")

    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "home", homeless)
    assert uncached(source) is None


def test_a_folder_that_cannot_be_written(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", os.devnull)
    assert uncached(source) is None
