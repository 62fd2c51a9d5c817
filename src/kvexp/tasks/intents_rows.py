"""How `intents` makes rows of phrasings: at random for the context, never twice for queries and traces."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from kvexp.tasks.intents_text import FILLERS, OPENERS
from kvexp.tasks.labels import Row, normalise, rows_sha256


class Intent(NamedTuple):
    """A label and the phrasings that a seed drew for it."""

    label: str
    phrasings: tuple[str, ...]


@dataclass(frozen=True)
class IntentsDraw:
    """What a seed draws. `held_out` are rows that no context and no trace may contain."""

    stream: str
    intents: tuple[Intent, ...]
    order: str
    labels: tuple[str, ...]
    queries: tuple[Row, ...]
    held_out: tuple[Row, ...]
    calibration: tuple[Row, ...]

    @property
    def sha256(self) -> str:
        """The sha256 of everything that determines the rows: intents, texts that fill them, queries."""
        intents = [(intent.label, *intent.phrasings) for intent in self.intents]
        return rows_sha256(intents, [OPENERS, *FILLERS.values()], self.queries, self.calibration)

    def demonstrations(self) -> Iterator[Row]:
        """Rows without end, none of them held out."""
        rng = random.Random(f"{self.stream}/demonstrations")
        held_out = {normalise(row.text) for row in self.held_out}
        rounds = _rounds(rng, self.intents) if self.order == "rounds" else _at_random(rng, self.intents)
        for number, intent in enumerate(rounds):
            phrasing = rng.choice(intent.phrasings)
            text = _fill(rng, phrasing)
            while normalise(text) in held_out:
                text = _fill(rng, phrasing)
            yield Row(f"demonstration-{number}", text, intent.label)

    def traces(self, context: Sequence[Row], n: int, seed: int) -> list[Row]:
        """Distinct rows, neither held out nor for calibration; they may repeat rows of the context."""
        unique = UniqueRows(self.intents, spare=0)
        unique.exclude((*self.held_out, *self.calibration))
        return unique.rows(random.Random(f"{self.stream}/{seed}/traces"), n, "trace")


class UniqueRows:
    """Draws rows that never repeat, balanced over labels, and leaves `spare` utterances of each phrasing."""

    def __init__(self, intents: Sequence[Intent], spare: int) -> None:
        self._intents = intents
        self._used: set[str] = set()
        utterances = {phrasing: _utterances(phrasing) for intent in intents for phrasing in intent.phrasings}
        self._left = {phrasing: len(texts) - spare for phrasing, texts in utterances.items()}
        self._phrasing_of = {
            normalise(text): phrasing for phrasing, texts in utterances.items() for text in texts
        }

    def exclude(self, rows: Sequence[Row]) -> None:
        """Never draw the utterances of `rows`, which must be distinct."""
        for row in rows:
            self._take(row.text)

    def rows(self, rng: random.Random, n: int, name: str, balanced: bool = False) -> list[Row]:
        """Draw `n` rows in rounds over the labels, or fewer where utterances run out.

        An intent that has none left is passed over, or ends the draw where the rows must be `balanced`.
        """
        rows: list[Row] = []
        intents = _rounds(rng, self._intents)
        while len(rows) < n and any(left > 0 for left in self._left.values()):
            intent = next(intents)
            phrasings = [phrasing for phrasing in intent.phrasings if self._left[phrasing] > 0]
            if not phrasings and balanced:
                break
            if not phrasings:
                continue
            text = self._fresh(rng, rng.choice(phrasings))
            rows.append(Row(f"{name}-{len(rows)}", text, intent.label))
        return rows

    def _fresh(self, rng: random.Random, phrasing: str) -> str:
        text = _fill(rng, phrasing)
        while normalise(text) in self._used:
            text = _fill(rng, phrasing)
        self._take(text)
        return text

    def _take(self, text: str) -> None:
        key = normalise(text)
        self._used.add(key)
        self._left[self._phrasing_of[key]] -= 1


def _rounds(rng: random.Random, intents: Sequence[Intent]) -> Iterator[Intent]:
    while True:
        yield from rng.sample(intents, len(intents))


def _at_random(rng: random.Random, intents: Sequence[Intent]) -> Iterator[Intent]:
    while True:
        yield rng.choice(intents)


def _fill(rng: random.Random, phrasing: str) -> str:
    fillers = {name: rng.choice(texts) for name, texts in FILLERS.items()}
    return rng.choice(OPENERS) + phrasing.format(**fillers)


def slot(phrasing: str) -> str | None:
    """Return the name of the slot in `phrasing`, if it has one."""
    return next((name for name in FILLERS if f"{{{name}}}" in phrasing), None)


def _utterances(phrasing: str) -> list[str]:
    name = slot(phrasing)
    bodies = [phrasing.format(**{name: text}) for text in FILLERS[name]] if name else [phrasing]
    return [opener + body for opener in sorted(set(OPENERS)) for body in bodies]
