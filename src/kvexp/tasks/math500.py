"""math500: 500 problems of the MATH test set (Hendrycks et al., 2021) drawn by Lightman et al. (2023)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.tasks.math_problems import MathProblems


@dataclass(frozen=True)
class Math500(MathProblems):
    """Answers are expressions, compared by meaning; a question's group is `subject/level`."""

    id: ClassVar[str] = "math500"
    integers: ClassVar[bool] = False

    max_total_tokens: int = 8192
