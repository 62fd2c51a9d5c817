"""What is said as triples of subject, relation and object, offline or by a language model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from kvexp.notes.answers import rows, unreadable, values
from kvexp.notes.units import Ask, Turn
from kvexp.notes.words import clauses, terms

_PROMPT = """\
List what the text below says as triples of subject, relation and object: people, places, organisations, \
dates, events, things and what they have to do with each other. Answer with one JSON list of lists of three \
short texts.

{text}"""
_MENTIONS = "mentions"
_IRREGULAR = frozenset(
    "ate became began bought brought built came caught chose drew drove fell felt flew found gave grew held"
    " kept knew left lost met paid ran rode sang saw sent sold spent spoke swam taught threw told took went"
    " won wore wrote".split()
)


class Triple(NamedTuple):
    """One statement, and the time it was made."""

    subject: str
    relation: str
    object: str
    time: str = ""

    @property
    def terms(self) -> list[str]:
        """Its terms, those of the time too."""
        return terms(f"{self.subject} {self.relation} {self.object} {self.time}")

    @property
    def ends(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Its two entities as `entity` names them."""
        return entity(self.subject), entity(self.object)


def entity(text: str) -> tuple[str, ...]:
    """Return the name of an entity: its stems, sorted, so that "the studios" and "studio" are one."""
    return tuple(sorted(set(terms(text))))


def made(turns: Sequence[Turn]) -> Iterator[Triple]:
    """Yield a triple for each phrase of the turns that is more than a verb.

    A phrase that ends in a verb gives it to the next one of its clause, and the words before the verb are the
    subject: "Bob visited the museum" is Bob, visited, museum. A phrase that begins with a verb is what it
    says of the speaker. All others are mentioned by the speaker.
    """
    for turn in turns:
        for clause in clauses(turn.text):
            subject, relation = turn.speaker, _MENTIONS
            for place, words in enumerate(clause, 1):
                if _verbal(words[-1]) and place < len(clause):
                    subject, relation = " ".join(words[:-1]) or turn.speaker, words[-1]
                    continue
                if relation == _MENTIONS and len(words) > 1 and _verbal(words[0]):
                    relation, words = words[0], words[1:]
                yield Triple(subject, relation, " ".join(words), turn.time)
                subject, relation = turn.speaker, _MENTIONS


def _verbal(word: str) -> bool:
    """Whether a word looks like a verb that is told: in -ed or -ing, or a common irregular one."""
    return word in _IRREGULAR or (len(word) > 4 and word.endswith(("ed", "ing")))


def asked(ask: Ask, text: str, time: str) -> list[Triple]:
    """Return the triples that a language model finds, which may be none.

    Raises UserError where its answer holds neither a triple nor an empty list.
    """
    answer = ask(_PROMPT.format(text=text))
    found = rows(answer, 3)
    if not found and [] not in list(values(answer)):
        raise unreadable("triples as JSON lists of three texts", answer)
    return [Triple(subject, relation, thing, time) for subject, relation, thing in found]
