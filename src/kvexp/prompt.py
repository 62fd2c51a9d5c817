"""From text to token ids: the context that all queries of a task share, and exact continuations of it.

A context is an exact token prefix of every prompt: its ids followed by those of a query are what the
tokenizer makes of the whole text. Only then may one encoded context serve many queries.
"""

from __future__ import annotations

import hashlib
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from kvexp.errors import UserError

_PROBE = "Classify it.\nQuery: Hi, my key's card does not work in room 12\nIntent: dark red\n"
_checked: weakref.WeakSet[Any] = weakref.WeakSet()


@dataclass(frozen=True)
class Context:
    """A shared prefix as token ids: a header (BOS and description), then chunks (whole demonstrations)."""

    header: tuple[int, ...]
    chunks: tuple[tuple[int, ...], ...]

    @classmethod
    def of(cls, context: Context | Sequence[int]) -> Context:
        """Return `context`, made of one chunk where it is a plain list of ids."""
        return context if isinstance(context, Context) else cls((), (tuple(context),))

    @cached_property
    def ids(self) -> tuple[int, ...]:
        """All token ids in order, header first."""
        return self.header + tuple(token for chunk in self.chunks for token in chunk)

    @cached_property
    def key(self) -> str:
        """16 hex digits that name these ids."""
        return hashlib.sha256(",".join(map(str, self.ids)).encode()).hexdigest()[:16]

    def __len__(self) -> int:
        return len(self.ids)


def encode(tokenizer: Any, text: str) -> list[int]:
    """Return the token ids of `text`, without special tokens.

    The first use of a tokenizer checks that a prompt survives encoding and decoding: some tokenizer classes
    replace every space by the unknown token without an error. Raises UserError when it does not survive.
    """
    if tokenizer not in _checked:
        _check_round_trip(tokenizer)
        _checked.add(tokenizer)
    return _encode(tokenizer, text)


def continuation(tokenizer: Any, before: str, text: str) -> list[int]:
    """Return the token ids of `text` where it stands right after `before`.

    Differs from `encode(text)` for tokenizers that mark the start of a string. Raises UserError when the
    tokenizer merges the two texts at their border, since then `before` is not a token prefix of the whole.
    """
    prefix, whole = encode(tokenizer, before), encode(tokenizer, before + text)
    if whole[: len(prefix)] != prefix:
        raise UserError(
            f"the tokenizer merges {before[-20:]!r} with the {text[:20]!r} that follows, "
            "so one encoded context cannot serve its queries: use another model"
        )
    return whole[len(prefix) :]


def bos_ids(tokenizer: Any) -> tuple[int, ...]:
    """Return the ids that open a prompt: the tokenizer's BOS, or () where it has none.

    A BOS that opens a chat turn (SmolLM2 declares `<|im_start|>`) opens no plain text: there the end-of-text
    token, which separates documents in training, takes its place.
    """
    if tokenizer.bos_token == "<|im_start|>":
        return (tokenizer.convert_tokens_to_ids("<|endoftext|>"),)
    return () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)


def _encode(tokenizer: Any, text: str) -> list[int]:
    return list(tokenizer.encode(text, add_special_tokens=False, verbose=False))


def _check_round_trip(tokenizer: Any) -> None:
    back = tokenizer.decode(_encode(tokenizer, _PROBE), clean_up_tokenization_spaces=False)
    if back != _PROBE:
        raise UserError(
            f"the tokenizer of this model turns {_PROBE[:30]!r} into {back[:30]!r}: "
            "load its tokenizer.json, or use another model"
        )
