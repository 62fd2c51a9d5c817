"""Loading models from every source, and refusing in one line what cannot be served."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml

from kvexp import embedded, model, tiny
from kvexp.errors import UserError

ROOT = Path(__file__).parents[1]
GROUP = sorted((ROOT / "conf" / "model").glob("*.yaml"))
BY_NAME = {path.stem: yaml.safe_load(path.read_text()) for path in GROUP}


def spec(name: str = "hf", **changes) -> SimpleNamespace:
    """A model group as the run gives it, with changes from the command line."""
    return SimpleNamespace(**{**BY_NAME[name], **changes})


def save(folder: Path, family: str = "llama") -> Path:
    """A local folder as the hub would give it."""
    tiny.build(family).save_pretrained(folder)
    tiny.tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test here may ask a hub."""
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache folder."""
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", [name for name in BY_NAME if name.startswith("tiny-")])
def test_every_tiny_model_loads_and_repeats_itself(name):
    loaded, again = model.load(spec(name, device="cpu")), model.load(spec(name, device="cpu"))
    assert loaded.name == name
    assert loaded.sha256 == again.sha256
    ids = torch.tensor([loaded.tokenizer.encode("label: red\n")])
    assert torch.equal(loaded.model(ids).logits, again.model(ids).logits)
    assert loaded.model(ids).logits.dtype == loaded.dtype == torch.float32


def test_tiny_models_differ_in_their_sha256():
    names = [name for name in BY_NAME if name.startswith("tiny-")]
    assert len({model.load(spec(name, device="cpu")).sha256 for name in names}) == len(names) == 9


def test_a_tiny_model_takes_a_dtype():
    loaded = model.load(spec("tiny-qwen3", device="cpu", dtype="bfloat16"))
    assert {weight.dtype for weight in loaded.model.parameters()} == {torch.bfloat16}


def test_the_groups_have_the_same_keys_and_a_line_for_help():
    keys = list(BY_NAME["smollm2-135m"])
    for path in GROUP:
        first, *_ = path.read_text().splitlines()
        assert first.startswith("# ") and len(first) < 110
        assert list(BY_NAME[path.stem]) == keys
        assert BY_NAME[path.stem]["name"] == path.stem
        if path.stem != "hf":
            model.check(spec(path.stem))


def test_every_preset_has_its_real_configuration():
    presets = {name for name, entry in BY_NAME.items() if entry["source"] == "hub"} - {"hf"}
    assert presets == {path.stem for path in (ROOT / "tests" / "presets").glob("*.json")}
    assert len(presets) == 11


def test_checking_imports_no_torch():
    code = (
        "import sys; from types import SimpleNamespace as N; from kvexp import model\n"
        "model.check(N(source='tiny', family='qwen3'))\n"
        "print([name for name in ('torch', 'transformers', 'lightning') if name in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({}, "needs model.id"),
        ({"id": "x/y", "dtype": "bfloat"}, "model.dtype=bfloat, did you mean 'bfloat16'"),
        ({"id": "x/y", "source": "huub"}, "model.source=huub, did you mean 'hub'"),
        ({"id": "x/y", "attention": "flesh"}, "model.attention=flesh, did you mean 'flash'"),
        ({"id": "x/y", "device": "gpu"}, "model.device=gpu: choose one of auto, cpu"),
        ({"id": "x/y", "device": "cuda:x"}, "model.device=cuda:x"),
        ({"id": "x/y", "prefill_chunk": 0}, "model.prefill_chunk=0: give a number of tokens above 0"),
        ({"source": "tiny", "family": "qwen4"}, "model.family=qwen4, did you mean 'qwen"),
        ({"source": "tiny"}, "model.family=None: choose one of cohere2"),
        ({"id": "./not/there"}, "model.id=./not/there: there is no such folder or file"),
        ({"id": "organisation/model"}, "cannot load hf from 'organisation/model'"),
    ],
)
def test_mistakes_get_one_line(changes, sentence):
    with pytest.raises(UserError) as caught:
        model.load(spec(**changes))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_an_id_may_name(tmp_path):
    (tmp_path / "one.gguf").write_bytes(b"")
    here = str(tmp_path)
    assert model.locate("organisation/model") == ("organisation/model", None)
    assert model.locate("organisation/model/file.gguf") == ("organisation/model", "file.gguf")
    assert model.locate(f"{here}/one.gguf") == (here, "one.gguf")
    assert model.locate(here) == (here, "one.gguf")
    (tmp_path / "model.safetensors").write_bytes(b"")
    assert model.locate(here) == (here, None)
    with pytest.raises(UserError, match="there is no such folder or file"):
        model.locate(f"{here}/two.gguf")


def test_a_local_folder_loads_with_its_own_sha256(tmp_path, cache):
    folder = save(tmp_path / "local")
    loaded = model.load(spec(id=str(folder), device="cpu"))
    assert loaded.sha256 == embedded.sha256_of(folder / "model.safetensors")
    expected = tiny.build("llama").state_dict()
    assert all(torch.equal(tensor, expected[name]) for name, tensor in loaded.model.state_dict().items())


def test_pickled_weights_are_refused(tmp_path, cache):
    folder = save(tmp_path / "local")
    (folder / "model.safetensors").unlink()
    torch.save(tiny.build("llama").state_dict(), folder / "pytorch_model.bin")
    with pytest.raises(UserError, match=r"cannot load hf .*safetensors"):
        model.load(spec(id=str(folder), device="cpu"))


def test_code_that_comes_with_a_model_is_not_run(tmp_path, cache):
    folder = save(tmp_path / "local")
    trap = tmp_path / "trap"
    config = json.loads((folder / "config.json").read_text())
    config.update(model_type="trap", auto_map={"AutoConfig": "trap.Trap"})
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "trap.py").write_text(f"open({str(trap)!r}, 'w')\nclass Trap: pass\n")
    with pytest.raises(UserError, match="cannot load hf"):
        model.load(spec(id=str(folder), device="cpu"))
    assert not trap.exists()


@pytest.mark.parametrize(
    "changes, sentence",
    [
        ({"model_type": "gemma2"}, "caps its attention scores"),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "length of each call",
        ),
        ({"model_type": "gpt2"}, "unknown model type 'gpt2'"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "encoder-decoder"),
    ],
)
def test_models_that_cannot_be_served_are_refused_before_weights_load(tmp_path, cache, changes, sentence):
    folder = save(tmp_path / "local")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    (folder / "model.safetensors").unlink()
    with pytest.raises(UserError) as caught:
        model.load(spec(id=str(folder), device="cpu"))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)


def test_windowed_models_are_refused_only_where_a_full_layer_is_needed(tmp_path, cache):
    folder = save(tmp_path / "local", "mistral")
    assert model.load(spec(id=str(folder), device="cpu")).model.config.sliding_window == 8
    (folder / "model.safetensors").unlink()
    for asked in (spec(id=str(folder), device="cpu"), spec("tiny-mistral", device="cpu")):
        with pytest.raises(UserError, match="no full-attention layer"):
            model.load(asked, needs_full_layer=True)


def test_a_tokenizer_class_that_loses_spaces_is_not_trusted(tmp_path, cache):
    """A configuration may name a class that reads the vocabulary otherwise: the file itself decides."""
    folder = save(tmp_path / "local")
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(json.dumps({**config, "tokenizer_class": "LlamaTokenizer"}))
    tokenizer = model.load(spec(id=str(folder), device="cpu")).tokenizer
    assert tokenizer.decode(tokenizer.encode("two  spaces, one\nline")) == "two  spaces, one\nline"


def test_a_tokenizer_that_changes_text_is_refused(tmp_path, cache):
    folder = save(tmp_path / "local")
    entries = json.loads((folder / "tokenizer.json").read_text())
    entries["normalizer"] = {"type": "Lowercase"}
    (folder / "tokenizer.json").write_text(json.dumps(entries))
    with pytest.raises(UserError, match="the tokenizer of hf does not give back the text it encodes"):
        model.load(spec(id=str(folder), device="cpu"))


def test_each_process_of_a_machine_takes_its_own_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    for name in ("LOCAL_RANK", "SLURM_LOCALID"):
        monkeypatch.delenv(name, raising=False)
    assert model.pick_device("auto") == torch.device("cuda", 0)
    monkeypatch.setenv("SLURM_LOCALID", "3")
    assert model.pick_device("cuda") == torch.device("cuda", 1)
    monkeypatch.setenv("LOCAL_RANK", "0")
    assert model.pick_device("cuda") == torch.device("cuda", 0)
    assert model.pick_device("cuda:1") == torch.device("cuda", 1)
    assert model.pick_device("cpu") == torch.device("cpu")
    with pytest.raises(UserError, match=r"model.device=cuda:2, but torch sees 2 CUDA devices"):
        model.pick_device("cuda:2")


def test_without_cuda_auto_is_the_cpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    assert model.pick_device("auto") == torch.device("cpu")
    with pytest.raises(UserError, match=r"torch sees 0 CUDA devices: use model.device=cpu"):
        model.pick_device("cuda")


def test_auto_dtype_is_float32_on_a_cpu_and_the_checkpoints_elsewhere():
    def chosen(device, dtype):
        return model.load_dtype(SimpleNamespace(dtype=dtype), torch.device(device), "auto")

    assert chosen("cpu", "auto") == torch.float32
    assert chosen("cuda", "auto") == "auto"
    assert chosen("cpu", "bfloat16") == chosen("cuda", "bfloat16") == torch.bfloat16
