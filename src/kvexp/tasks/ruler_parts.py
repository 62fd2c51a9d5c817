"""What the subtasks of RULER share: a recipe renders one sample at any size, so that a size can be fitted."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from kvexp.tasks.ruler_material import Templates, Words


@dataclass(frozen=True)
class Sample:
    """A prompt before and from its question, the references, and a text that gives them all.

    `answer` starts with a space; of references that are alternatives it has the first.
    """

    context: str
    query: str
    expected: tuple[str, ...]
    answer: str


@dataclass(frozen=True)
class Recipe:
    """A sample of a size: `render(n)` has `n` units of text (lines, words or documents), `low` to `high`.

    What is asked and what is expected are the same at every size, and so is the sample of a size each time.
    """

    render: Callable[[int], Sample]
    low: int
    high: int


@dataclass(frozen=True)
class Material:
    """What samples are made from.

    `haystack` are the words of the text that hides needles, `depths` the percentages at which needles lie
    (None: as published), `length` the tokens of context, query and answer.
    """

    templates: Templates
    words: Words
    haystack: tuple[str, ...]
    depths: tuple[int, ...] | None
    length: int
