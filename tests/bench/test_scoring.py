from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvexp.errors import UserError
from kvexp.methods.eviction import triscore
from kvexp.methods.eviction.view import View

SMALL = ["method=triattention_plus", "budget=40", "method.interval=6", "method.recent=8"]


def test_an_interval_holds_one_prune(part, words) -> None:
    bench = part("scoring")
    one = bench.Decoder([*SMALL, *words]).read(40)
    calls, score = {}, triscore.score
    for _ in range(2):
        before = one.cache.evictor.meter.scored
        found = bench.decoded(one, 6, calls)
        assert one.cache.evictor.meter.scored - before == 3  # each layer, once
        assert one.rows() == 40
        assert min(seconds for name, seconds in found.items() if name != "room") > 0
        assert sum(found[name] for name in bench.PARTS) <= found["prune"]
    assert triscore.score is score
    views = [View(layer, call, one.cache.evictor, place) for place, (layer, call) in sorted(calls.items())]
    forms = bench.forms(one.method, views, 1)
    assert forms["largest_difference"] < 1e-5 and forms["ratio"] == forms["cosines"] / forms["dot"]


def test_a_difference_is_over_the_largest_score(part, words, monkeypatch) -> None:
    """One of the scores 4 and -8 is 2 more: a quarter of the larger one."""
    bench = part("scoring")
    one = bench.Decoder([*SMALL, *words])
    scores = {"cosines": [[[4.0, -8.0]]], "dot": [[[6.0, -8.0]]]}
    monkeypatch.setattr(triscore, "score", lambda method, view: bench.torch.tensor(scores[method.form]))
    assert bench.forms(one.method, [None], 1)["largest_difference"] == 0.25


def test_shares_are_of_decoding(part) -> None:
    bench = part("scoring")
    names = ("score", "prune", "room", "other")
    spent = [{"decode": d, **dict.fromkeys(names, x)} for d, x in ((10.0, 1.0), (20.0, 1.0), (10.0, 3.0))]
    found = bench.shares(spent)
    assert (found["decode"], found["prune"]) == (10.0, 1.0)
    assert found["score_share"] == found["prune_share"] == 0.1  # of 0.1, 0.05 and 0.3


def test_what_was_found_is_printed_and_written(part, words, capsys) -> None:
    bench = part("scoring")
    assert bench.main(["repeats=1", *SMALL, *words]) == 0
    folder = Path(words[-1].removeprefix("output_dir="))
    found = json.loads((folder / "bench" / "scoring" / "tiny-llama.json").read_text())
    assert found["rows"] == 40
    printed = capsys.readouterr().out
    assert "3 layers, 40 rows" in printed and "interval of 6 steps" in printed
    with pytest.raises(UserError, match="use method=triattention_plus"):
        bench.main(["method=h2o", "budget=40", *words])
