"""dialogre: how the two of each pair in a dialogue are related (Yu et al., 2020, arXiv 2004.08056).

A question names all annotated pairs of a dialogue, the answer their relations in that order, with commas
between; of a pair with several relations the first counts. As in ManyICLBench, an answer is parted at commas
in lower case, and cut or filled up with "unknown" to as many relations as there are pairs. `accuracy` is 1
where all are right, `pair_accuracy` the share of pairs that are, `macro_f1` is over all pairs of all
questions and is the score of ManyICLBench. The data are for non-commercial research.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from kvexp.errors import UserError
from kvexp.tasks import metrics
from kvexp.tasks.fetched import load_records
from kvexp.tasks.questions import Overall, Question
from kvexp.tasks.shots import Shot, ShotsTask

UNKNOWN = "unknown"


@dataclass(frozen=True)
class DialogRe(ShotsTask):
    """`source`: where the dialogues are read without a data folder."""

    id: ClassVar[str] = "dialogre"
    header: ClassVar[str] = "Name the relation of each pair that is mentioned in a dialogue.\n"
    query_word: ClassVar[str] = "Dialogue"
    answer_word: ClassVar[str] = "The respective relations between each entity pair are"
    metrics: ClassVar[tuple[str, ...]] = ("accuracy", "pair_accuracy")
    several_lines: ClassVar[bool] = False

    max_new_tokens: int = 128
    source: str = "gh://nlpdata/dialogre/master/data_v2/en/data"

    def shots(self, data_dir: str | None) -> tuple[list[Shot], list[Shot]]:
        """See `ShotsTask.shots`; dialogues without an annotated pair are left out."""
        train, test = (self._of(split, data_dir) for split in ("train", "test"))
        return train, test

    def score(self, question: Question, text: str) -> dict[str, float]:
        """Return `accuracy` and `pair_accuracy`."""
        right = [a == b for a, b in zip(fitted(text, question.expected), question.expected, strict=True)]
        return {"accuracy": float(all(right)), "pair_accuracy": sum(right) / len(right)}

    def overall(self) -> Overall:
        """Return what makes `macro_f1` of all samples."""
        return macro_f1

    def _of(self, split: str, data_dir: str | None) -> list[Shot]:
        path, rows = load_records(data_dir, f"dialogre/{split}.jsonl.gz", f"{self.source}/{split}.json")
        try:
            shots = [_shot(f"{split}-{i}", row) for i, row in enumerate(rows)]
        except (KeyError, TypeError, ValueError, IndexError) as error:
            raise UserError(f"{path} has a row that is no dialogue ({error!r}): fetch it again") from error
        return [shot for shot in shots if shot.expected]


def fitted(text: str, expected: Sequence[str]) -> list[str]:
    """Return as many relations as are expected: those between the commas of `text`, then "unknown"."""
    named = [part.strip().lower() for part in text.split(",")][: len(expected)]
    return named + [UNKNOWN] * (len(expected) - len(named))


def macro_f1(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return macro-F1 over the pairs of all samples; its standard error is over pairs, too."""
    expected = [relation for sample in samples for relation in sample["expected"]]
    named = [relation for sample in samples for relation in fitted(sample["answer"], sample["expected"])]
    return {"macro_f1": metrics.macro_f1(expected, named)}


def _shot(name: str, row: Any) -> Shot:
    """A dialogue with its pairs; the published file has lists of dialogue and relations."""
    dialogue, relations = (
        (row["dialogue"], row["relations"]) if isinstance(row, Mapping) else (row[0], row[1])
    )
    pairs = ", ".join(f"({pair['x']}, {pair['y']})" for pair in relations)
    named = tuple(str(pair["r"][0]).lower() for pair in relations)
    lines = "\n".join(" ".join(turn.split()) for turn in dialogue)
    return Shot(name, f"{lines}\nEntity pairs: {pairs}", ", ".join(named), named)
