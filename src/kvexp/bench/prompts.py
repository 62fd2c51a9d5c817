"""Contexts of a given length in units of real text, and a question for each, to time prefill on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any

from kvexp.calibration.prepare import draw_segments
from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids, encode
from kvexp.schema import Settings
from kvexp.tasks.locomo import Locomo

UNIT, QUESTION = 128, 24  # tokens of a unit and of a question, where they are cut from plain text
HEADER = "These are passages of a manual.\n"
DRAWN, SHORTEST = 16, 16  # questions drawn for each context; tokens that a unit has on average at least


@dataclass(frozen=True)
class Prompts:
    """A batch of contexts of one length, a question for each, and where they come from."""

    contexts: list[Context]
    queries: list[tuple[int, ...]]
    source: str


def prompts_for(settings: Settings, loaded: Any, length: int, batch: int) -> Prompts:
    """Return `batch` contexts of `length` tokens: of notes with `data_dir`, else of plain text.

    Raises UserError where there is not enough text.
    """
    if settings.data_dir is not None:
        return _of_notes(settings, loaded, length, batch)
    return _of_text(settings, loaded, length, batch)


def cut(context: Context, length: int) -> Context:
    """Return the first `length` tokens of a context; its last unit may lose its end."""
    left, chunks = length - len(context.header), []
    for chunk in context.chunks:
        if left > 0:
            chunks.append(chunk[:left])
        left -= len(chunk)
    return Context(context.header[:length], tuple(chunks))


def in_units(text: Iterator[int], header: tuple[int, ...], length: int) -> Context:
    """Return a context of `header` and units of UNIT tokens, the last of them shorter, from a stream."""
    sizes = [UNIT] * -(-(length - len(header)) // UNIT)
    return cut(Context(header, tuple(tuple(islice(text, size)) for size in sizes)), length)


def _of_notes(settings: Settings, loaded: Any, length: int, batch: int) -> Prompts:
    if not isinstance(settings.task, Locomo):
        raise UserError(f"task={settings.task.id} has no notes of any number: take task=locomo")
    task = replace(settings.task, k=-(-length // SHORTEST), n=DRAWN * batch)
    drawn = task.load(loaded.tokenizer, seed=settings.seed, data_dir=settings.data_dir).questions
    long = [one for one in drawn if len(one.context) >= length][:batch]
    if len(long) < batch:
        most = max(len(one.context) for one in drawn)
        raise UserError(
            f"{len(long)} of {len(drawn)} questions have notes of {length} tokens, the longest has {most}:"
            f" set lengths={most} or less, or leave data_dir out"
        )
    contexts = [cut(one.context, length) for one in long]
    return Prompts(contexts, [one.query_ids for one in long], f"{task.id} ({task.notes.id})")


def _of_text(settings: Settings, loaded: Any, length: int, batch: int) -> Prompts:
    bos = bos_ids(loaded.tokenizer)
    spec = replace(settings.calibration, tokens=batch * (length + UNIT + QUESTION))
    segments = draw_segments(spec, loaded, settings.data_dir)
    text = iter([token for segment in segments for token in segment[len(bos) :]])
    header = (*bos, *encode(loaded.tokenizer, HEADER))
    pairs = [(in_units(text, header, length), tuple(islice(text, QUESTION))) for _ in range(batch)]
    contexts, queries = zip(*pairs, strict=True)
    return Prompts(list(contexts), list(queries), spec.path or spec.source)
