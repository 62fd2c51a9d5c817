"""trec: what kind of answer a question asks for (Li and Roth, 2002)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from kvexp.tasks.published import PublishedTask


@dataclass(frozen=True)
class Trec(PublishedTask):
    """50 fine types (`NUM:dist`) or the 6 coarse ones (`NUM`).

    `labels`: "fine" or "coarse".
    """

    id: ClassVar[str] = "trec"
    header: ClassVar[str] = "Classify the question by the type of its answer.\n"
    query_word: ClassVar[str] = "Question"
    answer_word: ClassVar[str] = "Type"

    labels: Literal["fine", "coarse"] = "fine"

    def field(self) -> str:
        """Return the field of the data that holds the label."""
        return self.labels
