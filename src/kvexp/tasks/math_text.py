"""One spelling for LaTeX that means the same, and exact values of plain numbers."""

from __future__ import annotations

import re
from fractions import Fraction
from typing import NamedTuple

_UNICODE = str.maketrans(
    {"−": "-", "–": "-", "×": r"\times ", "·": r"\cdot ", "π": r"\pi ", "∞": r"\infty ", "∪": r"\cup ",
     "±": r"\pm ", "≤": r"\le ", "≥": r"\ge ", "∈": r"\in ", "°": "", "\u00a0": " "}
)  # fmt: skip
_REWRITES = tuple(
    (re.compile(pattern), replacement)
    for pattern, replacement in (
        (r"√\s*(\d+|[a-zA-Z])", r"\\sqrt{\1}"),
        (r"√\s*\(([^()]*)\)", r"\\sqrt{\1}"),
        (r"\\\$", ""),  # currency
        (r"\$|(?<!\\)\\[()\[\]]", ""),  # borders of formulas
        (r"(?<=\d)(?:,\s*\\!\s*|\{,\}|\\,)(?=\d{3}(?!\d))", ""),  # thousands set with care
        (r"(?<!\\)\\[!,;: ]|~|\\q?quad(?![a-zA-Z])|\\displaystyle(?![a-zA-Z])", " "),
        (r"\\(?:left|right|[bB]igg?[lrm]?)(?![a-zA-Z])", ""),
        (r"\\[dtc]frac(?![a-zA-Z])", r"\\frac"),
        (r"\\lbrace(?![a-zA-Z])", r"\\{"),
        (r"\\rbrace(?![a-zA-Z])", r"\\}"),
        (r"\^\s*(?:\\circ(?![a-zA-Z])|\{\s*\\circ\s*\}|\\degree(?![a-zA-Z]))|\\degree(?![a-zA-Z])", ""),
        (r"\\?%", ""),
        (r"\\(?:text(?:bf|it|rm|sf|tt|normal)?|math(?:rm|bf|it|sf|bb)|mbox|hbox)\s*\{", r"\\text{"),
        (r"\\text\{\s*,?\s*(?:and|or)\s*\}|\s,?\s*(?:and|or)\s", ","),
        (r",\s*,", ","),
        (r"\+?\\infty(?![a-zA-Z])|\+?\b(?:infinity|oo)\b", r"\\infty"),
    )
)
_TEXT = re.compile(r"\\text\{([^{}]*)\}")
_UNIT_TEXT = re.compile(r"(?<=\S)\s*\\text\{[^{}]*\}(?:\s*\^\s*(?:\d|\{\d\}))?\s*$")
_DECIMAL = r"(?:\d+(?:\.\d*)?|\.\d+)"
_SHORT_UNIT = r"(?:[ckm]m|kg|ft|hr|lb|oz|sq|cu|mi|in)\b\.?"
_UNIT_WORDS = re.compile(
    rf"(\S*(?:{_DECIMAL}|\}}|\\pi))((?:\s+(?:[a-zA-Z]{{3,}}\.?|{_SHORT_UNIT})|(?<=\d){_SHORT_UNIT})+)"
    r"(?:\s*\^\s*\{?\d\}?)?"
)
_NO_UNITS = {"pi", "hundred", "thousand", "million", "billion", "trillion", "dozen", "mod", "base"}
_BARE_FRACTION = re.compile(
    r"\\frac\s*(\d|\{(?:[^{}]|\{[^{}]*\})*\})\s*(\d|[a-zA-Z]|\{(?:[^{}]|\{[^{}]*\})*\})"
)
_BARE_ROOT = re.compile(r"\\sqrt\s*(\d|[a-zA-Z])")

_FORMS = {
    "decimal": rf"(?P<a>{_DECIMAL})",
    "thousands": r"(?P<a>\d{1,3}(?:,\d{3})+(?:\.\d+)?)",
    "ratio": rf"(?P<a>{_DECIMAL})/(?P<b>{_DECIMAL})",
    "fraction": rf"\\frac\{{(?P<s>[+-]?)(?P<a>{_DECIMAL})\}}\{{(?P<t>[+-]?)(?P<b>{_DECIMAL})\}}",
    "mixed": r"(?P<w>\d+)\\frac\{(?P<a>\d+)\}\{(?P<b>\d+)\}",
    "scientific": rf"(?P<a>{_DECIMAL})(?:(?:\\times|\\cdot|\*)10\^|[eE])\{{?(?P<e>[+-]?\d{{1,3}})\}}?",
}
_NUMBERS = tuple(re.compile(rf"(?P<sign>[+-]?){form}") for form in _FORMS.values())
_MIXED_WORDS = re.compile(r"([+-]?\d+)\s+(\d+)\s*/\s*(\d+)")


class Number(NamedTuple):
    """The exact value of a plain number, and whether it was written with a decimal point."""

    value: Fraction
    decimal: bool


def clean(text: str) -> str:
    r"""Return `text` in one spelling, with the spaces that separate words.

    Delimiters of formulas, spacing, sizes of brackets, signs of currency, percent and degree, and units after
    a number go; `\dfrac` and `\frac43` become `\frac{4}{3}`; "and" and "or" become a comma; words set as
    text become plain words, a letter in brackets such as `\text{(C)}` the letter.
    """
    text = text.translate(_UNICODE)
    for pattern, replacement in _REWRITES:
        text = pattern.sub(replacement, text)
    text = text.strip().rstrip(".,;:").strip()
    text = _TEXT.sub(r"\1", _UNIT_TEXT.sub("", text)).strip()
    text = _braced(text)
    unit = _UNIT_WORDS.fullmatch(text)
    if unit and not _NO_UNITS & set(unit[2].lower().replace(".", "").split()):
        text = unit[1]
    letter = re.fullmatch(r"\(([A-Z])\)", text)
    return letter[1] if letter else text


def squeeze(text: str) -> str:
    """Return `text` without spaces."""
    return "".join(text.split())


def is_text(text: str) -> bool:
    r"""Tell whether the whole of `text` is set as text, such as `\text{ellipse}`."""
    return bool(re.fullmatch(r"\$?\\(?:text|mbox|textbf|mathrm)\{[^{}]*\}\$?", text.strip()))


def number(text: str) -> Number | None:
    r"""Return the value of cleaned `text` that is one plain number, else None.

    Known are integers, decimals, thousands with commas, `a/b`, `\frac{a}{b}`, mixed numbers and powers of
    ten. Longer than 100 characters counts as no number.
    """
    if len(text) > 100:
        return None
    mixed = _MIXED_WORDS.fullmatch(text.strip())
    if mixed:
        text = rf"{mixed[1]}\frac{{{mixed[2]}}}{{{mixed[3]}}}"
    squeezed = squeeze(text)
    for pattern in _NUMBERS:
        found = pattern.fullmatch(squeezed)
        if found:
            return _value(found.groupdict(), "." in squeezed)
    return None


def _value(part: dict[str, str | None], decimal: bool) -> Number | None:
    value = _fraction(part["a"])
    if part.get("b"):
        below = _fraction(part["b"])
        if below == 0:
            return None
        value /= below
    value += int(part.get("w") or 0)
    value *= Fraction(10) ** int(part.get("e") or 0)
    minus = [part["sign"], part.get("s"), part.get("t")].count("-") % 2
    return Number(-value if minus else value, decimal)


def _fraction(digits: str | None) -> Fraction:
    return Fraction((digits or "0").replace(",", "").rstrip("."))


def _braced(text: str) -> str:
    def fraction(found: re.Match[str]) -> str:
        above, below = (part if part.startswith("{") else f"{{{part}}}" for part in found.groups())
        return rf"\frac{above}{below}"

    return _BARE_ROOT.sub(r"\\sqrt{\1}", _BARE_FRACTION.sub(fraction, text))
