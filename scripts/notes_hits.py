"""How often the ten units of each memory hold the evidence of LoCoMo's questions, beside BM25.

    python scripts/notes_hits.py data_dir=PATH [k=10]

Each memory is filled with a conversation and asked its questions, as in task=locomo. `hit` is the share of
questions of which a unit holds any evidence turn, `recall` the mean share of the evidence that the units
hold, `words` what they cost. BM25 ranks the same pieces without what the memory adds: single turns beside
amem, the same chunks beside the others; so numbers of one row compare, those of two rows only at equal words.
The difference is paired by question, with the central 95 % of its bootstrap. Questions whose evidence is not
among the turns are left out.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from kvexp.errors import UserError
from kvexp.notes.amem import AMem
from kvexp.notes.hits import Hit, Sought, baseline, hits
from kvexp.notes.licomemory import LiCoMemory
from kvexp.notes.rag import Rag
from kvexp.notes.units import NotesKind
from kvexp.tasks.locomo_data import CATEGORIES, Conversation, load_conversations
from kvexp.tasks.metrics import paired_difference

KINDS: tuple[NotesKind, ...] = (AMem(), LiCoMemory(), Rag())
KEYS = ("data_dir", "k")


def main(words: Sequence[str]) -> int:
    """Print the table."""
    given = dict(word.partition("=")[::2] for word in words)
    unknown = [key for key in given if key not in KEYS]
    if unknown or not str(given.get("k", "10")).isdigit():
        raise UserError(f"{words[0]} is not understood: write data_dir=PATH k=10")
    conversations = load_conversations(given.get("data_dir") or None)
    print(table(conversations, int(given.get("k", "10"))))
    return 0


def table(conversations: Sequence[Conversation], k: int) -> str:
    """Return the table as Markdown."""
    columns = ["hit", "BM25", "difference", "recall", "BM25", "words", "BM25", *CATEGORIES.values()]
    lines = [row(["memory", *columns]), row(["---"] * (len(columns) + 1))]
    for kind in KINDS:
        ours, theirs = (found(one, conversations, k) for one in (kind, baseline(kind)))
        gap = paired_difference([float(hit.hit) for hit in ours], [float(hit.hit) for hit in theirs])
        cells = [
            share([hit.hit for hit in ours]),
            share([hit.hit for hit in theirs]),
            f"{gap.value:+.3f} ({gap.low:+.3f}, {gap.high:+.3f})",
            *(share([hit.recall for hit in side]) for side in (ours, theirs)),
            *(f"{sum(hit.words for hit in side) / len(side):.0f}" for side in (ours, theirs)),
            *(
                " / ".join(share([h.hit for h in s if h.group == name]) for s in (ours, theirs))
                for name in CATEGORIES.values()
            ),
        ]
        lines.append(row([kind.id, *cells]))
    return "\n".join([*lines, f"\n{len(ours)} questions of {len(conversations)} conversations, k={k}"])


def found(kind: NotesKind, conversations: Sequence[Conversation], k: int) -> list[Hit]:
    """Return the hits of a memory over all conversations."""
    return [
        hit
        for one in conversations
        for hit in hits(
            kind,
            one.turns,
            [Sought(asked.question, asked.evidence, CATEGORIES[asked.category]) for asked in one.asked],
            k,
        )
    ]


def share(values: Sequence[float]) -> str:
    """Return a mean."""
    return f"{sum(values) / len(values):.3f}" if values else "–"


def row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"notes_hits: {error}")
