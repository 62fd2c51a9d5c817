"""Label tasks over published sets: parts that stay apart, prompts, and seeds that move the context alone."""

from __future__ import annotations

import os

import pytest

from kvexp.errors import UserError
from kvexp.tasks.banking77 import Banking77
from kvexp.tasks.clinc150 import Clinc150
from kvexp.tasks.labels import normalise
from kvexp.tasks.trec import Trec

LABELS = ("card_arrival", "lost_card", "exchange_rate", "top_up_failed")
SMALL = {"n_calibration": 5, "n_validation": 10, "context_tokens": 700}
DATA = os.environ.get("KVEXP_DATA_DIR")
needs_data = pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")


def rows(label, numbers):
    return [{"text": f"query number {i} about {label}", "label": label} for i in numbers]


@pytest.fixture
def banking(folder):
    """40 train and 10 test rows of four labels; some train rows repeat one another or a test row."""
    train = [row for label in LABELS for row in rows(label, range(40))]
    twins = [{"text": f"  QUERY number {i}  about lost_card", "label": "lost_card"} for i in range(5)]
    leaks = [{"text": f"Query number {i} about lost_card", "label": "lost_card"} for i in range(100, 105)]
    folder("banking77", "train", train + twins + leaks)
    return folder("banking77", "test", [row for label in LABELS for row in rows(label, range(100, 110))])


def draw_of(loaded):
    return loaded.trace_source.drawn


def texts(found):
    return [normalise(row.text) for row in found]


def test_prompt_format(words, banking):
    loaded = Banking77(**SMALL).load(words, seed=0, data_dir=banking)
    text = words.decode(loaded.context.ids)
    assert text.startswith("<s>Classify the query of a bank customer by its intent.\nQuery: query number ")
    first = words.decode(loaded.context.chunks[0])
    assert first.count("\n") == 2 and first.endswith("\n") and "\nIntent: " in first
    assert loaded.labels == ("card arrival", "exchange rate", "lost card", "top up failed")
    assert {document.expected for document in loaded.documents} == set(loaded.labels)
    assert all(document.query.endswith("\nIntent:") for document in loaded.documents)
    assert loaded.max_new_tokens == max(map(len, loaded.label_ids)) + 1
    bare = Banking77(**SMALL, description=False).load(words, seed=0, data_dir=banking)
    assert words.decode(bare.context.ids).startswith("<s>Query: query number ")


def test_line_breaks_inside_a_text_become_spaces(words, folder):
    folder("banking77", "train", [row for label in LABELS for row in rows(label, range(40))])
    data = folder("banking77", "test", [{"text": "two\nlines \n", "label": "lost_card"}])
    loaded = Banking77(**SMALL).load(words, seed=0, data_dir=data)
    assert loaded.documents[0].query == "Query: two lines\nIntent:"


def test_parts_are_disjoint_and_complete(words, banking):
    loaded = Banking77(**SMALL).load(words, seed=0, data_dir=banking)
    drawn = draw_of(loaded)
    validation = draw_of(Banking77(**SMALL).load(words, seed=0, split="validation", data_dir=banking))
    traces = drawn.traces(loaded.trace_source.context, 1000, 0)
    parts = [
        texts(p)
        for p in (drawn.queries, validation.queries, drawn.calibration, loaded.trace_source.context, traces)
    ]
    everything = [text for part in parts for text in part]
    assert len(everything) == len(set(everything))
    assert list(map(len, parts[:3])) == [40, 10, 5]
    assert len(parts[3]) + len(parts[4]) == 160 - 10 - 5  # twins and leaks are gone
    assert len(loaded.traces(len(traces), "gold", 0)) == len(traces)
    with pytest.raises(UserError, match=rf"set calibration\.n={len(traces)} or less"):
        loaded.traces(len(traces) + 1, "gold", 0)


def test_a_seed_changes_the_context_alone(words, banking):
    first, again, other = (Banking77(**SMALL).load(words, seed=s, data_dir=banking) for s in (0, 0, 1))
    assert first == again
    assert first.context.key != other.context.key
    assert first.documents == other.documents
    assert first.calibration_queries == other.calibration_queries
    assert first.data_sha256 == other.data_sha256
    assert first.traces(30, "none", 0)[:10] == first.traces(10, "none", 0) != other.traces(10, "none", 1)


def test_a_limit_is_a_fair_sample_of_the_test_rows(words, banking):
    whole = Banking77(**SMALL).load(words, seed=0, data_dir=banking)
    cut = Banking77(**SMALL).load(words, seed=0, limit=12, data_dir=banking)
    assert cut.documents == whole.documents[:12]
    assert len({document.expected for document in cut.documents}) == 4
    assert Banking77(**SMALL, n_test=12).load(words, seed=0, data_dir=banking).documents == cut.documents
    assert [document.sample for document in whole.documents] == list(range(40))
    assert len({document.id for document in whole.documents}) == 40


def test_a_subset_of_labels(words, banking):
    loaded = Banking77(**SMALL, n_labels=2).load(words, seed=0, data_dir=banking)
    # random.Random(5).sample(sorted(LABELS), 2)
    assert loaded.labels == ("lost card", "top up failed")
    assert len(loaded.documents) == 20
    assert {row.label for row in draw_of(loaded).rest} == set(loaded.labels)
    drawn = {
        Banking77(**SMALL, n_labels=2, label_seed=s).load(words, seed=0, data_dir=banking).labels
        for s in range(9)
    }
    assert len(drawn) > 1


def test_permuted_labels(words, banking):
    plain, permuted = (
        Banking77(**SMALL, permute_labels=flag).load(words, seed=0, data_dir=banking)
        for flag in (False, True)
    )
    assert sorted(permuted.permutation) == sorted(permuted.permutation.values()) == list(plain.labels)
    assert all(true != shown for true, shown in permuted.permutation.items())
    assert permuted.documents == plain.documents
    for true, shown in zip(plain.context.chunks, permuted.context.chunks, strict=False):
        (query, label), (same, other) = (words.decode(c).strip().split("\nIntent: ") for c in (true, shown))
        assert query == same and permuted.permutation[label] == other


@pytest.mark.parametrize(
    ("labels", "expected"), [("fine", ("HUM:ind", "NUM:date", "NUM:dist")), ("coarse", ("HUM", "NUM"))]
)
def test_trec_has_two_sets_of_labels(words, folder, labels, expected):
    def questions(numbers):
        return [
            {"text": f"Question {i} of {fine} ?", "label": fine, "fine": fine, "coarse": fine.split(":")[0]}
            for fine in ("NUM:dist", "NUM:date", "HUM:ind")
            for i in numbers
        ]

    folder("trec", "train", questions(range(40)))
    data = folder("trec", "test", questions(range(50, 55)))
    loaded = Trec(**SMALL, labels=labels).load(words, seed=0, data_dir=data)
    assert loaded.labels == expected
    assert loaded.documents[0].query.startswith("Question: Question 5")
    assert loaded.documents[0].query.endswith(" ?\nType:")
    assert words.decode(loaded.traces(1, "gold", 0)[0].answer_ids).strip() in expected


def test_refusals_are_one_sentence(words, banking):
    with pytest.raises(
        UserError, match=r"^task\.n_labels=5 is more than there are: set task\.n_labels=4 or less$"
    ):
        Banking77(**SMALL, n_labels=5).load(words, seed=0, data_dir=banking)
    with pytest.raises(
        UserError, match=r"^task\.n_test=41 is more than there are: set task\.n_test=40 or less$"
    ):
        Banking77(**SMALL, n_test=41).load(words, seed=0, data_dir=banking)
    with pytest.raises(UserError, match="160 train rows of these labels, too few to hold out 250"):
        Banking77().load(words, seed=0, data_dir=banking)
    for knobs in ({"n_labels": 1}, {"n_test": 0}, {"n_validation": 0}):
        with pytest.raises(UserError, match="is too small"):
            Banking77(**knobs)


@needs_data
@pytest.mark.parametrize(
    ("task", "labels", "train", "published_test"),
    [
        (Banking77(n_labels=12), 12, 1577, 480),
        (Banking77(), 77, 10003, 3080),
        (Clinc150(), 150, 15000, 4500),
        (Trec(), 50, 5452, 500),
        (Trec(labels="coarse"), 6, 5452, 500),
    ],
    ids=["banking77-12", "banking77", "clinc150", "trec-fine", "trec-coarse"],
)
def test_real_data(words, task, labels, train, published_test):
    loaded = task.load(words, seed=0, data_dir=DATA)
    names = task._labels(task._rows("train", DATA))
    assert len(loaded.labels) == len(names) == labels
    assert sum(row.label in names for row in task._rows("train", DATA)) == train
    assert 0.35 * published_test < len(loaded.documents) <= published_test
    assert 3900 < len(loaded.context) <= 4096
    drawn = draw_of(loaded)
    parts = [texts(part) for part in (drawn.queries, drawn.calibration, drawn.rest)]
    assert not set(parts[0]) & {*parts[1], *parts[2]}
    assert len({*parts[1], *parts[2]}) == len(parts[1]) + len(parts[2])
    assert len(loaded.traces(700, "wrong", 0)) == 700


@needs_data
def test_real_sizes_with_the_embedded_tokenizer(embedded):
    loaded = Banking77(n_labels=12).load(embedded, seed=0, data_dir=DATA)
    assert 165 <= len(loaded.context.chunks) <= 185
    assert embedded.decode(loaded.context.ids[:1]) == "<|endoftext|>"


def test_trec_rows_without_the_chosen_labels_are_one_sentence(words, folder):
    for split in ("train", "test"):
        data = folder("trec", split, [{"text": "how far ?", "fine": "NUM:dist"}])
    with pytest.raises(UserError, match=r"trec/train\.jsonl\.gz has no text 'coarse' in row 1"):
        Trec(labels="coarse").load(words, seed=0, data_dir=data)
