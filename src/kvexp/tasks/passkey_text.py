"""The texts of the task passkey: facts, and the sentences of a source that they lie between."""

from __future__ import annotations

import random
import re
from collections.abc import Iterator, Sequence
from itertools import chain, cycle
from typing import Any, NamedTuple

from kvexp.errors import UserError
from kvexp.prompt import bos_ids, continuation, encode
from kvexp.tasks.fitting import largest
from kvexp.tasks.texts import Text, sentences

NAMES = tuple(
    "Anna Ben Carl Diana Edward Frank Grace Henry Irene Jack Kate Leo Maria Nora Oscar Paul Rachel Simon Tom"
    " Victor Walter Alice Bruno Clara David Emma Felix George Helen Isaac Julia Kevin".split()
)
WORDS = tuple(
    "apple bridge candle desert eagle feather garden hammer island jacket kettle lemon mirror needle ocean"
    " pencil rabbit saddle tiger tunnel velvet window yellow basket butter castle dragon engine forest guitar"
    " honey iron jungle kitchen ladder marble orange pepper river silver tower village wagon winter copper"
    " cotton fox moon piano salt ship snow spider stone sugar tea train wheat wolf wood cheese bread crown"
    " mountain".split()
)
_CLAUSE = 40  # words; longer sentences are parted, so that every depth has a border nearby


class Fact(NamedTuple):
    """The word of a name, and how deep it is told: the share of the context before it."""

    name: str
    word: str
    depth: float

    @property
    def question(self) -> str:
        """The fact up to its word, which asks for it after the text."""
        return f"The secret word of {self.name} is"

    @property
    def sentence(self) -> str:
        """The fact as it stands between sentences."""
        return f"{self.question} {self.word}. "


class Piece(NamedTuple):
    """A sentence or clause with the space after it, and its tokens."""

    text: str
    tokens: int


def take(tokenizer: Any, texts: Sequence[Text], tokens: int, rng: random.Random) -> list[Piece]:
    """Return pieces of the texts in a random order, from within the first, as many as `tokens` need.

    The texts repeat where they end. A piece counts the tokens that it adds to the piece before it.
    """
    order = rng.sample(texts, len(texts))
    first = list(_clauses(order[0]))
    rest = (clause for text in cycle([*order[1:], order[0]]) for clause in _clauses(text))
    taken: list[Piece] = []
    last, last_tokens = "", 0
    for clause in chain(first[rng.randrange(len(first)) :], rest):
        taken.append(Piece(clause, len(encode(tokenizer, last + clause)) - last_tokens))
        last, last_tokens = clause, len(encode(tokenizer, clause))
        tokens -= taken[-1].tokens
        if tokens <= 0:
            break
    return taken


def draw(tokenizer: Any, n: int, region: float, pieces: Sequence[Piece], rng: random.Random) -> list[Fact]:
    """Draw facts at the middles of `n` equal parts of a region of the context.

    No two have the same name or word. Words of one token, and words that the pieces lack, are preferred.
    """
    used = {word.lower() for piece in pieces for word in re.findall(r"[A-Za-z]+", piece.text)}
    asked = Fact("Anna", "", 0.0).question
    words = rng.sample(WORDS, len(WORDS))
    words.sort(key=lambda word: (len(continuation(tokenizer, asked, f" {word}")) > 1, word in used))
    names = rng.sample(NAMES, n)
    depths = [region * (i + 0.5) / n for i in range(n)]
    return [Fact(*fact) for fact in zip(names, words, depths, strict=False)]


def build(tokenizer: Any, pieces: Sequence[Piece], facts: Sequence[Fact], tokens: int) -> str:
    """Return a text of at most `tokens` tokens, BOS included, that ends with a line break.

    Each fact stands between the two pieces whose border is nearest to its depth; the end is cut at a word.
    Raises UserError when the text has no room for the facts.
    """
    parts, at = [], len(bos_ids(tokenizer))
    waiting = list(facts)
    for piece in pieces:
        while waiting and waiting[0].depth * tokens <= at + piece.tokens / 2:
            told = waiting.pop(0).sentence
            parts.append(told)
            at += len(encode(tokenizer, told))
        parts.append(piece.text)
        at += piece.tokens
    words = re.findall(r"\s*\S+", "".join(parts))

    def cost(n: int) -> int:
        return len(bos_ids(tokenizer)) + len(encode(tokenizer, _ended(words[:n])))

    n = largest(cost, tokens, low=1, high=len(words), guess=len(words))
    text = _ended(words[: n or 0])
    if waiting or not all(fact.sentence.strip() in text for fact in facts):
        raise UserError(
            f"task.context_tokens={tokens} has no room for {len(facts)} facts: set task.n_facts to fewer, or"
            " task.context_tokens to more"
        )
    return text


def _ended(words: Sequence[str]) -> str:
    return "".join(words) + "\n"


def _clauses(text: Text) -> Iterator[str]:
    """The sentences of a text; long ones are parted at line breaks, and where need be after 40 words."""
    for sentence in sentences(f"{text.text.strip()}\n\n"):
        lines = [sentence] if len(sentence.split()) <= _CLAUSE else sentence.splitlines(keepends=True)
        for line in lines:
            yield from re.findall(rf"\s*(?:\S+\s*){{1,{_CLAUSE}}}", line) or [line]
