"""Prompts without a part that other questions share: the context is all of the prompt but its last token.

A method then compresses a prompt that includes the question, as in the papers on reasoning; the last token is
the query, from which the answer is generated. The ids are those of the whole prompt, however it is cut.
"""

from __future__ import annotations

from typing import Any

from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids, encode


def prompt_ids(tokenizer: Any, text: str, *, chat: bool) -> tuple[int, ...]:
    """Return the ids of a whole prompt: `text` after the BOS, or as the user's turn of a chat.

    Raises UserError for a chat with a tokenizer that has no chat template.
    """
    if not chat:
        return bos_ids(tokenizer) + tuple(encode(tokenizer, text))
    if not tokenizer.chat_template:
        raise UserError("the tokenizer of this model has no chat template: set task.prompt=plain")
    turns = [{"role": "user", "content": text}]
    rendered = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return tuple(encode(tokenizer, rendered))


def cut_last(tokenizer: Any, ids: tuple[int, ...]) -> tuple[Context, str, tuple[int, ...]]:
    """Return the context, and the text and ids of the query, of a prompt; a BOS becomes the header.

    The text of the query is what its one token decodes to, and so may be part of a character.
    """
    bos = bos_ids(tokenizer)
    header = bos if bos and ids[: len(bos)] == bos else ()
    return (
        Context(header, (ids[len(header) : -1],)),
        tokenizer.decode(ids[-1:], clean_up_tokenization_spaces=False),
        ids[-1:],
    )
