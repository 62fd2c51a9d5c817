"""Mistakes of the user, told in one sentence that says what to type instead."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class UserError(Exception):
    """A mistake that the user can mend: the message is one sentence, the process ends with exit code 2."""


def nearest(word: str, choices: Iterable[str]) -> str | None:
    """Return the choice that looks most like `word`, or None when none is close."""
    found = difflib.get_close_matches(word.lower(), sorted(choices), n=1, cutoff=0.5)
    return found[0] if found else None


def suggest(word: str, choices: Iterable[str]) -> str:
    """Return ", did you mean 'x'?" for the nearest choice, or an empty string."""
    found = nearest(word, choices)
    return f", did you mean '{found}'?" if found else ""
