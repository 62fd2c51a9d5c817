"""The rulebook and the problems of RuleArena's basketball part, as data.

RuleArena: A Benchmark for Rule-Guided Reasoning with LLMs in Real-World Scenarios (Zhou et al., 2024, arXiv
2412.08972; MIT). 216 problems of three levels; a problem states what teams and players are bound by, and
operations of which at most one breaks a rule.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from kvexp.errors import UserError
from kvexp.tasks.fetched import load_records, load_text
from kvexp.tasks.labels import normalise, rows_sha256

PROBLEMS, RULES = "nba/test.jsonl.gz", "nba/reference_rules.txt.gz"
LEVELS = (0, 1, 2)


@dataclass(frozen=True)
class Problem:
    """One problem; `operation` and `team` are the letters of what breaks a rule, empty where nothing does."""

    id: str
    level: int
    teams: tuple[str, ...]
    players: tuple[str, ...]
    operations: tuple[str, ...]
    operation: str = ""
    team: str = ""

    @property
    def target(self) -> str:
        """The sentence that an answer has to contain, without its last full stop."""
        if not self.operation:
            return "Answer: False"
        return f"Answer: True. Illegal Operation: {self.operation}. Problematic Team: {self.team}"

    @property
    def text(self) -> str:
        """What the problem states, in the three parts of the published prompt."""
        parts = (
            ("Team Situations", self.teams),
            ("Player Situations", self.players),
            ("Operations", self.operations),
        )
        return "\n".join(line for title, lines in parts for line in (f"{title}:", *lines))

    @property
    def facts(self) -> str:
        """The text in one spelling, by which two problems count as the same."""
        return normalise(self.text)


def load_problems(data_dir: str | None, source: str) -> list[Problem]:
    """Return all problems in published order, level by level.

    They are those of the data folder (None: of KVEXP_DATA_DIR), else those that `source` has. Raises
    UserError where neither can be read.
    """
    if data_dir or os.environ.get("KVEXP_DATA_DIR"):
        path, rows = load_records(data_dir, PROBLEMS, source)
        return [_problem(row, row.get("id"), row.get("level"), path) for row in rows]
    found = []
    for level in LEVELS:
        path, rows = load_records(None, PROBLEMS, f"{source}/annotated_problems/comp_{level}.json")
        found += [_problem(row, f"comp_{level}-{i}", level, path) for i, row in enumerate(rows)]
    return found


def load_rules(data_dir: str | None, source: str) -> list[str]:
    """Return the lines of the rulebook that are not empty."""
    text = load_text(data_dir, RULES, f"{source}/reference_rules.txt")
    return [line.strip() for line in text.splitlines() if line.strip()]


def sha256(problems: Sequence[Problem], rules: Sequence[str]) -> str:
    """Name what is asked and what it is asked about."""
    return rows_sha256([(one.id, one.text, one.target) for one in problems], [rules])


def _problem(row: Mapping[str, Any], name: Any, level: Any, path: Any) -> Problem:
    try:
        wrong = bool(row["answer"])
        return Problem(
            id=str(name),
            level=int(level),
            teams=tuple(row["team_situations"]),
            players=tuple(row["player_situations"]),
            operations=tuple(row["operations"]),
            operation=row["illegal_operation"] if wrong else "",
            team=row["problematic_team"] if wrong else "",
        )
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path} has a row that is no problem ({error!r}): fetch it again") from error
