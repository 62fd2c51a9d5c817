"""What a language model is asked for, and how its answer is read: leniently in form, never by guessing."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from kvexp.errors import UserError


def values(answer: str) -> Iterator[Any]:
    """Yield every JSON object and list that stands in an answer, with whatever text around and between them.

    A list or object that is cut short is passed over; those inside it that are whole are yielded.
    """
    decode = json.JSONDecoder().raw_decode
    at = 0
    while at < len(answer):
        if answer[at] in "{[":
            try:
                value, at = decode(answer, at)
            except ValueError:
                at += 1
            else:
                yield value
        else:
            at += 1


def rows(answer: str, width: int) -> list[tuple[str, ...]]:
    """Return the lists of `width` texts or numbers in an answer, alone or in a list of such lists."""
    found: list[tuple[str, ...]] = []
    for value in values(answer):
        lists = value if isinstance(value, list) and all(isinstance(row, list) for row in value) else [value]
        for row in lists:
            if isinstance(row, list) and len(row) == width and len(texts(row)) == width:
                found.append(tuple(texts(row)))
    return found


def texts(given: Any) -> list[str]:
    """Return the texts and numbers of a list, each as one line; none where it is no list."""
    fit = [item for item in given if isinstance(item, str | int | float)] if isinstance(given, list) else []
    return [" ".join(str(item).split()) for item in fit]


def unreadable(wanted: str, answer: str) -> UserError:
    """Return the error that says that an answer is not what was asked for."""
    shown = " ".join(answer.split())
    shown = f"{shown[:80]}..." if len(shown) > 80 else shown
    return UserError(
        f'a language model was asked for {wanted} and answered "{shown}": take one that follows instructions'
        " better, or notes.llm=null to work offline"
    )
