"""A model whose layers do not lie together answers as one whose layers do.

What a CPU can show: layers whose weights accelerate has put on disk, so that nothing may read them from a
module, and whose inputs its hooks move. That tensors of two devices never meet, nothing here shows.
"""

from __future__ import annotations

import copy
import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import dispatch_model

from cells import cell, samples_of
from kvexp import model
from kvexp import run as pipe
from kvexp.attention.devices import layer_devices
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.methods.memory.prepare import weights

LABELS = ("limit=4", "calibration.n=8", "fidelity=true")
REUSE = ("task=state_change", "task.n=2", "logger=none", "model=tiny-llama")


def dispatched(loaded: model.LoadedModel, folder: Path) -> model.LoadedModel:
    """The model with its middle layer and its head on disk, as accelerate hooks it."""
    net: Any = copy.deepcopy(loaded.model)
    places: dict[str, Any] = {name: "cpu" for name in ("model.embed_tokens", "model.norm")}
    places |= {"model.rotary_emb": "cpu", "model.layers.0": "cpu", "model.layers.2": "cpu"}
    places |= {"model.layers.1": "disk", "lm_head": "disk"}
    net = dispatch_model(net, places, main_device="cpu", offload_dir=str(folder), force_hooks=True)
    assert next(net.model.layers[1].parameters()).device.type == "meta"
    return dataclasses.replace(loaded, model=net)


@pytest.mark.parametrize(
    "method",
    [
        "asm",
        "triattention",
        *(pytest.param(name, marks=pytest.mark.slow) for name in ("full", "snapkv", "kivi")),
    ],
)
def test_methods_answer_alike(method: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    more = (f"method={method}", *LABELS, "calibration.tokens=300" if method == "triattention" else "seed=0")
    whole, spread = (cell(tmp_path / name, *more) for name in ("whole", "spread"))
    pipe.run(whole)
    loaded = dispatched(model.load_once(whole.model), tmp_path / "disk")
    monkeypatch.setattr(model, "load_once", lambda *spec, **knobs: loaded)
    pipe.run(spread)
    assert samples_of(spread) == samples_of(whole)
    stores = [sorted(tmp_path.glob(f"{name}/store/*/*.safetensors")) for name in ("whole", "spread")]
    for one, other in zip(*stores, strict=True):
        assert one.read_bytes() == other.read_bytes()


def test_reuse_answers_alike(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    [whole], [spread] = (
        settings_of([*REUSE, "method=agentkvshift", f"output_dir={tmp_path / name}"])
        for name in ("whole", "spread")
    )
    pipe.run(whole)
    loaded = dispatched(model.load_once(whole.model), tmp_path / "disk")
    monkeypatch.setattr(model, "load_once", lambda *spec, **knobs: loaded)
    pipe.run(spread)
    assert samples_of(spread) == samples_of(whole)


def test_where_layers_compute_and_what_they_hold(tmp_path: Path) -> None:
    loaded = model.load_once(cell(tmp_path).model)
    spread = dispatched(loaded, tmp_path / "disk")
    assert layer_devices(spread.model) == layer_devices(loaded.model) == [torch.device("cpu")] * 3
    assert weights(spread.model) == weights(loaded.model)


def test_an_embedding_that_fits_nowhere_is_refused(tmp_path: Path) -> None:
    spec = cell(tmp_path).model
    loaded = model.load_once(spec)
    net = copy.deepcopy(loaded.model).to("meta")
    with pytest.raises(UserError, match=r"tiny-llama does not fit: model\.device_map=None"):
        model._loaded(spec, net, loaded.tokenizer, "")


def test_one_model_on_all_devices_is_not_for_several_processes(tmp_path: Path) -> None:
    more = ("model=hf", "model.id=x/y", "model.device_map=auto", "+trainer.num_nodes=2", "method=full")
    with pytest.raises(UserError, match=r"device_map gives one process all devices"):
        pipe.run(cell(tmp_path, *more))
