"""The embedded model, loaded from its conversion: skipped where the cache does not hold it."""

from __future__ import annotations

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvexp import converted, embedded, model


def spec(**changes) -> SimpleNamespace:
    """The group of the embedded model, on the CPU."""
    return SimpleNamespace(**{"name": "smollm2-135m", "source": "embedded", "device": "cpu", **changes})


@pytest.fixture(scope="module")
def smollm2():
    """The embedded model, where the cache has it."""
    names = Path(embedded.SMOLLM2.member).name, embedded.SMOLLM2.file
    if not any((embedded.cache_folder() / name).exists() for name in names):
        pytest.skip("the embedded model is not in the cache: run python -m kvexp.embedded")
    return model.load(spec(), needs_full_layer=True)


def test_the_embedded_model_is_what_it_claims_to_be(smollm2):
    config = smollm2.model.config
    assert (config.num_hidden_layers, config.num_attention_heads, config.num_key_value_heads) == (30, 9, 3)
    assert (config.head_dim, smollm2.context_limit, config.vocab_size) == (64, 8192, 49152)
    assert (smollm2.dtype, smollm2.device.type) == (torch.float32, "cpu")
    assert smollm2.sha256 == embedded.SMOLLM2.member_sha256
    assert not smollm2.model.training
    assert not any(weight.requires_grad for weight in smollm2.model.parameters())


def test_the_embedded_tokenizer_splits_as_it_was_trained(smollm2):
    def pieces(text):
        return smollm2.tokenizer.convert_ids_to_tokens(smollm2.tokenizer.encode(text))

    assert pieces(" red") == ["\u0120red"]
    # Each digit is a token of its own, and does not take the space before it.
    assert pieces("red  45") == ["red", "\u0120\u0120", "4", "5"]
    assert smollm2.tokenizer.unk_token_id not in smollm2.tokenizer.encode("a b  c\n d")
    text = "Utterance: what's  my d\u00e9bit 3.50?\nLabel: dark red\n\n\ttabs\u00a0\U0001f600"
    assert smollm2.tokenizer.decode(smollm2.tokenizer.encode(text)) == text


def test_the_embedded_model_speaks(smollm2):
    question = "Question: What is the capital of France?\nAnswer: The capital of France is"
    ids = torch.tensor([smollm2.tokenizer.encode(question)])
    assert smollm2.tokenizer.decode(smollm2.model(ids).logits[0, -1].argmax()) == " Paris"


def test_a_second_load_says_nothing_and_dtype_is_config(smollm2, capfd):
    loaded = model.load(spec(dtype="bfloat16"))
    assert loaded.dtype == torch.bfloat16
    assert all(weight.dtype == torch.bfloat16 for weight in loaded.model.parameters())
    assert capfd.readouterr().err == ""


def test_a_damaged_conversion_is_noticed(smollm2, tmp_path):
    folder = converted.folder()
    copy = tmp_path / folder.name
    shutil.copytree(folder, copy, ignore=lambda *_: ["model.safetensors"])
    assert converted.is_current(folder, embedded.SMOLLM2)
    assert not converted.is_current(copy, embedded.SMOLLM2)
    (copy / "model.safetensors").write_bytes(b"short")
    assert not converted.is_current(copy, embedded.SMOLLM2)
