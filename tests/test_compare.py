"""Two sets of runs side by side: which cells are partners, and what is said of them."""

from __future__ import annotations

import json
import sys

import pytest

from kvexp import compare as command
from kvexp.report.collect import collect
from kvexp.report.matching import match
from kvexp.report.record import build_record, metric

CACHE = dict.fromkeys(
    (
        "context_tokens",
        "entries_nominal",
        "entries_peak",
        "entries_mean",
        "bytes_peak",
        "bytes_full",
        "kv_token_equivalents",
    ),
    8,
)


def store(folder, method, right, budget=512, seed=0, task="intents", error=None, **identity):
    identity = {"method": {"name": method, **identity.pop("knobs", {})}, **identity}
    cell = f"{method}{budget}{seed}{task}{len(list(folder.glob('*')))}"
    record = build_record(
        cell=cell,
        choices={"model": "tiny", "method": method, "task": task, "budget": budget, "seed": seed},
        metrics={"accuracy": metric(sum(right) / len(right), 0.1, len(right))} if right else {},
        cache={} if error else CACHE,
        identity=identity,
        provenance={},
        error=error,
    )
    path = folder / cell
    path.mkdir(parents=True)
    (path / "record.json").write_text(json.dumps(record))
    rows = [{"id": str(i), "query": f"q{i}", "scores": {"accuracy": float(r)}} for i, r in enumerate(right)]
    (path / "samples.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def matched(tmp_path):
    sides = [collect([tmp_path / name]).records for name in ("a", "b")]
    return match(*sides)


def names(found):
    return sorted((p.first["choices"]["budget"], p.second["choices"]["budget"], p.words) for p in found.pairs)


def test_another_method_with_knobs_of_its_own(tmp_path):
    for budget in (256, 512):
        store(tmp_path / "a", "snapkv", [1, 0], budget, knobs={"window": 32})
        store(tmp_path / "b", "rkv", [1, 1], budget, knobs={"lam": 0.1}, calibration={"n": 3})
    found = matched(tmp_path)
    assert names(found) == [(256, 256, "intents"), (512, 512, "intents")]
    assert found.differing == {"method": ("snapkv", "rkv")}


def test_one_baseline_beside_every_budget(tmp_path):
    store(tmp_path / "a", "full", [1, 1], "full")
    for budget in (256, 512):
        store(tmp_path / "b", "rkv", [1, 0], budget)
    assert names(matched(tmp_path)) == [("full", 256, "intents rkv"), ("full", 512, "intents rkv")]


def test_budgets_stand_in_their_order(tmp_path):
    for side, method in (("a", "snapkv"), ("b", "rkv")):
        for budget in (1024, 256, 2048):
            store(tmp_path / side, method, [1, 0], budget)
    rows = command.compare(tmp_path / "a", tmp_path / "b")["rows"]
    assert [row["budget"] for row in rows] == ["256", "1024", "2048"]


def test_knobs_tell_cells_apart_that_share_a_partner(tmp_path, capsys):
    for window in (16, 64):
        store(tmp_path / "a", "snapkv", [1, 0], knobs={"window": window})
    store(tmp_path / "b", "rkv", [1, 1])
    assert {words for *_, words in names(matched(tmp_path))} == {
        "intents snapkv window=16",
        "intents snapkv window=64",
    }
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    assert capsys.readouterr().out.count("not shown") == 2


def test_another_number_type_and_cells_without_a_partner(tmp_path):
    for dtype, side in (("auto", "a"), ("bfloat16", "b")):
        off = False if side == "a" else None
        store(tmp_path / side, "rkv", [1, 0], 256, model={"dtype": dtype, "new": off})
        store(tmp_path / side, "rkv", [1, 0], 256, task="passkey", model={"dtype": dtype})
    store(tmp_path / "b", "rkv", [1, 0], 1024, model={"dtype": "bfloat16"})
    found = matched(tmp_path)
    assert names(found) == [(256, 256, "intents"), (256, 256, "passkey")]
    assert found.differing == {"model.dtype": ("auto", "bfloat16")}
    assert [record["choices"]["budget"] for record in found.only_second] == [1024] and not found.only_first


def test_fidelity_changes_no_answer(tmp_path):
    store(tmp_path / "a", "rkv", [1, 0], fidelity=True)
    store(tmp_path / "b", "rkv", [1, 0], fidelity=False)
    assert len(matched(tmp_path).pairs) == 1


def test_the_numbers_by_hand(tmp_path, capsys):
    a, b = tmp_path / "a", tmp_path / "b"
    for seed, ours, theirs in ((0, [0] * 8, [1] * 8), (1, [1, 0] * 4, [1, 1] * 4)):
        store(a, "snapkv", ours, seed=seed)
        store(b, "rkv", theirs, seed=seed)
    assert command.main([str(a), str(b), "--json", str(tmp_path / "gap.json")]) == 0
    rows = json.loads((tmp_path / "gap.json").read_text())["rows"]
    assert [(row["seeds"], row["items"], row["value"], row["wins"]) for row in rows] == [
        ([0], 8, 1.0, 8),
        ([1], 8, 0.5, 4),
        ([0, 1], 8, 0.75, 8),
    ]
    both = rows[2]
    assert (both["a"], both["b"], both["se_seeds"], both["p"]) == (0.25, 1.0, 0.25, 2 / 2**8)
    assert both["holm"] == both["p"] and both["verdict"] == "better"
    assert "verdict" not in rows[0], "the mean of the seeds is tested, the seeds apart are not"
    said = capsys.readouterr().out
    assert "method: snapkv in A, rkv in B" in said and "+0.750" in said and "better" in said


def test_equal_sets_differ_in_nothing(tmp_path, capsys):
    for side in ("a", "b"):
        store(tmp_path / side, "rkv", [1, 0, 1])
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 0
    said = capsys.readouterr().out
    assert "+0.000" in said and "not shown" in said and " in A, " not in said


def test_mistakes_are_one_sentence(tmp_path, capsys):
    a, b, c = (tmp_path / name for name in "abc")
    store(a, "rkv", [1, 0], task="intents")
    store(b, "rkv", [1, 0], task="intents", budget=64)
    store(b, "rkv", [1, 0], task="intents", budget=512, seed=9)
    store(c, "rkv", [], error="no")
    for words, said in (
        ([a, tmp_path / "nowhere"], "is no folder"),
        ([a, c], "is complete: run what failed again (python -m kvexp.status names the commands), or name"),
        (
            [a, a, "--metric", "bleu"],
            "no sample of both sets tells bleu: name another with --metric",
        ),
    ):
        assert command.main([*map(str, words)]) == 2
        found = capsys.readouterr().err
        assert found.startswith("kvexp: ") and said in found and found.count("\n") == 1


def test_cells_that_cannot_be_told_apart_are_refused(tmp_path, capsys):
    for method, side in (("snapkv", "a"), ("rkv", "b")):
        for window in (16, 64):
            store(tmp_path / side, method, [1, 0], knobs={"window": window})
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "agree in all that is compared" in capsys.readouterr().err


def test_help_is_light():
    import subprocess

    code = "import sys, kvexp.compare as c; sys.exit(bool({'torch', 'numpy', 'hydra'} & set(sys.modules)))"
    subprocess.run([sys.executable, "-c", code], check=True)
    with pytest.raises(SystemExit):
        command.main(["--help"])


def only_rows(folder):
    return next(folder.glob("*/samples.jsonl"))


def test_an_unsound_sample_costs_its_run_and_is_told(tmp_path, capsys):
    for seed in (0, 1):
        store(tmp_path / "a", "snapkv", [1, 0], seed=seed)
        store(tmp_path / "b", "rkv", [1, 1], seed=seed)
    bad = tmp_path / "b/rkv5121intents1/samples.jsonl"
    bad.write_text('{"id": "0", "query": "q0", "scores": {"accuracy": NaN}}\n')
    out = tmp_path / "gap.json"
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b"), "--json", str(out)]) == 0
    found = json.loads(out.read_text(), parse_constant=lambda name: pytest.fail(name))
    reason = "samples.jsonl: line 1: holds nan, which is no finite number"
    assert found["unsound_b"] == [{"folder": str(bad.parent), "reason": reason}] and not found["unsound_a"]
    assert [(row["seeds"], row["value"], row["b"]) for row in found["rows"]] == [([0], 0.5, 1.0)]
    said = "".join(capsys.readouterr().out.split())
    assert "leftout,inB:" in said and "".join(reason.split()) in said


def test_nothing_but_unsound_samples_is_refused(tmp_path, capsys):
    for side in "ab":
        store(tmp_path / side, "rkv", [1, 0])
    only_rows(tmp_path / "b").write_text("[1, 2]\n")
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert "is lost: samples.jsonl: line 1: is a list, not the object" in capsys.readouterr().err


def test_other_tasks_and_a_metric_that_is_none_are_refused(tmp_path, capsys):
    store(tmp_path / "a", "rkv", [1, 0], task="intents")
    store(tmp_path / "b", "rkv", [1, 0], task="passkey")
    store(tmp_path / "b", "rkv", [1, 0], task="locomo")
    assert command.main([str(tmp_path / "a"), str(tmp_path / "b")]) == 2
    assert (
        "the tasks differ, intents in the first set and locomo, passkey in the second:"
        in capsys.readouterr().err
    )
    words = [str(tmp_path / "a"), str(tmp_path / "a"), "--metric", "nope", "--metric", "accuracy"]
    assert command.main(words) == 2
    said = "no sample of both sets tells nope: name another with --metric, such as accuracy"
    assert said in capsys.readouterr().err


def test_a_place_that_cannot_be_written_is_one_sentence(tmp_path, capsys):
    store(tmp_path / "a", "rkv", [1, 0])
    for out in (tmp_path, "/proc/nope/gap.json", only_rows(tmp_path / "a") / "gap.json"):
        assert command.main([str(tmp_path / "a"), str(tmp_path / "a"), "--json", str(out)]) == 1
        found = capsys.readouterr()
        assert found.err.startswith("kvexp: ") and found.err.count("\n") == 1 and not found.out
        assert "cannot be used (" in found.err and "name a file that can be written" in found.err
