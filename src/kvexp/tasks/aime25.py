"""aime25: the 30 problems of the American Invitational Mathematics Examination of 2025, parts I and II."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.tasks.math_problems import MathProblems


@dataclass(frozen=True)
class Aime25(MathProblems):
    """Answers are integers from 0 to 999; papers report the mean over 8 samples of each problem."""

    id: ClassVar[str] = "aime25"
    integers: ClassVar[bool] = True
