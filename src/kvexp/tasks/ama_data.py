"""The episodes of AMA-Bench: trajectories of agents in games, code, databases, homes and the web.

AMA-Bench: Evaluating Long-Horizon Memory for Agentic Applications (Zhao et al., 2026, arXiv 2602.22769), its
open-ended questions: 12 on each of 208 trajectories, of four types.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from kvexp.errors import UserError
from kvexp.notes.chunks import length
from kvexp.notes.units import Turn, tidy
from kvexp.tasks.fetched import load_records

MEMBER = "ama_bench/test.jsonl.gz"
URL = "hf://datasets/AMA-bench/AMA-bench/test/open_end_qa_set.jsonl"
CAPABILITIES = {"A": "recall", "B": "causal inference", "C": "state updating", "D": "state abstraction"}
"""The paper's capabilities by the types of the data, in the order of both."""
DOMAINS = {
    "game": ("Game", "Gaming"),
    "embodied_ai": ("EMBODIED_AI", "Embodied AI"),
    "text2sql": ("TEXT2SQL", "Text 2 SQL"),
    "web": ("WEB", "Web Task Execution"),
    "software": ("SOFTWARE", "Software Engineering"),
    "openworld_qa": ("OPENWORLD_QA", "Open World Tool QA"),
}
"""Our names of the domains, and what the set and the benchmark's site call them."""


@dataclass(frozen=True)
class Step:
    """What the agent did and what it saw then."""

    number: str
    action: str
    observation: str


@dataclass(frozen=True)
class Asked:
    """A question about an episode and its reference answer."""

    id: str
    question: str
    answer: str
    capability: str


@dataclass(frozen=True)
class Episode:
    """A trajectory: what the agent was to do, its steps, and what is asked."""

    id: str
    task: str
    domain: str
    steps: tuple[Step, ...]
    asked: tuple[Asked, ...]

    def turns(self, tokens: int) -> list[Turn]:
        """Return the task and the steps as turns of about `tokens` tokens at most.

        What is longer is parted at the ends of lines, or of words where a line is longer; each part tells its
        step.
        """
        parts = [*_parts(f"Task: {self.task}", tokens)]
        turns = [Turn(f"task.{i}", "", part, "task") for i, part in enumerate(parts)]
        for step in self.steps:
            text = f"Action: {step.action}\nObservation: {step.observation}"
            turns += [
                Turn(f"{step.number}.{i}", "", part, f"step {step.number}" + (", continued" if i else ""))
                for i, part in enumerate(_parts(text, tokens))
            ]
        return turns


def load_episodes(data_dir: str | None = None) -> list[Episode]:
    """Return the episodes in published order.

    They are read from `ama_bench/test.jsonl.gz` of the data folder (None: that of KVEXP_DATA_DIR), an episode
    a line, or else from the file that its authors publish. Raises UserError where neither can be read.
    """
    path, records = load_records(data_dir, MEMBER, URL)
    try:
        return [_episode(record) for record in records]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise UserError(
            f"{path} has a record that is no episode of AMA-Bench ({error!r}): fetch it again"
        ) from error


def _episode(record: Mapping[str, Any]) -> Episode:
    name = str(record["episode_id"])
    return Episode(
        id=name,
        task=str(record.get("task") or ""),
        domain=_domain(str(record["domain"])),
        steps=tuple(
            Step(str(row["turn_idx"]), str(row["action"] or ""), str(row["observation"] or ""))
            for row in record["trajectory"]
        ),
        asked=tuple(
            Asked(
                f"{name}-{i}", tidy(str(row["question"])), tidy(str(row["answer"])), CAPABILITIES[row["type"]]
            )
            for i, row in enumerate(record["qa_pairs"])
        ),
    )


def _domain(written: str) -> str:
    """Return our name of a domain, or what is written where it is none of them."""
    plain = re.sub(r"\W", "", written.lower())
    for name, others in DOMAINS.items():
        if plain in (re.sub(r"\W", "", other.lower()) for other in others):
            return name
    return written.lower()


def _parts(text: str, tokens: int) -> Iterator[str]:
    part: list[str] = []
    size = 0
    for piece in _pieces(tidy(text), tokens):
        more = length(piece)
        if part and size + more > tokens:
            yield "".join(part)
            part, size = [], 0
        part.append(piece)
        size += more
    if part:
        yield "".join(part)


def _pieces(text: str, tokens: int) -> Iterator[str]:
    """The lines of a text with their breaks; of longer ones the words, of longer words pieces.

    A piece of a word has a letter for each token, which is more than enough of them for any tokenizer.
    """
    for line in text.splitlines(keepends=True):
        if length(line) <= tokens:
            yield line
            continue
        for word in line.split():
            if length(word) <= tokens:
                yield f"{word} "
            else:
                yield from (word[at : at + tokens] for at in range(0, len(word), tokens))
        if line.endswith("\n"):
            yield "\n"
