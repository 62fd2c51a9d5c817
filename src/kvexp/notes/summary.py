"""A session in a few of its sentences."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from kvexp.notes.answers import unreadable
from kvexp.notes.chunks import span
from kvexp.notes.units import Ask, Turn, Unit, as_unit, tidy
from kvexp.notes.words import terms
from kvexp.tasks.texts import sentences

_SENTENCES = 3
_PROMPT = """\
Sum up what is said below in at most three sentences; name the people and things that it is about.

{text}"""


class _Sentence(NamedTuple):
    place: int
    weight: float
    turn: Turn
    text: str


def summarised(turns: Sequence[Turn], idf: Callable[[str], float], ask: Ask | None) -> Unit:
    """Return a session as one line: the three sentences whose terms weigh most on average, in their order.

    A term counts once in a sentence, and a sentence has four terms at least, where one does. With a language
    model the text is its own, and stems from all turns. Raises UserError where it says nothing.
    """
    name = f"summary {span(turns)}"
    time = f"[{turns[0].time}] " if turns[0].time else ""
    if ask is not None:
        said = " ".join(ask(_PROMPT.format(text="\n".join(turn.said for turn in turns))).split())
        if not said:
            raise unreadable("a summary", said)
        return Unit(name, as_unit(f"{time}Summary: {said}"), tuple(turn.id for turn in turns), turns[0].time)
    ranked = sorted(_weighed(turns, idf), key=lambda one: (-one.weight, one.place))[:_SENTENCES]
    kept = sorted(ranked, key=lambda one: one.place)
    said = " ".join(f"{one.turn.speaker}: {one.text}" if one.turn.speaker else one.text for one in kept)
    sources = tuple(dict.fromkeys(one.turn.id for one in kept))
    return Unit(name, as_unit(f"{time}Summary: {said}"), sources, turns[0].time)


def _weighed(turns: Sequence[Turn], idf: Callable[[str], float]) -> Iterator[_Sentence]:
    place = 0
    for turn in turns:
        for text in sentences(" ".join(tidy(turn.text).split())):
            own = set(terms(text))
            yield _Sentence(place, sum(map(idf, sorted(own))) / max(4, len(own)), turn, text.strip())
            place += 1
