"""Reading the state of a search out of an answer, and scoring it."""

from __future__ import annotations

import json
import re
from collections import Counter
from typing import Any

from kvexp.tasks.questions import Question

_ANSWER = re.compile(r"\banswer\b[\s*_]*:", re.IGNORECASE)
_OBJECT = re.compile(r"\{[^{}]*\}")
_KEYS = {"current_node", "stack", "visited"}


def score_state(question: Question, text: str) -> dict[str, float]:
    """Return the metrics of an answer, zeros where it cannot be read.

    "stack_exact_match" wants the same list, "node" the same current node, "visited" the same set in any
    order; "stack_f1" is F1 over the nodes of the stack, whatever their order.
    """
    expected = json.loads(question.expected[0])
    found = read_state(text) or {}
    stack = _integers(found.get("stack"))
    visited = _integers(found.get("visited"))
    return {
        "stack_exact_match": float(stack == expected["stack"]),
        "node": float(_integer(found.get("current_node")) == expected["current_node"]),
        "visited": float(visited is not None and set(visited) == set(expected["visited"])),
        "stack_f1": _f1(stack or [], expected["stack"]),
    }


def read_state(text: str) -> dict[str, Any] | None:
    """Return the last JSON object after the first "Answer:" that has one of the keys asked for, or None.

    Quotes and `None` as in Python, a comma too many, and underscores escaped as in Markdown pass too.
    """
    start = _ANSWER.search(text)
    if start is None:
        return None
    for written in reversed(_OBJECT.findall(text[start.end() :].replace(r"\_", "_"))):
        mended = re.sub(r",\s*([\]}])", r"\1", written.replace("'", '"').replace("None", "null"))
        try:
            found = json.loads(mended)
        except ValueError:
            continue
        if _KEYS & found.keys():
            return found
    return None


def _integers(value: Any) -> list[int] | None:
    if not isinstance(value, list):
        return None
    numbers = [_integer(item) for item in value]
    return None if None in numbers else [number for number in numbers if number is not None]


def _integer(value: Any) -> int | None:
    """The number that `value` is or writes down; true and false are none."""
    if isinstance(value, str) and re.fullmatch(r"\s*\d{1,9}\s*", value):
        return int(value)
    return value if isinstance(value, int) and not isinstance(value, bool) else None


def _f1(found: list[int], expected: list[int]) -> float:
    both = (Counter(found) & Counter(expected)).total()
    return 2 * both / (len(found) + len(expected))
