"""A memory on disk: whole, unchanged, and refused where it was built for something else."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import helpers
from kvexp.errors import UserError
from kvexp.methods.memory.states import LayerMemory, StateMemory, refuse_mismatch

TRACES = [helpers.tokens(8, seed=s) for s in range(5)]


def test_what_is_saved_comes_back_bit_by_bit(prepared, tmp_path):
    made = prepared(TRACES, 8, family="gpt_oss", entries="int8", residual=True)
    made.memory.save(tmp_path / "memory")
    assert sorted(path.name for path in (tmp_path / "memory").iterdir()) == [
        "manifest.json",
        "memory.safetensors",
    ]
    loaded = StateMemory.load(tmp_path / "memory", made.memory.manifest)
    assert loaded.layers.keys() == made.memory.layers.keys() and loaded.rows.keys() == made.memory.rows.keys()
    for index, layer in made.memory.layers.items():
        assert loaded.layers[index].grouping == layer.grouping
        assert loaded.layers[index].tensors.keys() == layer.tensors.keys()
        for name, x in layer.tensors.items():
            assert (
                torch.equal(loaded.layers[index].tensors[name], x)
                and loaded.layers[index].tensors[name].dtype == x.dtype
            )
    for index, rows in made.memory.rows.items():
        assert all(torch.equal(loaded.rows[index][name], x) for name, x in rows.items())
    assert loaded.seen == len(made.context) and loaded.nbytes() == made.memory.nbytes()


@pytest.mark.parametrize(
    ("changed", "sentence"),
    [
        ({"model": "b"}, "built for model='a', not 'b'"),
        ({"context": "other"}, "built for context='.{16}', not 'other'"),
        ({"format": 0}, "built for format="),
    ],
)
def test_a_saved_memory_of_something_else_is_refused(prepared, tmp_path, changed, sentence):
    made = prepared(TRACES, 8)
    made.memory.manifest["model"] = "a"
    made.memory.save(tmp_path)
    if "format" in changed:
        manifest = json.loads((tmp_path / "manifest.json").read_text())
        (tmp_path / "manifest.json").write_text(json.dumps({**manifest, **changed}))
        changed = {}
    with pytest.raises(UserError, match=sentence) as caught:
        StateMemory.load(tmp_path, changed)
    text = str(caught.value)
    assert str(tmp_path) in text and "remove that folder" in text and "\n" not in text


def test_a_damaged_file_is_refused(prepared, tmp_path):
    prepared(TRACES, 8).memory.save(tmp_path)
    path = tmp_path / "memory.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"is damaged .*not what was written.*: remove that folder"):
        StateMemory.load(tmp_path, {})


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (lambda folder: (folder / "memory.safetensors").unlink(), "memory.safetensors is missing"),
        (lambda folder: (folder / "manifest.json").write_text('{"format"'), "manifest.json cannot be read"),
        (lambda folder: (folder / "manifest.json").write_text("[1]"), "manifest.json is not a mapping"),
        (lambda folder: without(folder / "manifest.json", "sha256"), "manifest.json has no sha256"),
        (lambda folder: without(folder / "manifest.json", "groupings"), "manifest.json has no groupings"),
    ],
)
def test_a_damaged_folder_is_one_sentence(prepared, tmp_path, damage, told):
    prepared(TRACES, 8).memory.save(tmp_path)
    damage(tmp_path)
    with pytest.raises(UserError) as caught:
        StateMemory.load(tmp_path, {})
    assert str(caught.value) == (
        f"the memory in {tmp_path} is damaged ({told}): remove that folder so that it is built again"
    )


def without(path, key):
    manifest = json.loads(path.read_text())
    del manifest[key]
    path.write_text(json.dumps(manifest))


def test_a_memory_of_another_knob_context_or_model_is_refused_before_use(prepared):
    made = prepared(TRACES, 8)
    with pytest.raises(
        UserError, match=r"built for method\.key='pre', not 'rope_actual'.*method\.prepare"
    ) as caught:
        made.cache(replace(made.method, key="rope_actual"))
    assert "knobs" not in str(caught.value)
    made.cache(replace(made.method, lookup="two_level", probe=3))  # does not change what is stored
    with pytest.raises(UserError, match="built for context="):
        made.method.encode(made.model, helpers.context(seed=9), made.memory)
    assert made.method.encode(made.model, made.context.ids, made.memory).seen == len(made.context)
    for family in ("qwen3", "phi3"):
        with pytest.raises(
            UserError, match="built for architecture='llama, 3 layers, heads 6/2/16/16', not '"
        ):
            made.method.encode(helpers.model(family), made.context, made.memory)


def test_the_first_difference_is_named():
    refuse_mismatch({"a": 1, "b": 2}, {"a": 1})
    with pytest.raises(UserError, match=r"b=2, not 3"):
        refuse_mismatch({"a": 1, "b": 2}, {"a": 1, "b": 3})
    with pytest.raises(UserError, match=r"method.k=None, not 1"):
        refuse_mismatch({}, {"knobs": {"k": 1}})


def test_tensors_are_read_by_name(prepared):
    layer = prepared(TRACES, 8).layers()[0]
    assert layer.whiten is None and layer.keys is layer.tensors["keys"]
    with pytest.raises(AttributeError):
        _ = layer.nothing
    assert isinstance(layer, LayerMemory)


def test_move(prepared):
    made = prepared(TRACES, 8, family="gpt_oss")
    moved = made.memory.to("meta")
    assert moved is made.memory
    tensors = [x for layer in moved.layers.values() for x in layer.tensors.values()]
    tensors += [x for rows in moved.rows.values() for x in rows.values()]
    assert {x.device.type for x in tensors} == {"meta"}
