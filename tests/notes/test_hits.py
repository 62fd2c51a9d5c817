"""How often the evidence is held: counted by hand, and on a part of LoCoMo not below BM25."""

from __future__ import annotations

import os

import pytest

from kvexp.notes.amem import AMem
from kvexp.notes.hits import Hit, Sought, baseline, hits
from kvexp.notes.licomemory import LiCoMemory
from kvexp.notes.rag import Rag
from kvexp.notes.units import Turn

DATA = os.environ.get("KVEXP_DATA_DIR")
TURNS = [Turn(f"D1:{i}", "Ann", text) for i, text in enumerate(("red fox", "blue whale", "green frog"))]


def test_hits_by_hand():
    sought = [
        Sought("The fox?", frozenset({"D1:0", "D1:2"}), "a"),
        Sought("The whale?", frozenset({"D1:2", "D9:9"}), "b"),
        Sought("The frog?", frozenset({"D9:9"})),
    ]
    assert hits(Rag(tokens=1), TURNS, sought, k=1) == [Hit("a", True, 0.5, 3), Hit("b", False, 0.0, 3)]
    assert hits(Rag(tokens=1), TURNS, sought, k=3) == [Hit("a", True, 1.0, 9), Hit("b", True, 1.0, 9)]


def test_the_baseline_is_bm25_over_the_same_pieces():
    assert baseline(AMem()) == Rag(tokens=1)
    assert baseline(LiCoMemory(tokens=64)) == Rag(tokens=64)


@pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")
@pytest.mark.parametrize("kind", [AMem(), LiCoMemory(), Rag()], ids=lambda kind: kind.id)
def test_locomos_evidence_is_held_no_less_often_than_by_bm25(kind):
    from kvexp.tasks.locomo_data import load_conversations

    ours = theirs = 0
    for one in load_conversations(DATA)[::3]:
        sought = [Sought(asked.question, asked.evidence) for asked in one.asked[::4]]
        ours += sum(hit.hit for hit in hits(kind, one.turns, sought))
        theirs += sum(hit.hit for hit in hits(baseline(kind), one.turns, sought))
    assert ours >= theirs
