"""Which language model a knob names, and the model under test as one."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from helpers import model
from kvexp import tiny
from kvexp.errors import UserError
from kvexp.notes.amem import AMem
from kvexp.notes.endpoint import URL
from kvexp.notes.llm import Local, named, under_test
from kvexp.notes.units import Turn
from kvexp.prompt import bos_ids, encode

CHAT = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<answer>{% endif %}"
)


@pytest.fixture
def loaded() -> SimpleNamespace:
    return SimpleNamespace(
        model=model("llama"),
        tokenizer=tiny.tokenizer(),
        sha256="0" * 64,
        dtype=torch.float32,
        device=torch.device("cpu"),
    )


def slow(loaded: SimpleNamespace, ids: list[int], n: int) -> str:
    """Greedy decoding, a whole forward for each token."""
    made: list[int] = []
    while len(made) < n:
        with torch.no_grad():
            logits = loaded.model(torch.tensor([ids + made])).logits[0, -1]
        made.append(int(logits.argmax()))
        if made[-1] == loaded.tokenizer.eos_token_id:
            break
    return loaded.tokenizer.decode(made, skip_special_tokens=True).strip()


def test_a_loaded_model_answers_greedily(loaded):
    ids = [*bos_ids(loaded.tokenizer), *encode(loaded.tokenizer, "List it.\n")]
    assert Local(loaded, max_tokens=6)("List it.") == slow(loaded, ids, 6)


def test_a_prompt_is_the_users_turn_of_a_chat(loaded):
    loaded.tokenizer.chat_template = CHAT
    ids = encode(loaded.tokenizer, "<user>List it.<answer>")
    assert Local(loaded, max_tokens=6)("List it.") == slow(loaded, ids, 6)


def test_answers_are_kept_for_the_weights(loaded, tmp_path):
    first = Local(loaded, tmp_path, 6)("List it.")
    loaded.model = None
    assert Local(loaded, tmp_path, 6)("List it.") == first
    with pytest.raises(AttributeError):
        Local(SimpleNamespace(**{**vars(loaded), "sha256": "1" * 64}), tmp_path, 6)("List it.")


def test_self_is_the_model_under_test(loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
    with under_test(loaded):
        assert named("self", "notes.llm") == Local(loaded, tmp_path / "answers")
    with pytest.raises(UserError, match=r"notes\.llm=self is the model under test, and none is loaded"):
        named("self", "notes.llm")


def test_a_memory_whose_model_writes_no_json_says_so(loaded, monkeypatch, tmp_path):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path))
    with under_test(loaded), pytest.raises(UserError, match='asked for a JSON object with "keywords"'):
        AMem(llm="self").open().add(Turn("1", "Ann", "Hello"))


def test_other_names_are_models_at_the_endpoint(monkeypatch):
    monkeypatch.setenv(URL, "http://127.0.0.1:9/v1")
    assert named(None, "notes.llm") is None
    found = named("small", "notes.llm")
    assert (found.model, found.url) == ("small", "http://127.0.0.1:9/v1")  # type: ignore[union-attr]
    monkeypatch.delenv(URL)
    with pytest.raises(UserError, match=f"notes.llm=small needs an endpoint, and {URL} is not set"):
        AMem(llm="small").open()
