"""The sha256 of weights: of one file, of shards, of tensors, and when it is computed anew."""

from __future__ import annotations

import hashlib
import os

import pytest
import torch
from safetensors.torch import load_file, save_file

from kvexp import checksum, embedded, tiny


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))


def test_a_file_is_hashed_once_until_it_changes(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    assert checksum.of_file(file) == hashlib.sha256(b"one").hexdigest()
    with monkeypatch.context() as patch:
        patch.setattr(embedded, "sha256_of", lambda path: pytest.fail("hashed again"))
        assert checksum.of_file(file) == hashlib.sha256(b"one").hexdigest()
    file.write_bytes(b"two")
    os.utime(file, ns=(1, 1))
    assert checksum.of_file(file) == hashlib.sha256(b"two").hexdigest()


def test_a_note_that_cannot_be_read_or_written_only_costs_time(tmp_path, monkeypatch):
    file = tmp_path / "weights"
    file.write_bytes(b"one")
    checksum.of_file(file)
    (note,) = (tmp_path / "cache" / "sha256").iterdir()
    note.write_text("{")
    assert checksum.of_file(file) == hashlib.sha256(b"one").hexdigest()
    monkeypatch.setenv("KVEXP_CACHE", str(file / "cache"))
    assert checksum.of_file(file) == hashlib.sha256(b"one").hexdigest()


def test_one_file_gives_its_own_sha256(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path)
    expected = hashlib.sha256((tmp_path / "model.safetensors").read_bytes()).hexdigest()
    assert checksum.of_weights(str(tmp_path), None, None) == expected


def test_shards_give_one_sha256_of_what_the_index_names(tmp_path):
    tiny.build("llama").save_pretrained(tmp_path, max_shard_size="100KB")
    shards = sorted(tmp_path.glob("model-*.safetensors"))
    assert len(shards) > 1
    lines = [f"{shard.name} {hashlib.sha256(shard.read_bytes()).hexdigest()}\n" for shard in shards]
    expected = hashlib.sha256("".join(lines).encode()).hexdigest()
    (tmp_path / "consolidated.safetensors").write_bytes(b"not part of the model")
    assert checksum.of_weights(str(tmp_path), None, None) == expected
    tensors = {name: tensor * 2 for name, tensor in load_file(shards[0]).items()}
    save_file(tensors, shards[0], metadata={"format": "pt"})
    assert checksum.of_weights(str(tmp_path), None, None) != expected


def test_tensors_differ_by_name_shape_dtype_value_and_kind():
    tensor = torch.arange(4.0)
    sums = [
        checksum.of_tensors(tensors, kind)
        for tensors, kind in [
            ({"a": tensor}, "x"),
            ({"a": tensor}, "y"),
            ({"b": tensor}, "x"),
            ({"a": tensor.view(2, 2)}, "x"),
            ({"a": tensor + 1}, "x"),
            ({"a": tensor.to(torch.bfloat16)}, "x"),
        ]
    ]
    assert len(set(sums)) == len(sums)
    two = {"a": tensor, "b": tensor + 1}
    assert checksum.of_tensors(two, "x") == checksum.of_tensors(dict(reversed(two.items())), "x")
