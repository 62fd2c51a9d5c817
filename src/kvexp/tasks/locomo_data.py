"""The conversations of LoCoMo and the questions about them.

Evaluating Very Long-Term Conversational Memory of LLM Agents (Maharana et al., 2024, arXiv 2402.17753), in
the record format that is published (CC BY-NC 4.0): ten conversations of two people over months, in sessions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from kvexp.errors import UserError
from kvexp.notes.units import Turn
from kvexp.tasks.fetched import load_records

MEMBER = "locomo/test.jsonl.gz"
URL = "https://raw.githubusercontent.com/snap-research/locomo/main/data/locomo10.json"
CATEGORIES = {1: "multi-hop", 2: "temporal", 3: "open-domain", 4: "single-hop", 5: "adversarial"}
_EVIDENCE = re.compile(r"D:?(\d+):(\d+)")


@dataclass(frozen=True)
class Asked:
    """A question about a conversation.

    `answer` is the true one, for category 5 ("adversarial") the wrong one that is offered; `evidence` the ids
    of the turns that answer it.
    """

    id: str
    question: str
    answer: str
    category: int
    evidence: frozenset[str]


@dataclass(frozen=True)
class Conversation:
    """Two speakers, their turns in order, and what is asked."""

    id: str
    speakers: tuple[str, str]
    turns: tuple[Turn, ...]
    asked: tuple[Asked, ...]


def load_conversations(data_dir: str | None = None) -> list[Conversation]:
    """Return the conversations in published order.

    They are read from `locomo/test.jsonl.gz` of the data folder (None: that of KVEXP_DATA_DIR), a record a
    line, or else from the file that its authors publish. Raises UserError where neither can be read.
    """
    path, records = load_records(data_dir, MEMBER, URL)
    try:
        return [_conversation(record) for record in records]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} has a record that is no conversation of LoCoMo ({error!r}): fetch it again"
        ) from error


def _conversation(record: dict[str, Any]) -> Conversation:
    talk, name = record["conversation"], str(record["sample_id"])
    return Conversation(
        id=name,
        speakers=(talk["speaker_a"], talk["speaker_b"]),
        turns=tuple(_turns(talk)),
        asked=tuple(_asked(f"{name}-{i}", row) for i, row in enumerate(record["qa"])),
    )


def _turns(talk: dict[str, Any]) -> Iterator[Turn]:
    """The turns of all sessions; a photo that is shared stands as its caption."""
    for number in sorted(int(key[8:]) for key in talk if re.fullmatch(r"session_\d+", key)):
        time = str(talk[f"session_{number}_date_time"])
        for row in talk[f"session_{number}"]:
            caption = row.get("blip_caption")
            text = " ".join(f"{row['text']} {f'[shares {caption}]' if caption else ''}".split())
            yield Turn(row["dia_id"], row["speaker"], text, time, str(number), _day(time))


def _day(time: str) -> float | None:
    """The day of a time such as "4:04 pm on 20 January, 2023" as a number; None for one written otherwise."""
    try:
        at = datetime.strptime(time, "%I:%M %p on %d %B, %Y")
    except ValueError:
        return None
    return at.toordinal() + (at.hour * 60 + at.minute) / 1440


def _asked(name: str, row: dict[str, Any]) -> Asked:
    """A question; answers may be numbers in the published file, and adversarial ones have another key."""
    category = int(row["category"])
    if category not in CATEGORIES:
        raise ValueError(f"category {category}")
    answer = row["adversarial_answer" if category == 5 and "adversarial_answer" in row else "answer"]
    evidence = (f"D{a}:{int(b)}" for item in row.get("evidence", ()) for a, b in _EVIDENCE.findall(item))
    return Asked(
        name,
        " ".join(str(row["question"]).split()),
        " ".join(str(answer).split()),
        category,
        frozenset(evidence),
    )
