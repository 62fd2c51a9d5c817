"""An artefact is built once, by whoever comes first, and reused; scratch folders go away."""

from __future__ import annotations

import json
import multiprocessing
import time
from pathlib import Path

import pytest

import crews
from kvexp.calibration.store import KEPT, Store, fingerprint
from kvexp.errors import UserError
from kvexp.methods.memory.states import refuse_mismatch


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
    made, folder, built = store.get("asm", FACTS, load, lambda work: Artefact("one"))
    assert built and made.manifest == {"content": "one", **FACTS}
    assert folder == tmp_path / "store" / f"asm-{fingerprint(FACTS)}"
    again, same, built = store.get("asm", FACTS, load, lambda work: pytest.fail("built twice"))
    assert (again, same, built) == ({"content": "one", **FACTS}, folder, False)
    _, other, built = store.get("asm", {**FACTS, "budget": "32"}, load, lambda work: Artefact("two"))
    assert built and other != folder


def test_what_another_build_left_there_is_refused(tmp_path):
    store = Store(tmp_path)
    _, folder, _ = store.get("asm", FACTS, load, lambda work: Artefact("one"))
    wrong = {**FACTS, "knobs": {"key": "rope_actual", "chunks": 1}}
    (folder / "manifest.json").write_text(json.dumps(wrong))
    with pytest.raises(
        UserError, match=r"built for method\.key='rope_actual', not 'pre'.*store_dir elsewhere"
    ):
        store.get("asm", FACTS, load, lambda work: pytest.fail("built"))


def test_a_build_that_failed_leaves_nothing_to_load(tmp_path):
    store = Store(tmp_path)

    def fails(work):
        raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        store.get("asm", FACTS, load, fails)
    assert store.get("asm", FACTS, load, lambda work: Artefact("one"))[2]


def _start(root: Path, log: Path) -> None:
    def build(work: Path) -> Artefact:
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


def test_samples_are_removed_at_the_end_and_stay_after_an_exception(tmp_path, caplog):
    store = Store(tmp_path)
    with store.samples(FACTS, keep=False) as folder:
        (folder / "part-000").mkdir()
        assert samples(tmp_path) == [folder] and folder.name == f"samples-{fingerprint(FACTS)}"
    assert not samples(tmp_path)
    for error in (RuntimeError("no"), KeyboardInterrupt()):
        with pytest.raises(type(error)), store.samples(FACTS, keep=False) as folder:
            (folder / "part-000").mkdir(exist_ok=True)
            raise error
        assert names(folder) == ["part-000"] and f"stays in {folder}" in caplog.text


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_run_that_keeps_nothing_leaves_what_another_kept(tmp_path):
    store = Store(tmp_path)
    with store.samples(FACTS, keep=True) as folder:
        (folder / "part-000").mkdir()
    with store.samples(FACTS, keep=False) as again:
        assert again == folder
    assert names(folder) == [KEPT, "part-000"]


def test_what_a_build_computed_is_there_after_an_interruption_and_gone_at_the_end(tmp_path):
    store = Store(tmp_path)

    def interrupted(work):
        work.mkdir(parents=True)
        (work / "0000.safetensors").touch()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        store.get("asm", FACTS, load, interrupted)
    seen = []
    _, folder, built = store.get("asm", FACTS, load, lambda work: seen.extend(names(work)) or Artefact("one"))
    assert built and seen == ["0000.safetensors"]
    assert names(folder) == [".lock", "manifest.json"]


def test_ranks_follow_the_first(tmp_path):
    """Rank 0 alone locks, saves and removes; the others get the same artefact."""

    def rank(crew):
        store = Store(tmp_path, crew)

        def build(work):
            with store.samples({"a": 1}, keep=False) as folder:
                (folder / f"part-{crew.rank}").mkdir()
                crew.barrier()
                assert names(folder) == ["part-0", "part-1"]
            return Artefact("one")

        return [store.get("asm", FACTS, load, build) for _ in range(2)]

    (one, again), (other, loaded) = crews.together(2, rank)
    assert one[1:] == other[1:] and one[2] and not again[2]
    assert one[0].manifest == other[0].manifest == again[0] == loaded[0]
    assert names(tmp_path) == [f".samples-{fingerprint({'a': 1})}.lock", one[1].name]
