"""Tokenizers and small published sets for the tests of tasks."""

from __future__ import annotations

import gzip
import json

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from kvexp.embedded import SMOLLM2, cache_folder
from kvexp.tasks.intents_text import COLOURS, FILLERS, OPENERS, TOPICS


@pytest.fixture(scope="session")
def words() -> PreTrainedTokenizerFast:
    """A byte-pair tokenizer trained on the words of `intents`: a colour after a space is one token."""
    corpus = [
        *(f" {colour}" for colour in COLOURS),
        *OPENERS,
        *(f" {text}" for texts in FILLERS.values() for text in texts),
    ]
    corpus += [phrasing for topic in TOPICS for phrasing in topic.phrasings] + ["\nQuery:\nIntent:"]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus * 2,
        trainers.BpeTrainer(
            vocab_size=4000,
            min_frequency=2,
            special_tokens=["<s>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", clean_up_tokenization_spaces=False
    )


@pytest.fixture(scope="session")
def marking() -> PreTrainedTokenizerFast:
    """One token a letter; the start of a string and every space are marked, as SentencePiece does."""
    letters = {chr(i) for i in range(33, 127)} | {"▁", "\n"}
    tokenizer = Tokenizer(
        models.BPE(vocab={letter: i for i, letter in enumerate(sorted(letters))}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    tokenizer.decoder = decoders.Metaspace(prepend_scheme="first")
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False)


@pytest.fixture(scope="session")
def embedded() -> PreTrainedTokenizerFast:
    """The tokenizer of the embedded model, where its file has been fetched."""
    path = cache_folder() / SMOLLM2.member.rsplit("/", 1)[-1]
    if not path.is_file():
        pytest.skip("the embedded model has not been fetched")
    return PreTrainedTokenizerFast.from_pretrained(str(path.parent), gguf_file=path.name)


@pytest.fixture
def folder(tmp_path):
    """Write rows as the files of a set: folder(name, split, rows) returns the data folder."""

    def write(name, split, rows):
        (tmp_path / name).mkdir(exist_ok=True)
        with gzip.open(tmp_path / name / f"{split}.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(row) + "\n" for row in rows)
        return str(tmp_path)

    return write
