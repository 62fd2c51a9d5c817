"""One look for each method in every figure of every report: a colour on light and on dark, and a mark.

The hues stay apart for the common kinds of colour blindness (they start from Okabe and Ito's set, 2008, with
its yellow darkened for white paper), and each stands out from its ground by 3:1 or more. There are more
methods than hues: those of one hue have marks (and lines) of their own, and are seldom compared.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

LIGHT = (
    "#0072b2",
    "#d55e00",
    "#008a64",
    "#b8548c",
    "#8a6d00",
    "#5b4bb5",
    "#2f93c9",
    "#8c2f39",
    "#4d7a1f",
    "#7a5b46",
)
DARK = (
    "#5ab0e8",
    "#f28c4b",
    "#3fc79b",
    "#e29cc6",
    "#d8b73f",
    "#a99cf0",
    "#9bd3f5",
    "#ee8f98",
    "#a3cf70",
    "#c9a98f",
)
INK, GREY = ("#1b1f24", "#e7eaee"), ("#7b8794", "#8a94a0")
SHAPES = (
    *("circle", "square", "diamond", "triangle-up", "cross"),
    *("triangle-down", "triangle-right", "triangle-left", "star", "x"),
)
MARKERS = "osD^Pv><*X"  # matplotlib's names of SHAPES

# A row for each hue; of two methods that share it, the second has the second mark.
_OF_A_HUE = (
    ("asm", "tova", "prophetkv"),
    ("triattention", "agentkvshift"),
    ("triattention_plus", "agentkvshift_plus"),
    ("snapkv", "kivi"),
    ("kvzip", "raas", "ott"),
    ("h2o", "cacheblend", "vatp"),
    ("pyramidkv", "prefix_cache", "expected_attention"),
    ("rkv", "reposition", "lazyeviction"),
    ("adakv", "two_phase"),
    ("streaming_llm", "truncate", "knorm"),
)
_REFERENCES = (("full", "full_recompute", "keep_all"), INK), (("no_context", "random"), GREY)
_LOOKS = {
    name: (colours, place)
    for names, colours in (*zip(_OF_A_HUE, zip(LIGHT, DARK, strict=True), strict=True), *_REFERENCES)
    for place, name in enumerate(names)
}
_FREE = len(SHAPES) - max(map(len, _OF_A_HUE))  # marks that no method above has


def look(method: str) -> tuple[tuple[str, str], int]:
    """Return a method's colours (on light, on dark) and the place of its mark in `SHAPES`.

    A method that is not known here has the hue and the mark that its name hashes to.
    """
    if method in _LOOKS:
        return _LOOKS[method]
    number = zlib.crc32(method.encode())
    hue = number % len(LIGHT)
    return (LIGHT[hue], DARK[hue]), len(SHAPES) - 1 - number // len(LIGHT) % _FREE


def palette(methods: Iterable[str]) -> dict[str, tuple[str, str]]:
    """Return each method's colours."""
    return {name: look(name)[0] for name in methods}


def shapes(rows: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """Return the mark of each label: its method's own, or for further labels of a method the next free one.

    `rows` have "label" and "method". No two labels of one hue share a mark, as long as there are enough.
    """
    methods = {row["label"]: row["method"] for row in rows}
    firsts = {method: label for label, method in reversed(methods.items())}
    found: dict[str, str] = {}
    used: dict[tuple[str, str], list[int]] = {}
    for label, method in sorted(methods.items(), key=lambda one: firsts[one[1]] != one[0]):
        colours, own = look(method)
        taken = used.setdefault(colours, [])
        order = [own, *range(len(SHAPES))]
        place = min(order, key=lambda at: (taken.count(at), order.index(at)))
        taken.append(place)
        found[label] = SHAPES[place]
    return found
