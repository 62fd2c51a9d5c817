"""Final answers of mathematical problems: finding them in a text, and telling whether two mean the same.

Equality goes from cheap to dear: spelling, value of plain numbers, elements of tuples, intervals, sets and
matrices, and symbolic equality by math_verify. It is stricter than common graders in two points. A percentage
counts as its number: `50\\%` is 50 but neither 0.5 nor 5000. And the usual relative tolerance of 1e-4 is for
decimals alone: integers and fractions have to agree exactly, and so has whatever answers an integer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import NamedTuple

from kvexp.tasks.math_symbolic import symbolically_equal
from kvexp.tasks.math_text import Number, clean, is_text, number, squeeze

_RELATIVE = 10_000  # one part in so many
_LONGEST = 400  # characters of an answer; beyond this it is no final answer
_BOX = re.compile(r"\\(?:boxed|fbox)\s*\{")
_BRACE = re.compile(r"\\.|[{}]", re.DOTALL)  # an escaped brace is none
_FINAL = re.compile(r"final\s+answer\b(?:\s+is\b)?[\s*:=]*", re.IGNORECASE)
_FORMULA = re.compile(r"\$\$?(.+?)\$\$?|\\\((.+?)\\\)|\\\[(.+?)\\\]")
_LAST_NUMBER = re.compile(
    r"(?:(?<![\w)\]}])-)?(?:(?:\d{1,3}(?:,\d{3})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"  # "10-7" ends in 7, not -7
)
_INTEGER = re.compile(r"\(?\+?(\d{1,9})(?:\.0*)?\)?")
_NAME = re.compile(r"\\?[a-zA-Z]+(?:_\{?\w+\}?)?'?(?:\([^()=]*\))?")
_EQUALS = re.compile(r"(?<![<>!])=")
_MEMBER = re.compile(r"^[a-zA-Z]\s*\\in(?![a-zA-Z])\s*")
_BASED = re.compile(r"\(?(\d[0-9A-Z]*)\)?_\{?(\d+)\}?")
_MATRIX = re.compile(r"\\begin\{([pbvBV]?matrix|array)\}(?:\{[lcr|]*\})?(.*)\\end\{\1\}", re.DOTALL)


class _Parts(NamedTuple):
    """Elements between brackets; `brackets` is "{}" for a set and for a list without brackets."""

    brackets: str
    elements: list[str]


def extract_answer(text: str) -> str | None:
    r"""Return the final answer in `text`, or None where there is none.

    It is the content of the last `\boxed{...}` that closes and is not empty; without one, what follows the
    last "final answer" on its line or the next; without that, the last number.
    """
    boxed = [held for held in boxes(text) if held]
    if boxed:
        return boxed[-1]
    for phrase in reversed(list(_FINAL.finditer(text))):
        answer = _of_line(text[phrase.end() :])
        if answer:
            return answer
    numbers = _LAST_NUMBER.findall(text)
    return numbers[-1] if numbers else None


def same_integer(answer: str, expected: str) -> bool:
    """Tell whether both are the same integer from 0 to 999, as answers of the AIME are; zeros may lead."""
    found, wanted = _integer(answer), _integer(expected)
    return found is not None and found == wanted


def same_answer(answer: str, expected: str) -> bool:
    """Tell whether `answer` means the same as `expected`; what cannot be read does not, without an error."""
    if len(answer) > _LONGEST:
        return False
    found, wanted = clean(answer), clean(expected)
    if is_text(expected) and number(wanted) is None:
        return squeeze(found).casefold() == squeeze(wanted).casefold() != ""
    return _same(found, wanted)


def _same(found: str, wanted: str) -> bool:
    found, wanted = _MEMBER.sub("", found.strip()), _MEMBER.sub("", wanted.strip())
    if not found or not wanted:
        return False
    if squeeze(found) == squeeze(wanted):
        return True
    found, wanted = _without_name(found, wanted), _without_name(wanted, found)
    if not found or not wanted:
        return False
    based = _BASED.fullmatch(squeeze(wanted))
    if based:
        other = _BASED.fullmatch(squeeze(found))
        return other.groups() == based.groups() if other else squeeze(found) == based[1]
    if _BASED.fullmatch(squeeze(found)):
        return False
    numbers = number(found), number(wanted)
    if numbers[0] is not None and numbers[1] is not None:
        return _close(numbers[0], numbers[1])
    matrices = _matrix(found), _matrix(wanted)
    if matrices[0] is not None and matrices[1] is not None:
        return _same_matrix(matrices[0], matrices[1])
    parts = _parts(found), _parts(wanted)
    if parts[0] is not None and parts[1] is not None:
        return _same_parts(parts[0], parts[1])
    if bool(_EQUALS.search(found)) != bool(_EQUALS.search(wanted)):
        return False  # math_verify would compare the right sides
    return symbolically_equal(found, wanted)


def _close(found: Number, wanted: Number) -> bool:
    if found.value == wanted.value:
        return True
    if wanted.value.denominator == 1 or not (found.decimal or wanted.decimal):
        return False
    return abs(found.value - wanted.value) * _RELATIVE <= abs(wanted.value)


def _same_parts(found: _Parts, wanted: _Parts) -> bool:
    if found.brackets != wanted.brackets or len(found.elements) != len(wanted.elements):
        return False
    if wanted.brackets != "{}":
        return _all_same(found.elements, wanted.elements)
    left = list(found.elements)
    for element in wanted.elements:
        match = next((other for other in left if _same(other, element)), None)
        if match is None:
            return False
        left.remove(match)
    return True


def _same_matrix(found: list[list[str]], wanted: list[list[str]]) -> bool:
    return list(map(len, found)) == list(map(len, wanted)) and all(map(_all_same, found, wanted))


def _all_same(found: Iterable[str], wanted: Iterable[str]) -> bool:
    return all(map(_same, found, wanted))


def _without_name(text: str, other: str) -> str:
    """Return the right side of `x = 5` where the other answer is no equation; chains give their last part."""
    sides = _EQUALS.split(text)
    named = len(sides) > 1 and "=" not in other and _NAME.fullmatch(squeeze(sides[0]))
    return sides[-1].strip() if named and not _parts(text) else text


def _matrix(text: str) -> list[list[str]] | None:
    found = _MATRIX.fullmatch(text)
    if not found:
        return None
    rows = re.split(r"\\\\(?:\[[^\]]*\])?", found[2].replace(r"\hline", ""))
    return [[cell.strip() for cell in row.split("&")] for row in rows if row.strip()]


def _parts(text: str) -> _Parts | None:
    """Split at the commas outside of brackets; None where there is none, or where nothing encloses them."""
    brackets, inside = "{}", text
    if text.startswith(r"\{") and text.endswith(r"\}"):
        return _Parts(brackets, _split(text[2:-2]))
    if (
        text.startswith(("(", "["))
        and text.endswith((")", "]"))
        and len(_split(text[1:-1])) > 1
        and _encloses(text)
    ):
        brackets, inside = text[0] + text[-1], text[1:-1]
    elements = _split(inside)
    return _Parts(brackets, elements) if len(elements) > 1 else None


def _encloses(text: str) -> bool:
    depth = 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if depth == 0:
            return place == len(text) - 1
    return False


def _split(text: str) -> list[str]:
    elements, depth, start = [], 0, 0
    for place, character in enumerate(text):
        depth += (character in "([{") - (character in ")]}")
        if character == "," and depth == 0:
            elements.append(text[start:place].strip())
            start = place + 1
    return [*elements, text[start:].strip()]


def boxes(text: str) -> list[str]:
    r"""Return what each `\boxed{...}` of a text holds, in the order in which they open."""
    starts = {box.end() for box in _BOX.finditer(text)}
    opened: list[int] = []
    closed: dict[int, str] = {}
    for token in _BRACE.finditer(text):
        if token[0] == "{":
            opened.append(token.end())
        elif token[0] == "}" and opened:
            start = opened.pop()
            if start in starts:
                closed[start] = text[start : token.start()].strip()
    return [closed[start] for start in sorted(closed)]


def _of_line(text: str) -> str:
    line = text.lstrip().partition("\n")[0].strip().strip("*").strip()
    formula = _FORMULA.search(line)
    if formula:
        return next(group for group in formula.groups() if group).strip()
    return re.split(r"\.(?:\s|$)", line)[0].strip("* ").strip()


def _integer(text: str) -> int | None:
    found = _INTEGER.fullmatch(squeeze(clean(text[:_LONGEST])).rpartition("=")[2])
    value = int(found[1]) if found else -1
    return value if 0 <= value <= 999 else None
