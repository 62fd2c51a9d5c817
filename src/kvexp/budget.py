"""The budget: cache rows (or memory entries) per layer and KV head, averaged over heads and layers.

It is written as a number of rows (`4096`), in units of 1,024 rows (`4k`), as a share of the context (`20%`)
or as `full`, and turned into one integer before anything is hashed, named or loaded. No ratio is a float.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction

from kvexp.errors import UserError

_ROWS = re.compile(r"([0-9]+)(k?)", re.IGNORECASE)
_SHARE = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*%")
_ADVICE = "write a number of rows (budget=1024 or 4k), a share of the context (20%) or full"


@dataclass(frozen=True)
class Budget:
    """Rows per layer and KV head; `rows` is None for the whole context."""

    rows: int | None

    def __post_init__(self) -> None:
        """Refuse what is no number of rows."""
        whole = isinstance(self.rows, int) and not isinstance(self.rows, bool)
        if self.rows is not None and not whole:
            raise UserError(
                f"budget={_shown(self.rows)} is not a number of rows: use Budget.parse, or {_ADVICE}"
            )
        if self.rows is not None:
            _at_least_one(self.rows, str(self.rows))

    @classmethod
    def parse(cls, value: object, context_tokens: int | None = None) -> Budget:
        """Read a budget as a user writes it.

        Args:
            value: 4096, "4096", "4k", "20%", "full", or a Budget, which is returned as it is.
            context_tokens: length of the context that a share refers to; None when the task has no fixed one.

        Raises:
            UserError: `value` is nothing of these, or less than one row.
        """
        if isinstance(value, cls):
            return value
        text = str(value).strip()
        if isinstance(value, int) and not isinstance(value, bool):
            return cls(_at_least_one(value, text))
        if not isinstance(value, str):
            raise UserError(f"budget={_shown(value)} is not a budget: {_ADVICE}")
        if text.lower() == "full":
            return cls(None)
        if found := _ROWS.fullmatch(text):
            return cls(_at_least_one(int(found[1]) * (1024 if found[2] else 1), text))
        if found := _SHARE.fullmatch(text):
            if context_tokens is None:
                raise UserError(
                    f"budget={text} is a share of the context, but this task has no context of fixed length:"
                    " write a number of rows, such as budget=1024"
                )
            return cls(_at_least_one(int(Fraction(found[1]) * context_tokens / 100), text))
        raise UserError(f"budget={_shown(value)} is not a budget: {_ADVICE}")

    def limit(self, context_tokens: int) -> int:
        """Return the rows that may be held of a context of so many tokens."""
        return context_tokens if self.rows is None else min(self.rows, context_tokens)

    def __str__(self) -> str:
        return "full" if self.rows is None else str(self.rows)


def _at_least_one(rows: int, text: str) -> int:
    if rows < 1:
        raise UserError(f"budget={text} leaves no row at all: {_ADVICE}")
    return rows


def _shown(value: object) -> str:
    """Show a value as it is written on a command line."""
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
