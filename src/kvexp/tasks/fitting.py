"""Prompts that fill a length in tokens, cut into context and query where the tokenizer allows it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids, encode


class Cut(NamedTuple):
    """A prompt in two: the context that may be encoded alone, and the query as text and token ids."""

    context: Context
    query: str
    query_ids: tuple[int, ...]


def largest(
    cost: Callable[[int], int], room: int, low: int, high: int, guess: int, slack: int = 0
) -> int | None:
    """Return the largest size from `low` to `high` whose cost is at most `room`; None where `low` costs more.

    `cost` should rise with the size, about linearly, and is called a few times: secant steps from `guess`,
    every third one a bisection. A size that leaves at most `slack` of the room is taken at once. Where the
    cost does not rise everywhere, the size returned still fits and the next tried one does not.
    """
    known: list[tuple[int, int]] = []
    fits = exceeds = None
    size = min(max(guess, low), high)
    while True:
        known.append((size, cost(size)))
        if known[-1][1] <= room:
            fits = known[-1]
        else:
            exceeds = known[-1]
        if exceeds is not None and exceeds[0] == low:
            return None
        if fits is not None:
            done = fits[0] == high or (exceeds is not None and exceeds[0] - fits[0] == 1)
            if done or room - fits[1] <= slack:
                return fits[0]
        at_least = low if fits is None else fits[0] + 1
        at_most = high if exceeds is None else exceeds[0] - 1
        bisect = fits is not None and exceeds is not None and len(known) % 3 == 0
        size = (at_least + at_most) // 2 if bisect else _secant(known, room)
        size = min(max(size, at_least), at_most)


def cut(tokenizer: Any, context: str, query: str) -> Cut:
    """Return a prompt whose context is an exact token prefix of it, BOS in front.

    Line breaks at the end of `context` move to the query, one by one, where the tokenizer would merge the two
    otherwise. Raises UserError when no such border serves.
    """
    whole = encode(tokenizer, context + query)
    breaks = len(context) - len(context.rstrip("\n"))
    for moved in range(breaks + 1):
        border = len(context) - moved
        ids = encode(tokenizer, context[:border])
        if len(ids) < len(whole) and whole[: len(ids)] == ids:
            header = bos_ids(tokenizer)
            return Cut(Context(header, (tuple(ids),)), context[border:] + query, tuple(whole[len(ids) :]))
    raise UserError(
        f"the tokenizer merges {context[-20:]!r} with the {query[:20]!r} that follows, "
        "so one encoded context cannot serve its queries: use another model"
    )


def cut_nearest(tokenizer: Any, context: str, query: str) -> Cut:
    """Return a prompt cut at the last token border before the query that lies in `context` for any query.

    The context is what the tokens of `context` alone and those of the whole have in common; where the
    tokenizer merges the two texts, its last tokens go to the query. The ids are those of the whole prompt.
    """
    whole, alone = encode(tokenizer, context + query), encode(tokenizer, context)
    pairs = zip(whole, alone, strict=False)
    same = next((i for i, (a, b) in enumerate(pairs) if a != b), min(len(whole) - 1, len(alone)))
    rest = whole[same:]
    text = tokenizer.decode(rest, clean_up_tokenization_spaces=False)
    return Cut(Context(bos_ids(tokenizer), (tuple(whole[:same]),)), text, tuple(rest))


def _secant(known: list[tuple[int, int]], room: int) -> int:
    """The size at which the line through the two tries nearest to `room` has that cost."""
    (a, cost_a), (b, cost_b) = sorted([(0, 0), *known], key=lambda point: abs(point[1] - room))[:2]
    if cost_a == cost_b:
        return a
    return a + (room - cost_a) * (b - a) // (cost_b - cost_a)
