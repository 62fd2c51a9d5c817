"""The runs of a preset, by its cells' hashes or by what the run says, and the cells that lack one."""

from __future__ import annotations

import pytest

from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.report.experiment import selected


@pytest.fixture(scope="module")
def cells():
    return settings_of(["-m", "experiment=intents_grid"])


def record_of(own, make_record, **changes):
    choices = {**own.choices, "budget": own.budget.rows or "full", "seed": own.seed}
    record = make_record(choices.pop("method"), choices.pop("budget"), **choices)
    return {**record, "cell": own.cell, **changes}


def test_equal_cells_and_cells_that_name_the_preset(cells, make_record):
    own = record_of(cells[0], make_record)
    short = record_of(cells[1], make_record, cell="limited")
    assert short["choices"]["experiment"] == "intents_grid"
    other = record_of(cells[2], make_record, cell="else")
    del own["choices"]["experiment"], other["choices"]["experiment"]
    kept, missing = selected("intents_grid", [own, short, other])
    assert kept == [own, short]
    assert missing == [
        f"model=smollm2-135m method={method} task=intents budget={budget} seed=0"
        for method, budget in (("asm", 1024), ("full", "full"))
    ]


def test_all_of_it(cells, make_record):
    records = [record_of(cell, make_record) for cell in cells]
    assert selected("intents_grid", records) == (records, [])


def test_a_preset_that_is_not_there():
    with pytest.raises(UserError, match="intents_grit"):
        selected("intents_grit", [])
