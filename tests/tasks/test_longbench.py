"""longbench: every score by hand, prompts of lm-eval's templates, contexts that lose their middle."""

from __future__ import annotations

import io
import logging
import os

import pytest

from kvexp.errors import UserError
from kvexp.prompt import encode
from kvexp.tasks import longbench_scores
from kvexp.tasks.fitting import cut_nearest
from kvexp.tasks.longbench import NEW_TOKENS, SUBTASKS, LongBench, average, score, templates
from kvexp.tasks.longbench_scores import METRICS
from kvexp.tasks.longbench_scores import score as scored

DATA = os.environ.get("KVEXP_DATA_DIR")
CLASSES = ("Definition of something", "Date", "Date of birth", "Other number")

GOLDEN = [  # part, answer, gold answers, score
    ("qasper", "The cat, sat!", ("a cat sat",), 1.0),
    ("qasper", "cat", ("the cat sat", "dog"), 2 / 3),  # precision 1, recall 1/2
    ("hotpotqa", "yes yes no", ("yes",), 0.5),  # precision 1/3, recall 1
    ("musique", "", ("yes",), 0.0),
    ("triviaqa", "\nParis\nQuestion: and then?", ("Paris",), 1.0),  # the first line that is not empty
    ("narrativeqa", "Paris\nand London", ("Paris",), 0.5),  # here all lines count: precision 1/3
    ("gov_report", "the cat sat", ("the cat sat",), 1.0),
    ("gov_report", "the cat sat on", ("the dog sat",), 4 / 7),  # common: the, sat; 2/4 and 2/3
    ("samsum", "a b c\nd e", ("a b c",), 1.0),
    ("trec", "Date", ("Date",), 1.0),
    ("trec", "Date of birth", ("Date of birth",), 1.0),  # "Date" is a part of the gold name: not counted
    ("trec", "Date of birth", ("Date",), 0.5),  # two classes are named
    ("trec", "Other number", ("Date",), 0.0),
    ("trec", "Date\nOther number", ("Date",), 1.0),
    ("passage_count", "There are 12, not 10: 12", ("12",), 2 / 3),
    ("passage_count", "twelve", ("12",), 0.0),
    ("passage_retrieval_en", "Paragraph 3", ("Paragraph 3",), 1.0),
    ("passage_retrieval_en", "Paragraph 13", ("Paragraph 3",), 0.0),
    ("lcc", "# so\n`x`\nreturn x\nprint()", ("return x",), 1.0),
    ("lcc", "return y", ("return x",), 0.88),  # 7 of 8 letters: 0.875, rounded
    ("repobench-p", "", ("return x",), 0.0),
]


@pytest.mark.parametrize(("part", "answer", "golds", "expected"), GOLDEN)
def test_scores(part, answer, golds, expected):
    assert scored(part, answer, golds, CLASSES) == pytest.approx(expected)


def test_the_sixteen_parts_and_their_lengths():
    assert len(SUBTASKS) == 16 == len(METRICS) and tuple(templates()) == SUBTASKS
    by_length = {n: sorted(name for name in SUBTASKS if NEW_TOKENS[name] == n) for n in (512, 128, 64, 32)}
    assert {n: len(names) for n, names in by_length.items()} == {512: 3, 128: 3, 64: 4, 32: 6}
    assert all("{{" not in "".join(parts).replace("{{input}}", "") for parts in templates().values())


def row(name, i, context="some words " * 40, **more):
    return {
        "_id": f"{name}{i}",
        "input": f"What {i}?",
        "context": context,
        "answers": [f"answer {i}"],
        **more,
    }


@pytest.fixture
def bench(folder):
    long = "begin " + "middle " * 2000 + "end"
    folder("longbench/qasper", "test", [row("q", 0), row("q", 1, context=long), row("q", 2)])
    return folder(
        "longbench/trec", "test", [row("t", i, answers=["Date"], all_classes=list(CLASSES)) for i in range(2)]
    )


@pytest.fixture
def folder(tmp_path):
    import gzip
    import json

    def write(name, split, rows):
        (tmp_path / name).mkdir(parents=True, exist_ok=True)
        with gzip.open(tmp_path / name / f"{split}.jsonl.gz", "wt", encoding="utf-8") as lines:
            lines.writelines(json.dumps(one) + "\n" for one in rows)
        return str(tmp_path)

    return write


def test_questions_come_in_rounds_and_fit(words, bench):
    task = LongBench(subtask="qasper,trec", length=1000)
    loaded = task.load(words, seed=0, data_dir=bench)
    assert [q.group for q in loaded.questions] == ["qasper", "trec", "qasper", "trec", "qasper"]
    for question in loaded.questions:
        assert len(question.context) + len(question.query_ids) <= 1000
        assert question.max_new_tokens == NEW_TOKENS[question.group]
    short, long = loaded.questions[0], loaded.questions[2]
    before, after = templates()["qasper"]
    whole = before + "some words " * 40 + after.replace("{{input}}", "What 0?")
    assert (*short.context.ids[1:], *short.query_ids) == tuple(encode(words, whole))
    text = words.decode(long.context.ids) + long.query
    assert "begin middle" in text and "middle end" in text and text.endswith("Question: What 1?\n\nAnswer:")
    assert len(long.context) + len(long.query_ids) > 950
    assert loaded.data_sha256 == task.data_sha256(bench)


def test_a_question_is_scored_by_its_part(words, bench):
    loaded = LongBench(subtask="qasper,trec").load(words, seed=0, data_dir=bench)
    qasper, trec = loaded.questions[:2]
    assert score(qasper, "answer 0")["score"] == 1 and score(trec, "Date of birth")["score"] == 0.5


def test_the_average_is_over_parts():
    samples = [{"group": "a", "scores": {"score": s}} for s in (1.0, 0.0, 0.0, 1.0)]
    samples += [{"group": "b", "scores": {"score": s}} for s in (0.2, 0.2)]
    found = average(samples)["average"]
    assert found["value"] == pytest.approx((0.5 + 0.2) / 2) and found["n"] == 6
    assert 0.1 < found["stderr"] < 0.15  # half of that of the first part, sqrt(.25 / 4) = .25


def test_validation_is_apart_and_what_cannot_be_is_refused(words, bench):
    parts = [
        LongBench(subtask="qasper", n_validation=1).load(words, seed=0, split=split, data_dir=bench)
        for split in ("test", "validation")
    ]
    assert [[q.id for q in part.questions] for part in parts] == [["qasper-q0", "qasper-q1"], ["qasper-q2"]]
    with pytest.raises(UserError, match=r"no split=validation of its own: set task\.n_validation=5"):
        LongBench().load(words, seed=0, split="validation", data_dir=bench)
    with pytest.raises(UserError, match=r"has no longbench/lcc/test\.jsonl\.gz"):
        LongBench(subtask="lcc").load(words, seed=0, data_dir=bench)
    with pytest.raises(UserError, match=r"did you mean 'qasper'"):
        LongBench(subtask="qaspr")


@pytest.mark.parametrize("context", ["a b ", "a b", "a b\n", "a b  \n\n", "foo("])
def test_the_nearest_cut_keeps_the_whole_prompt(words, context):
    made = cut_nearest(words, context, "\nNow c?")
    assert (*made.context.ids[1:], *made.query_ids) == tuple(encode(words, context + "\nNow c?"))
    assert made.query_ids and words.decode(made.context.ids[1:]) in context


@pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")
def test_real_data(words):
    loaded = LongBench(n=1, length=2000).load(words, seed=0, data_dir=DATA)
    assert [q.group for q in loaded.questions] == list(SUBTASKS)


def test_rouge_closes_no_stream() -> None:
    from absl.logging import get_absl_handler

    stderr_at_import = io.StringIO()
    get_absl_handler().python_handler.setStream(stderr_at_import)
    longbench_scores._rouge.cache_clear()
    assert scored("samsum", "a b", ("a b",)) == 1.0
    logging.shutdown()  # as logging.config does with every handler there is
    assert not stderr_at_import.closed
