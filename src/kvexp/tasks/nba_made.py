"""Problems of our own on the rulebook, for calibration and validation: their answers follow from its figures.

Each is one signing that keeps or breaks one of five rules: the largest salary by years of service (Article
II, Section 7), the length of a contract (Article IX), its yearly raises (Article VII, Section 5), what a
team without room may pay a player of another team (Section 6(e)), and what one with room may (Section 2).
They are worded as the published problems are, but drawn from figures alone, and none may state the facts of
a published one.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import count

from kvexp.tasks.nba_data import Problem

CAP = 140_588_000  # of 2024-25
SHARES = ((7, 25), (10, 30), (99, 35))
"""Years of service below which the largest salary is so many per cent of the cap; players here have 7 or
more, so that none is bound by the contract of a draft pick."""
MID_LEVEL = 12_822_000  # 9.12 % of the cap, rounded to thousands: what a team without room may pay


@dataclass(frozen=True)
class _Case:
    """A signing: what the team has, who the player is, and what he gets."""

    team_salary: int
    service: int  # years
    own: bool  # whether he ends three or more seasons with the team that signs him
    salary: int
    years: int
    raise_percent: int
    legal: bool


def largest_salary(service: int) -> int:
    """Return what a contract may pay in its first year after so many years of service, in dollars."""
    share = next(share for below, share in SHARES if service < below)
    return CAP * share // 100


def made(stream: str) -> Iterator[Problem]:
    """Yield problems without end, each rule in turn; half of them break it."""
    for index in count():
        rng, kind = random.Random(f"{stream}/{index}"), _KINDS[index % len(_KINDS)]
        yield _worded(f"{stream}-{index}", kind(rng, rng.random() < 0.5), rng)


def _salary_by_service(rng: random.Random, legal: bool) -> _Case:
    service = rng.randint(7, 15)
    most = largest_salary(service)
    salary = rng.randrange(most - 9_000_000, most, 100_000) if legal else most + 100_000 * rng.randint(2, 60)
    return _Case(
        rng.randint(100, 130) * 1_000_000, service, True, _round(salary), rng.randint(2, 4), 5, legal
    )


def _length(rng: random.Random, legal: bool) -> _Case:
    own = rng.random() < 0.5
    most = 5 if own else 4
    years = rng.randint(2, most) if legal else most + rng.randint(1, 2)
    salary = rng.randint(40, 120) * 100_000
    return _Case(rng.randint(60, 95) * 1_000_000, rng.randint(7, 12), own, salary, years, 5, legal)


def _raises(rng: random.Random, legal: bool) -> _Case:
    own = rng.random() < 0.5
    most = 8 if own else 5
    percent = rng.randint(2, most) if legal else most + rng.randint(1, 4)
    salary = rng.randint(40, 120) * 100_000
    return _Case(rng.randint(60, 95) * 1_000_000, rng.randint(7, 12), own, salary, 3, percent, legal)


def _without_room(rng: random.Random, legal: bool) -> _Case:
    salary = rng.randint(60, 125) * 100_000 if legal else MID_LEVEL + 100_000 * rng.randint(5, 90)
    return _Case(rng.randint(142, 160) * 1_000_000, rng.randint(7, 12), False, _round(salary), 3, 5, legal)


def _with_room(rng: random.Random, legal: bool) -> _Case:
    team = rng.randint(100, 120) * 1_000_000
    room = CAP - team
    salary = room - 100_000 * rng.randint(3, 60) if legal else room + 100_000 * rng.randint(5, 60)
    return _Case(team, rng.randint(8, 12), False, _round(salary), 3, 5, legal)


_KINDS: tuple[Callable[[random.Random, bool], _Case], ...] = (
    _salary_by_service,
    _length,
    _raises,
    _without_room,
    _with_room,
)


def _round(dollars: int) -> int:
    return dollars // 100_000 * 100_000


def _worded(name: str, case: _Case, rng: random.Random) -> Problem:
    """Put a case into the words of the benchmark; letters of team and player are drawn."""
    team, other, player = rng.choice("ABC"), rng.choice("DEF"), rng.choice("ABC")
    before = team if case.own else other
    drafted, age = 2024 - case.service, rng.randint(19, 22)
    pick = rng.randint(1, 30)
    last = rng.randint(20, 60) * 100_000
    return Problem(
        id=name,
        level=0,
        teams=(f"Team {team} has a team salary of {_dollars(case.team_salary)}.",),
        players=(
            f"Player {player} was the {pick}{_ending(pick)} first-round pick of Team {before} in {drafted}"
            f" NBA draft when he was {age} years old.",
            f"Player {player} signed a 3-year contract (annual salary {_dollars(last)}, 5% increase per year)"
            f" with Team {before} during 2021 Moratorium Period.",
        ),
        operations=(
            f"A. Team {team} signs a {case.years}-year contract with Player {player} providing annual salary"
            f" {_dollars(case.salary)} in the first Salary Cap Year (2024-2025) and"
            f" {case.raise_percent}% increase per year.",
        ),
        operation="" if case.legal else "A",
        team="" if case.legal else team,
    )


def _dollars(amount: int) -> str:
    return f"${amount:,}"


def _ending(number: int) -> str:
    return "th" if 10 < number % 100 < 14 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
