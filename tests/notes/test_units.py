"""Units: text that tokenises the same everywhere, and the choices of memories."""

from __future__ import annotations

import dataclasses

import pytest
import yaml

from kvexp import tiny
from kvexp.compose import conf_dir
from kvexp.instantiate import build
from kvexp.notes.amem import AMem
from kvexp.notes.licomemory import LiCoMemory
from kvexp.notes.rag import Rag
from kvexp.notes.units import NotesKind, Turn, as_unit
from kvexp.notes.whole import Whole
from kvexp.prompt import continuation

KINDS: tuple[NotesKind, ...] = (AMem(), LiCoMemory(), Rag(), Whole())


def test_a_unit_is_tidy_and_ends_its_line():
    assert as_unit("  a \r\n\n  b\t\n") == "a\n  b\n"
    turn = Turn("1", "Ann", " x\n\ny ", "May")
    assert (turn.said, turn.line) == ("Ann: x\ny", "[May] Ann: x\ny")
    assert Turn("1", "", "x").line == "x"


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_units_have_one_line_break_at_their_end_and_none_before(kind):
    notes = kind.open()
    for i, text in enumerate((" a fox\n\n", "b\r\nwhale ", "c  frog")):
        notes.add(Turn(str(i), "Ann" if i else "", text, f"day {i}", str(i)))
    units = notes.retrieve("fox", 3)
    assert {source for unit in units for source in unit.sources} == {"0", "1", "2"}
    tokenizer = tiny.tokenizer()
    apart = [token for unit in units for token in continuation(tokenizer, "\n", unit.text)]
    assert apart == continuation(tokenizer, "\n", "".join(unit.text for unit in units))
    for unit in units:
        assert unit.text == unit.text.strip() + "\n"
        assert "\n\n" not in unit.text


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.id)
def test_files_show_every_knob_with_its_default(kind):
    node = yaml.safe_load((conf_dir() / "notes" / f"{kind.id}.yaml").read_text(encoding="utf-8"))
    assert build("notes", kind.id, node) == kind
    assert {key: value for key, value in node.items() if key != "_target_"} == dataclasses.asdict(kind)
    assert list(node)[1:] == [field.name for field in dataclasses.fields(kind)]
