"""Lightning's predict gives what a plain loop gives; batches are planned from the items alone."""

from __future__ import annotations

import functools
import logging

import lightning
import pytest
import torch

import helpers
from kvexp.calibration import module
from kvexp.calibration.module import Runner, planned
from kvexp.calibration.store import COLLECTED
from kvexp.errors import UserError
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.collect import encode_chunks
from kvexp.methods.memory.prepare import collected

trainer = functools.partial(lightning.Trainer, accelerator="cpu", devices=1)
TRACES = [helpers.tokens(n, seed=n) for n in (9, 3, 8, 4, 7, 5, 6)]


def test_batches_by_hand(monkeypatch):
    """Windows of two batches of two are sorted by length; equal lengths keep their order."""
    monkeypatch.setattr(module, "SORT_WINDOW", 2)
    items = ["aaaa", "b", "ccc", "dd", "e", "ff", "g"]
    assert planned(items, 2) == [["b", "dd"], ["ccc", "aaaa"], ["e", "g"], ["ff"]]
    assert planned(items, 10) == [["b", "e", "g", "dd", "ff", "ccc", "aaaa"]]


@pytest.mark.parametrize(
    ("n", "size", "ranks"), [(20, 32, 2), (7, 4, 3), (5, 1, 5), (65, 8, 8), (300, 32, 16)]
)
def test_every_rank_gets_a_batch_and_every_item_is_in_one(n, size, ranks):
    items = [[i] * (1 + i % 3) for i in range(n)]
    batches = planned(items, size, ranks)
    assert len(batches) >= ranks and max(map(len, batches)) <= size
    assert sorted(item for batch in batches for item in batch) == sorted(items)


def test_fewer_items_than_ranks_are_refused():
    with pytest.raises(UserError, match="3 traces cannot be shared by 4 processes"):
        planned([[1], [2], [3]], 8, 4)


def test_the_runner_collects_what_a_plain_loop_does(tmp_path):
    method, model, context = ASM(samples="float32"), helpers.model("llama"), helpers.context()
    caches = encode_chunks(method, model, context)
    runner = Runner(context, TRACES, tmp_path / "lightning", trainer, batch_size=3)
    loop = helpers.Calibration(context, [t for batch in planned(TRACES, 3) for t in batch], tmp_path / "loop")
    ours, plain = (collected(method, model, caches, calibration) for calibration in (runner, loop))
    assert ours.layers == plain.layers
    for layer in ours.layers:
        [one], [two] = (list(store.blocks(layer, 10**6)) for store in (ours, plain))
        for name, x in one.items():
            torch.testing.assert_close(x, two[name], rtol=0, atol=1e-4)
    # Samples that lie ready are not collected again.
    assert runner.collected and (tmp_path / "lightning" / COLLECTED).exists()
    again = Runner(context, [], tmp_path / "lightning", lambda **_: pytest.fail("a trainer was made"))
    assert collected(method, model, caches, again).count(0) == ours.count(0)


def test_nothing_is_learnt_and_nothing_is_said(tmp_path, caplog, recwarn, capfd):
    """No gradients, no Lightning advertisements, no files beside the samples; log levels come back."""
    seen = []

    def step(batch):
        seen.append((batch, torch.is_grad_enabled()))

    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    runner = Runner(None, TRACES, tmp_path, trainer, batch_size=4)
    with caplog.at_level(logging.INFO):
        runner.run(step, TRACES, "collecting")
    assert [batch for batch, _ in seen] == planned(TRACES, 4)
    assert not any(grad for _, grad in seen)
    assert logger.level == before and not list(tmp_path.iterdir())
    assert not caplog.records and not [str(w.message) for w in recwarn if "lightning" in str(w.filename)]
    assert capfd.readouterr() == ("", "")


def test_each_rank_writes_to_a_folder_of_its_own(tmp_path, monkeypatch):
    runner = Runner(None, [], tmp_path, trainer)
    assert runner.folder == tmp_path / "rank-000"
    monkeypatch.setenv("LOCAL_RANK", "3")
    assert runner.folder == tmp_path / "rank-003"
    monkeypatch.setenv("RANK", "11")  # on the second of two machines
    assert runner.folder == tmp_path / "rank-011"
    with pytest.raises(SystemExit) as end:
        runner.shards()
    assert end.value.code == 0


def test_the_bar_counts_batches(tmp_path, monkeypatch):
    shown = []

    def watched(items, what, total, unit):
        for done, item in enumerate(items, 1):
            yield item
            shown.append((done, what, total, unit))

    monkeypatch.setattr(module, "track", watched)
    Runner(None, TRACES, tmp_path, trainer, batch_size=3).run(lambda batch: None, TRACES, "collecting")
    assert shown == [
        (1, "collecting", 3, "batches"),
        (2, "collecting", 3, "batches"),
        (3, "collecting", 3, "batches"),
    ]


@pytest.mark.parametrize(("key", "value"), [("limit_predict_batches", 1), ("fast_dev_run", True)])
def test_a_part_of_the_traces_is_refused(tmp_path, key, value):
    partial = functools.partial(trainer, **{key: value})
    runner = Runner(None, TRACES, tmp_path, partial, batch_size=3)
    with pytest.raises(UserError, match=r"the trainer ran 3 traces where this process has 7: leave out"):
        runner.run(lambda batch: None, TRACES, "collecting")


def test_an_exception_in_a_batch_comes_through(tmp_path):
    def step(batch):
        raise UserError("no")

    with pytest.raises(UserError, match=r"^no$"):
        Runner(None, TRACES, tmp_path, trainer).run(step, TRACES, "collecting")
