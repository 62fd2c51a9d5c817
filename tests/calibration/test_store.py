"""An artefact is built once, by whoever comes first, and reused; scratch folders go away."""

from __future__ import annotations

import json
import multiprocessing
import shutil
import time
from pathlib import Path

import pytest
import torch

from kvexp.calibration.store import COLLECTED, Store, fingerprint, finish, whole
from kvexp.errors import UserError
from kvexp.methods.memory.states import refuse_mismatch
from kvexp.stats.samples import SampleStore


class Artefact:
    """As small as an artefact can be."""

    def __init__(self, content: str) -> None:
        self.manifest = {"content": content}

    def save(self, folder: Path) -> None:
        """Write the manifest."""
        (folder / "manifest.json").write_text(json.dumps(self.manifest))


def load(folder: Path, facts: dict) -> dict:
    manifest = json.loads((folder / "manifest.json").read_text())
    refuse_mismatch(manifest, facts, folder)
    return manifest


FACTS = {"model": "abc", "budget": "16", "knobs": {"key": "pre", "chunks": 1}}


def test_the_fingerprint_is_of_the_facts_and_not_of_their_order():
    assert fingerprint({"a": 1, "b": [2]}) == fingerprint({"b": [2], "a": 1})
    assert len({fingerprint(f) for f in ({}, {"a": 1}, {"a": 2}, {"b": 1}, {"a": "1"})}) == 5
    assert len(fingerprint({})) == 16


def test_built_once_then_loaded(tmp_path):
    store = Store(tmp_path / "store")
    made, folder, built = store.get("asm", FACTS, load, lambda: Artefact("one"))
    assert built and made.manifest == {"content": "one", **FACTS}
    assert folder == tmp_path / "store" / f"asm-{fingerprint(FACTS)}"
    again, same, built = store.get("asm", FACTS, load, lambda: pytest.fail("built twice"))
    assert (again, same, built) == ({"content": "one", **FACTS}, folder, False)
    _, other, built = store.get("asm", {**FACTS, "budget": "32"}, load, lambda: Artefact("two"))
    assert built and other != folder


def test_what_another_build_left_there_is_refused(tmp_path):
    store = Store(tmp_path)
    _, folder, _ = store.get("asm", FACTS, load, lambda: Artefact("one"))
    wrong = {**FACTS, "knobs": {"key": "rope_actual", "chunks": 1}}
    (folder / "manifest.json").write_text(json.dumps(wrong))
    with pytest.raises(
        UserError, match=r"built for method\.key='rope_actual', not 'pre'.*store_dir elsewhere"
    ):
        store.get("asm", FACTS, load, lambda: pytest.fail("built"))


def test_a_build_that_failed_leaves_nothing_to_load(tmp_path):
    store = Store(tmp_path)

    def fails():
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.get("asm", FACTS, load, fails)
    assert store.get("asm", FACTS, load, lambda: Artefact("one"))[2]


def _start(root: Path, log: Path) -> None:
    def build() -> Artefact:
        with log.open("a") as file:
            file.write("built\n")
        time.sleep(0.3)
        return Artefact("one")

    found, _, _ = Store(root).get("asm", FACTS, load, build)
    with log.open("a") as file:
        file.write("ready\n")
    assert found


def test_processes_that_start_together_build_once(tmp_path):
    context = multiprocessing.get_context("fork")
    together = [context.Process(target=_start, args=(tmp_path / "store", tmp_path / "log")) for _ in range(4)]
    for process in together:
        process.start()
    for process in together:
        process.join(30)
    assert [process.exitcode for process in together] == [0] * 4
    assert sorted((tmp_path / "log").read_text().split()) == ["built"] + ["ready"] * 4


def samples(root: Path) -> list[Path]:
    return sorted(root.glob("samples-*"))


def test_samples_are_removed_at_the_end_also_after_an_exception(tmp_path):
    store = Store(tmp_path)
    with store.samples(FACTS, keep=False) as folder:
        (folder / "rank-000").mkdir()
        assert samples(tmp_path) == [folder] and folder.name == f"samples-{fingerprint(FACTS)}"
    assert not samples(tmp_path)
    for error in (RuntimeError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), store.samples(FACTS, keep=False) as folder:
            (folder / "rank-000").mkdir()
            raise error
        assert not samples(tmp_path)


def collect(folder: Path, ranks: int = 2) -> None:
    """Three samples of one layer from each rank."""
    for rank in range(ranks):
        store = SampleStore.create(folder / f"rank-{rank:03d}", [0], {"s": (2,)})
        store.append(0, s=torch.zeros(3, 2))
        store.close()
    finish(folder)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_kept_samples_are_reused_when_they_are_complete_only(tmp_path):
    store = Store(tmp_path)
    with store.samples(FACTS, keep=True) as folder:
        (folder / "rank-000").mkdir()
    with store.samples(FACTS, keep=True) as again:  # of a run that was killed
        assert again == folder and not list(folder.iterdir())
        collect(folder)
    with store.samples(FACTS, keep=False) as third:
        assert names(third) == [COLLECTED, "rank-000", "rank-001"]
    assert whole(folder)  # a run that keeps nothing of its own leaves what another kept
    (folder / COLLECTED).unlink()
    with store.samples(FACTS, keep=False):
        collect(folder)
    assert not folder.exists()


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-4])


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: shutil.rmtree(folder / "rank-001"),
        lambda folder: (folder / "rank-001/layer000.s.bin").unlink(),
        lambda folder: cut(folder / "rank-000/layer000.s.bin"),
        lambda folder: cut(folder / "rank-000/manifest.json"),
        lambda folder: (folder / "rank-000/manifest.json").write_text("[]"),
        lambda folder: (folder / COLLECTED).write_text(""),
    ],
)
def test_damaged_samples_are_collected_anew(tmp_path, damage):
    store = Store(tmp_path)
    with store.samples(FACTS, keep=True) as folder:
        collect(folder)
    assert whole(folder)
    damage(folder)
    assert not whole(folder)
    with store.samples(FACTS, keep=True):
        assert not list(folder.iterdir())
        collect(folder)
    assert whole(folder)


def test_a_further_rank_neither_waits_nor_cleans_up(tmp_path, monkeypatch):
    store = Store(tmp_path)
    with store.samples(FACTS, keep=False) as folder:
        monkeypatch.setenv("LOCAL_RANK", "1")
        with pytest.raises(SystemExit), store.samples(FACTS, keep=False) as same:
            assert same == folder
            raise SystemExit(0)
        monkeypatch.delenv("LOCAL_RANK")
        assert folder.is_dir()
    assert not folder.exists()
