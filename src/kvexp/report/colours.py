"""One colour for each method, in every figure of a report: the page's, light and dark, and those on paper.

The hues stay apart for the common kinds of colour blindness (they start from Okabe and Ito's set, 2008, with
its yellow darkened for white paper); where there are more methods than hues, the shape of the mark tells.
"""

from __future__ import annotations

from collections.abc import Sequence

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
FIXED = {"full": ("#1b1f24", "#e7eaee"), "no_context": ("#7b8794", "#8a94a0")}


def palette(methods: Sequence[str]) -> dict[str, tuple[str, str]]:
    """Return each method's colour on light and on dark ground; `full` and `no_context` are ink and grey."""
    free = sorted(set(methods) - set(FIXED))
    own = {name: (LIGHT[i % len(LIGHT)], DARK[i % len(DARK)]) for i, name in enumerate(free)}
    return {**own, **FIXED}
