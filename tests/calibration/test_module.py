"""Lightning's predict gives what a plain loop gives; batches are planned from the items alone."""

from __future__ import annotations

import json
import logging
import signal
from functools import partial
from pathlib import Path

import lightning
import pytest
import torch

import crews
import helpers
from kvexp.budget import Budget
from kvexp.calibration import module
from kvexp.calibration.module import PARTS, Runner, planned, segments
from kvexp.crew.crew import ALONE
from kvexp.errors import UserError
from kvexp.methods.eviction.triattention import TriAttention
from kvexp.methods.memory.asm import ASM
from kvexp.methods.memory.collect import encode_chunks
from kvexp.methods.memory.prepare import collected
from kvexp.stats.ridge import RidgeRegression
from kvexp.stats.shares import WHOLE

trainer = partial(lightning.Trainer, accelerator="cpu", devices=1)
TRACES = [helpers.tokens(n, seed=n) for n in (9, 3, 8, 4, 7, 5, 6)]


def test_batches_by_hand(monkeypatch):
    """Windows of two batches of two are sorted by length; equal lengths keep their order."""
    monkeypatch.setattr(module, "SORT_WINDOW", 2)
    items = ["aaaa", "b", "ccc", "dd", "e", "ff", "g"]
    assert planned(items, 2) == [["b", "dd"], ["ccc", "aaaa"], ["e", "g"], ["ff"]]
    assert planned(items, 10) == [["b", "e", "g", "dd", "ff", "ccc", "aaaa"]]


@pytest.mark.parametrize("n", [1, 5, 31, 32, 33, 64, 100])
def test_parts_are_few_and_hold_every_batch_in_order(n):
    runs = segments(n)
    assert [place for run in runs for place in run] == list(range(n))
    assert len(runs) <= PARTS and len({len(run) for run in runs[:-1]}) <= 1


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
    again = Runner(
        context, TRACES, tmp_path / "lightning", lambda **_: pytest.fail("a trainer was made"), batch_size=3
    )
    assert collected(method, model, caches, again).count(0) == ours.count(0)


class Seen:
    """A part that writes down what it was given."""

    def __init__(self, folder: Path, fail_at: int = -1) -> None:
        self.folder, self.fail_at, self.batches = folder, fail_at, []

    def __call__(self, batch: list) -> None:
        if len(everything) == self.fail_at:
            raise KeyboardInterrupt
        everything.append((batch, torch.is_grad_enabled()))
        self.batches.append([len(item) for item in batch])

    def close(self) -> None:
        self.folder.mkdir()
        (self.folder / "seen").write_text(json.dumps(self.batches))


everything: list = []


@pytest.fixture(autouse=True)
def nothing_seen():
    everything.clear()


def read(folders):
    return [batch for folder in folders for batch in json.loads((folder / "seen").read_text())]


def test_nothing_is_learnt_and_nothing_is_said(tmp_path, caplog, recwarn, capfd):
    """No gradients, no Lightning advertisements, no files beside the samples; log levels come back."""
    logger = logging.getLogger("lightning.pytorch")
    before = logger.level
    runner = Runner(None, TRACES, tmp_path, trainer, batch_size=4)
    with caplog.at_level(logging.INFO):
        runner.collect(Seen, TRACES, "collecting")
    assert [batch for batch, _ in everything] == planned(TRACES, 4)
    assert not any(grad for _, grad in everything)
    assert logger.level == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["part-000", "part-001", "plan.json"]
    assert not caplog.records and not [str(w.message) for w in recwarn if "lightning" in str(w.filename)]
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("ranks", [2, 3, 9])
def test_ranks_share_the_parts_and_have_all_of_them(tmp_path, ranks):
    """Also where there are more ranks than traces."""

    def rank(crew):
        runner = Runner(None, TRACES, tmp_path, trainer, batch_size=1, crew=crew)
        return read(runner.collect(Seen, TRACES, "collecting"))

    expected = [[len(item) for item in batch] for batch in planned(TRACES, 1)]
    assert crews.together(ranks, rank) == [expected] * ranks
    assert len(everything) == len(TRACES)


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_interrupted_collection_goes_on_on_any_number_of_ranks(tmp_path, ranks):
    runner = Runner(None, TRACES, tmp_path, trainer, batch_size=1)
    with pytest.raises(KeyboardInterrupt):
        runner.collect(partial(Seen, fail_at=4), TRACES, "collecting")
    assert len(everything) == 4

    def rank(crew):
        again = Runner(None, TRACES, tmp_path, trainer, batch_size=1, crew=crew)
        return read(again.collect(Seen, TRACES, "collecting"))

    expected = [[len(item) for item in batch] for batch in planned(TRACES, 1)]
    assert crews.together(ranks, rank) == [expected] * ranks
    assert len(everything) == len(TRACES)  # nothing was run twice


def test_other_traces_batches_or_a_damaged_part_are_collected_anew(tmp_path):
    def collect(items, size):
        everything.clear()
        return read(
            Runner(None, items, tmp_path, trainer, batch_size=size).collect(Seen, items, "collecting")
        )

    assert collect(TRACES, 2) == collect(TRACES, 2) and not everything
    collect(TRACES, 3)
    assert len(everything) == 3
    collect(TRACES[:-1], 3)
    assert len(everything) == 2
    (tmp_path / "part-001/seen").write_text("")
    assert collect(TRACES[:-1], 3) == [[3, 4, 5], [7, 8, 9]] and len(everything) == 1


@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_what_is_spread_is_computed_once_and_known_to_all(tmp_path, ranks):
    computed = []

    def build(key, shares):
        assert shares is WHOLE
        computed.append(key)
        return {"x": torch.full((2,), float(key))}

    def rank(crew):
        runner = Runner(None, [], tmp_path, trainer, crew=crew, work=tmp_path / "work")
        return {key: found["x"].tolist() for key, found in runner.spread([3, 5, 8], build, "layers").items()}

    assert crews.together(ranks, rank) == [{3: [3.0] * 2, 5: [5.0] * 2, 8: [8.0] * 2}] * ranks
    assert sorted(computed) == [3, 5, 8]
    (tmp_path / "work/0005.safetensors").unlink()
    crews.together(ranks, rank)
    assert sorted(computed) == [3, 5, 5, 8]


def test_more_ranks_than_keys_compute_each_together(tmp_path):
    """Rows are read once, sums are of all, and a key of an earlier start is not computed again."""
    read, data = [], torch.arange(22.0).view(11, 2)

    def build(key, shares):
        rows = shares.rows(len(data))
        read.append((key, list(rows)))
        fit = RidgeRegression(1, 1)
        fit.add(data[rows.start : rows.stop, :1] + key, data[rows.start : rows.stop, 1:])
        once = shares.once(lambda: {"first": torch.tensor(shares.number)})["first"]
        return {**shares.total(fit).state(), "first": once}

    def rank(crew):
        return Runner(None, [], tmp_path, trainer, crew=crew).spread([0, 1], build, "layers")

    for key, found in crews.together(4, rank)[3].items():
        whole = RidgeRegression(1, 1)
        whole.add(data[:, :1] + key, data[:, 1:])
        assert all(torch.equal(found[name], x) for name, x in whole.state().items())
        assert int(found["first"]) == 0
        assert sorted(row for one, rows in read for row in rows if one == key) == list(range(11))
    (tmp_path / "work/0001.safetensors").unlink()
    read.clear()
    crews.together(3, rank)
    assert {key for key, _ in read} == {1} and len(read) == 3


@pytest.mark.parametrize("ranks", [2, 3])
def test_ranks_make_the_very_memory_that_one_makes(tmp_path, ranks):
    """ASM and TriAttention: bit by bit, since batches, their order and the order of sums are the plan's."""
    context, model = helpers.context(), helpers.model("llama")

    def prepared(method, folder, crew=ALONE):
        runner = Runner(context, TRACES, folder / "s", trainer, 2, work=folder / "w", crew=crew)
        made = method.prepare(model, runner, Budget(8))
        made.manifest["context"] = ""
        made.save(folder / str(crew.rank))
        return (folder / str(crew.rank) / "memory.safetensors").read_bytes()

    for number, method in enumerate((ASM(), TriAttention())):
        alone = prepared(method, tmp_path / f"one-{number}")
        folder = tmp_path / f"many-{number}"
        assert crews.together(ranks, partial(prepared, method, folder)) == [alone] * ranks


def test_more_ranks_than_layers_make_the_memory_of_one(tmp_path):
    """Up to the order of sums."""
    context, model, layers = helpers.context(), helpers.model("llama"), 3

    def prepared(folder, crew=ALONE):
        runner = Runner(context, TRACES, folder / "s", trainer, 2, work=folder / "w", crew=crew)
        return ASM(samples="float32").prepare(model, runner, Budget(8))

    alone = prepared(tmp_path / "one")
    assert len(alone.layers) == layers
    for memory in crews.together(layers + 1, partial(prepared, tmp_path / "many")):
        for layer, found in memory.layers.items():
            for name, x in alone.layers[layer].tensors.items():
                torch.testing.assert_close(found.tensors[name], x, rtol=1e-4, atol=1e-5)


def test_a_signal_is_not_swallowed(tmp_path):
    """Lightning's handler of SIGTERM would note it, tell other ranks, and go on."""

    def terminated(number, frame):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, terminated)

    def kill(folder):
        signal.raise_signal(signal.SIGTERM)

    try:
        with pytest.raises(KeyboardInterrupt):
            Runner(None, TRACES, tmp_path, trainer).collect(kill, TRACES, "collecting")
        assert signal.getsignal(signal.SIGTERM) is terminated
    finally:
        signal.signal(signal.SIGTERM, before)


def test_the_bar_counts_batches(tmp_path, monkeypatch):
    shown = []

    def watched(items, what, total, unit):
        for done, item in enumerate(items, 1):
            yield item
            shown.append((done, what, total, unit))

    monkeypatch.setattr(module, "track", watched)
    Runner(None, TRACES, tmp_path, trainer, batch_size=3).collect(Seen, TRACES, "collecting")
    assert shown == [
        (1, "collecting", 3, "batches"),
        (2, "collecting", 3, "batches"),
        (3, "collecting", 3, "batches"),
    ]


@pytest.mark.parametrize(("key", "value"), [("limit_predict_batches", 1), ("fast_dev_run", True)])
def test_a_part_of_the_traces_is_refused(tmp_path, key, value):
    runner = Runner(None, TRACES, tmp_path, partial(trainer, **{key: value}), batch_size=3)
    with pytest.raises(UserError, match=r"the trainer ran 1 batches where this process has 3: leave out"):
        runner.collect(Seen, TRACES, "collecting")


def test_an_exception_in_a_batch_comes_through(tmp_path):
    class Failing(Seen):
        def __call__(self, batch: list) -> None:
            raise UserError("no")

    with pytest.raises(UserError, match=r"^no$"):
        Runner(None, TRACES, tmp_path, trainer).collect(Failing, TRACES, "collecting")
