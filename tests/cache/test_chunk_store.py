from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import helpers
from chunks import PREFIX, SIZE, UNIT, chunk, same
from kvexp import tiny
from kvexp.cache.chunk_files import ChunkFiles
from kvexp.cache.chunk_store import Chunk, ChunkStore, Exact, Parts, fingerprint
from kvexp.errors import UserError


def model() -> Any:
    return helpers.model("llama")


def test_a_unit_behind_another_prefix_is_another_entry() -> None:
    store = ChunkStore(model(), 10**6)
    made = {prefix: chunk(seed) for seed, prefix in enumerate([(), (1,), (1, 2), (2, 1), (12,)])}
    for prefix, one in made.items():
        assert store.get(prefix, (7, 8)) is None
        store.put(prefix, (7, 8), one)
    for prefix, one in made.items():
        assert store.get(prefix, (7, 8)) is one
        assert store.get(prefix, (7, 8), exact=True) is one  # the store is exact
        assert store.get((*prefix, 7), (8,)) is None  # the same text, cut elsewhere
    assert store.counts == {"hits": 10, "misses": 10, "evicted": 0, "damaged": 0}
    assert (store.nbytes(), len(store)) == (5 * SIZE, 5)


def test_keys_name_weights_dtype_and_codec(tmp_path: Path) -> None:
    names = {
        fingerprint(model()),
        fingerprint(tiny.build("llama", seed=1)),
        fingerprint(helpers.model("llama", torch.bfloat16)),
        fingerprint(model(), sha256="ab"),
        fingerprint(
            tiny.build("llama", changes={"rope_parameters": {"rope_type": "default", "rope_theta": 5e5}})
        ),
    }
    assert len(names) == 5
    assert fingerprint(tiny.build("llama")) == fingerprint(model())
    plain, packed = ChunkStore(model(), 9), ChunkStore(model(), 9, codec=Halves())
    assert plain.key((1,), (2,)) != packed.key((1,), (2,))
    assert plain.key((1,), (2,)) == packed.key((1,), (2,), exact=True)


def test_the_least_recently_used_leave() -> None:
    store = ChunkStore(model(), 2 * SIZE)
    for unit in (1, 2):
        store.put((), (unit,), chunk(unit))
    assert store.get((), (1,)) is not None  # 2 is now the oldest
    store.put((), (3,), chunk(3))
    assert [store.get((), (unit,)) is not None for unit in (1, 2, 3)] == [True, False, True]
    assert (store.nbytes(), store.counts["evicted"]) == (2 * SIZE, 1)
    store.put((), (3,), chunk(4))  # again: takes the place of the old one
    assert (store.nbytes(), len(store)) == (2 * SIZE, 2)


def test_a_chunk_larger_than_the_capacity_is_not_kept(tmp_path: Path) -> None:
    store = ChunkStore(model(), SIZE - 1, tmp_path, sha256="ab")
    store.put((), (1,), chunk())
    assert store.get((), (1,)) is None and store.nbytes() == 0
    assert not [*tmp_path.rglob("*.safetensors")]


def test_a_store_serves_the_model_it_was_opened_for() -> None:
    store = ChunkStore(model(), 10**6)
    store.check(model())
    with pytest.raises(UserError, match="another model"):
        store.check(tiny.build("llama"))
    with pytest.raises(UserError, match=r"raise method\.store_mb"):
        ChunkStore(model(), 0)


class Halves:
    """A codec that stores float16."""

    name = "halves"

    def encode(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> Parts:
        return {"k": keys.half(), "v": values.half(), "layer": torch.tensor(layer)}

    def decode(self, layer: int, parts: Parts) -> tuple[torch.Tensor, torch.Tensor]:
        assert int(parts["layer"]) == layer
        return parts["k"].float(), parts["v"].float()


def test_a_codec_decides_what_is_held(tmp_path: Path) -> None:
    exact = chunk()
    small = Chunk.of(2, [exact.rows(i) for i in range(2)], Halves())
    assert small.nbytes() == SIZE // 2 + 2 * 8
    ChunkStore(model(), 10**6, tmp_path, Halves(), "ab").put(PREFIX, UNIT, small)
    found = ChunkStore(model(), 10**6, tmp_path, Halves(), "ab").get(PREFIX, UNIT)
    assert found is not None
    for i in range(2):
        torch.testing.assert_close(found.rows(i)[0], exact.rows(i)[0].half().float(), atol=0, rtol=0)
    assert ChunkStore(model(), 10**6, tmp_path, None, "ab").get(PREFIX, UNIT) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_another_process_finds_what_was_written(tmp_path: Path, dtype: torch.dtype) -> None:
    one = chunk(dtype=dtype)
    ChunkStore(model(), 10**6, tmp_path, sha256="ab").put(PREFIX, UNIT, one)
    later = ChunkStore(model(), 10**6, tmp_path, sha256="ab")
    assert same(later.get(PREFIX, UNIT), one)
    assert later.get(PREFIX, UNIT) is later.get(PREFIX, UNIT)  # from memory
    assert ChunkStore(model(), 10**6, tmp_path, sha256="cd").get(PREFIX, UNIT) is None


WRITER = """
import os, signal, sys
from pathlib import Path
import chunks as t
from kvexp.cache import chunk_files
from kvexp.cache.chunk_files import ChunkFiles

files = ChunkFiles(Path(sys.argv[1]), 10**6)
files.write("old", t.chunk(1))
write, calls = chunk_files.write_atomic, []

def killed(path, data):
    calls.append(path)
    if sys.argv[2] == "in the data":  # half of a temporary file is there
        (path.parent / f".{path.name}.abc.tmp").write_bytes(data[: len(data) // 2])
        os.kill(os.getpid(), signal.SIGKILL)
    write(path, data)
    os.kill(os.getpid(), signal.SIGKILL)  # between the data and its manifest

chunk_files.write_atomic = killed
files.write("new", t.chunk(2))
"""


@pytest.mark.parametrize("when", ["in the data", "before the manifest"])
def test_a_writer_that_is_killed_leaves_nothing_that_looks_whole(tmp_path: Path, when: str) -> None:
    here = str(Path(__file__).parent)
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([here, str(Path(here).parent), *sys.path])}
    done = subprocess.run(
        [sys.executable, "-c", WRITER, str(tmp_path), when], env=environment, check=False, timeout=60
    )
    assert done.returncode == -signal.SIGKILL
    left = {path.suffix for path in tmp_path.iterdir()}
    assert ".tmp" in left if when == "in the data" else (tmp_path / "new.safetensors").exists()
    later = ChunkFiles(tmp_path, 10**6)
    assert later.read("new", Exact()) is None and later.damaged == 0
    assert same(later.read("old", Exact()), chunk(1))
    names = {path.name for path in tmp_path.iterdir()}
    assert names == {".lock", "old.json", "old.safetensors"}
    later.write("new", chunk(2))
    assert same(ChunkFiles(tmp_path, 10**6).read("new", Exact()), chunk(2))
