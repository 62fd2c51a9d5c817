"""Contexts as token ids, exact continuations, and tokenizers that would destroy a prompt."""

from __future__ import annotations

import hashlib

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from kvexp import tiny
from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids, continuation, encode


def marking(vocabulary: str) -> PreTrainedTokenizerFast:
    """A tokenizer of single letters that marks the start of a string and every space, like SentencePiece."""
    words = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(vocabulary)}, merges=[]))
    words.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    words.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)


LETTERS = "".join(
    sorted(set("Classify it.\nQuery: Hi, my key's card does not work in room 12\nIntent: dark red"))
)


def test_context_joins_header_and_chunks():
    context = Context((1, 2), ((3,), (4, 5)))
    assert context.ids == (1, 2, 3, 4, 5)
    assert len(context) == 5
    assert context.key == hashlib.sha256(b"1,2,3,4,5").hexdigest()[:16]


def test_key_names_the_ids_and_not_their_parts():
    assert Context((1,), ((2, 3),)).key == Context((1, 2), ((3,),)).key
    assert Context((1,), ((2, 3),)).key != Context((1,), ((23,),)).key
    assert Context((), ()).ids == ()


def test_encode_adds_nothing():
    assert encode(tiny.tokenizer(), "Query: a") == tiny.tokenizer().encode(
        "Query: a", add_special_tokens=False
    )
    assert tiny.tokenizer().decode(encode(tiny.tokenizer(), "Query: é\n")) == "Query: é\n"


def test_continuation_lacks_the_mark_of_a_start():
    tokenizer = marking("▁" + LETTERS)
    alone = tokenizer.convert_ids_to_tokens(encode(tokenizer, "Intent"))
    after = tokenizer.convert_ids_to_tokens(continuation(tokenizer, "\n", "Intent"))
    assert alone == ["▁", *"Intent"]
    assert after == list("Intent")


def test_continuation_refuses_a_merge_at_the_border():
    vocabulary = {letter: i for i, letter in enumerate(sorted({*LETTERS, "Ġ", "Ċ", "ab"}))}
    words = Tokenizer(models.BPE(vocab=vocabulary | {"a": 90, "b": 91}, merges=[("a", "b")]))
    words.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words.decoder = decoders.ByteLevel()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, clean_up_tokenization_spaces=False)
    with pytest.raises(UserError, match="merges 'a' with the 'b'"):
        continuation(tokenizer, "a", "b")


def test_a_tokenizer_that_loses_spaces_is_refused():
    words = Tokenizer(
        models.BPE(
            vocab={letter: i for i, letter in enumerate("?" + LETTERS.replace(" ", ""))},
            merges=[],
            unk_token="?",
        )
    )
    words.decoder = decoders.Fuse()
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=words, unk_token="?", clean_up_tokenization_spaces=False
    )
    with pytest.raises(UserError, match="turns 'Classify it"):
        encode(tokenizer, "Query")


@pytest.mark.parametrize(
    ("bos", "expected"), [("<|begin|>", ["<|begin|>"]), ("<|im_start|>", ["<|endoftext|>"]), (None, [])]
)
def test_bos(bos, expected):
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": ["<|im_start|>", "<|endoftext|>"]})
    tokenizer.bos_token = bos
    assert bos_ids(tokenizer) == tuple(tokenizer.convert_tokens_to_ids(token) for token in expected)
