"""The rows of the tables of reuse, and the goals that their ratios are held against."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import kvexp

BITS = ("kivi 4", "kivi 2", "ott 4", "ott 2")
CACHEBLEND, PLUS = "cacheblend, equal union", "agentkvshift_plus, equal union"
RANDOM, SILENT = "random probes, unweighted", "random probes, no shift"
FIRST = "agentkvshift, first 2 fresh"


@dataclass(frozen=True)
class Row:
    """A method with some knobs, at a share of tokens, on units `stored` in so many bits ("": exactly).

    `equal`: the share is the one with which it refreshes as many tokens as agentkvshift does. `beside` is the
    label of the row that it is compared with. Without a method it is full recompute.
    """

    label: str
    method: str = ""
    share: str = ""
    knobs: Mapping[str, Any] = field(default_factory=dict)
    equal: bool = False
    stored: str = ""
    beside: str = "agentkvshift"

    @property
    def name(self) -> str:
        """What it is called among the rows of its part."""
        return " ".join(filter(None, (self.stored, self.label, self.share)))

    def rival(self, rows: Sequence[Row]) -> Row | None:
        """Return the row that it is compared with, of the same share and store."""
        for row in rows:
            if row.label == self.beside and row.stored == self.stored and row.share in ("", self.share):
                return row
        return None

    def built(self, encoded: str, recompute: str) -> Any:
        """Return the method, which recomputes `recompute` of units that were encoded somewhere."""
        knobs = {**self.knobs, "encoded": encoded}
        if self.share:
            knobs["recompute"] = recompute
        if self.stored:
            name, _, bits = self.stored.partition(" ")
            knobs["stored"] = {"name": name, "bits": int(bits)}
        return kvexp.method(self.method, **knobs)


class Part(NamedTuple):
    """A table: where its units are encoded, its rows, and how many prompts it has if nothing else is said."""

    encoded: str
    rows: tuple[Row, ...]
    prompts: int = 40


class Goal(NamedTuple):
    """A bar that the ratio of a row's mean KL to another's is not above, on the tokens named."""

    name: str
    part: str
    row: str
    beside: str
    bars: Mapping[str, float]


FULL = Row("full recompute", beside="")


def floor(stored: str = "") -> Row:
    """Return the row that repairs nothing."""
    return Row("reposition", "reposition", stored=stored, beside="")


def usual(share: str, stored: str = "") -> tuple[Row, ...]:
    """Return the methods beside each other at a share."""
    return (
        Row("agentkvshift", "agentkvshift", share, stored=stored, beside="reposition"),
        Row(CACHEBLEND, "cacheblend", share, {"by": "both", "match": "union"}, stored=stored),
        Row("prophetkv, equal union", "prophetkv", share, {"match": "union"}, stored=stored),
        Row(PLUS, "agentkvshift_plus", share, equal=True, stored=stored),
    )


def nominal(share: str) -> tuple[Row, ...]:
    """Return agentkvshift_plus at the share itself: one set of probes, and the first two tokens."""
    return (Row("agentkvshift_plus", "agentkvshift_plus", share),)


def shift(label: str, method: str = "agentkvshift", **knobs: Any) -> Row:
    """Return a variant of AgentKVShift at share 0.1."""
    return Row(label, method, "0.1", knobs)


SENSORS = (
    shift(FIRST, first=2),
    shift(RANDOM, probes="random", weights="none"),
    shift("random probes, unweighted, first 2 fresh", probes="random", weights="none", first=2),
    shift("query probes, unweighted", probes="query", weights="none"),
)
ABLATIONS = (
    floor(),
    usual("0.1")[0],
    shift("no shift", shift="none"),
    shift("keys only", shift="keys"),
    shift("values only", shift="values"),
    shift("unweighted", weights="none"),
    shift("weights per head", weights_by="per_head"),
    shift("union fresh", union_fresh=True),
    shift("shared set by divergence", sets="shared", union_fresh=True),
    shift("averaged at positions", average="post"),
    shift("unweighted, shrunk", weights="none", shrink="james_stein"),
    shift("all fresh at the check layer", at_check="fresh"),
    shift("check layer 2", check=2),
    shift("mean of all tokens (oracle)", mean="oracle", weights="none"),
    *SENSORS,
    shift(SILENT, probes="random", shift="none"),
    shift("query probes, no shift", probes="query", shift="none"),
    Row(PLUS, "agentkvshift_plus", "0.1", equal=True),
    *nominal("0.1"),
    shift("plus, not shrunk", "agentkvshift_plus", shrink="none"),
    shift("plus, not scaled by drift", "agentkvshift_plus", drift=None),
    shift("plus, first tokens as others", "agentkvshift_plus", first=0),
    shift("plus, random probes", "agentkvshift_plus", probes="random"),
    shift("plus, no shift", "agentkvshift_plus", shift="none"),
    shift("cacheblend by values", "cacheblend", match="union"),
    shift("cacheblend, gradual", "cacheblend", by="both", gradual=True),
)
ONCE = (floor(), *usual("0.1"), *nominal("0.1"), *SENSORS)
PARTS = {
    "prefix": Part(
        "behind_header",
        (floor(), *(row for r in ("0.05", "0.1", "0.2", "0.3") for row in (*usual(r), *nominal(r)))),
    ),
    "old": Part("old_context", ONCE),
    "alone": Part("alone", ONCE),
    "quantised": Part(
        "behind_header",
        tuple(row for s in BITS for row in (floor(s), *usual("0.1", s), *usual("0.3", s))),
        12,
    ),
    "ablation": Part("behind_header", ABLATIONS),
}

BOTH = ("question", "answer")
GOALS = (
    Goal("A2", "prefix", "agentkvshift 0.1", "reposition", dict.fromkeys(BOTH, 0.45)),
    Goal("A3", "prefix", "agentkvshift 0.1", f"{CACHEBLEND} 0.1", dict.fromkeys(BOTH, 0.65)),
    Goal("A4", "prefix", "agentkvshift 0.1", f"{CACHEBLEND} 0.3", dict.fromkeys(BOTH, 1.0)),
    Goal("A5", "prefix", f"{PLUS} 0.1", "agentkvshift 0.1", {"question": 0.6, "answer": 0.8}),
    Goal("A6", "alone", f"{FIRST} 0.1", "agentkvshift 0.1", {"answer": 0.6}),
    *(
        goal
        for name in ("kivi", "ott")
        for goal in (
            Goal(
                "A7",
                "quantised",
                f"{name} 4 agentkvshift 0.1",
                f"{name} 4 {CACHEBLEND} 0.1",
                dict.fromkeys(BOTH, 0.6),
            ),
            Goal(
                "A7",
                "quantised",
                f"{name} 2 {PLUS} 0.1",
                f"{name} 2 agentkvshift 0.1",
                dict.fromkeys(BOTH, 0.5),
            ),
        )
    ),
    Goal("A8", "ablation", f"{RANDOM} 0.1", f"{SILENT} 0.1", dict.fromkeys(BOTH, 0.4)),
)
