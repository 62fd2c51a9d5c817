"""The generated task: what a seed draws, what its splits promise, and what its knobs change."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from kvexp import tiny
from kvexp.errors import UserError
from kvexp.tasks.intents import Intents
from kvexp.tasks.intents_rows import UniqueRows, slot
from kvexp.tasks.intents_text import COLOURS, FILLERS, OPENERS, TOPICS
from kvexp.tasks.labels import normalise


def text_of(document) -> str:
    return normalise(document.query.removeprefix("Query: ").removesuffix("\nIntent:"))


def texts(rows) -> set[str]:
    return {normalise(row.text) for row in rows}


def parts(loaded):
    """The rows behind a task set: (queries, context, calibration)."""
    source = loaded.trace_source
    return source.drawn.queries, source.context, source.drawn.calibration


def test_ingredients():
    phrasings = [phrasing for topic in TOPICS for phrasing in topic.phrasings]
    assert len(TOPICS) == len(COLOURS) == len(set(COLOURS)) == 16
    assert len(set(phrasings)) == len(phrasings) == 128
    assert all(sum(slot(phrasing) is not None for phrasing in topic.phrasings) == 4 for topic in TOPICS)
    assert len(OPENERS) == 10 and OPENERS.count("") == 3
    assert all(len(fillers) == len(set(fillers)) == 10 for fillers in FILLERS.values())
    assert not {word for phrasing in phrasings for word in phrasing.split()} & set(COLOURS)


def test_every_phrasing_has_words_of_its_own():
    phrasings = [phrasing for topic in TOPICS for phrasing in topic.phrasings]
    count = Counter(word for phrasing in phrasings for word in set(phrasing.split()))
    for phrasing in phrasings:
        assert any(count[word] == 1 for word in phrasing.split()), phrasing


def test_prompt_format(words):
    loaded = Intents().load(words, seed=0)
    text = words.decode(loaded.context.ids)
    lines = text.removeprefix("<s>").split("\n")
    assert text.startswith("<s>Classify the query by its intent.\nQuery: ")
    assert lines[-1] == "" and len(lines) == 2 + 2 * len(loaded.context.chunks)
    assert all(line.startswith("Query: ") for line in lines[1:-1:2])
    assert {line.removeprefix("Intent: ") for line in lines[2:-1:2]} == set(loaded.labels)


def test_the_context_is_an_exact_prefix_of_every_prompt(words):
    loaded = Intents().load(words, seed=1)
    prefix = words.decode(loaded.context.ids[1:])
    for document in loaded.documents[::25]:
        whole = words.encode(prefix + document.query, add_special_tokens=False)
        assert [*loaded.context.ids[1:], *document.query_ids] == whole


@pytest.mark.parametrize("seed", range(4))
def test_splits_are_disjoint_and_balanced(words, seed):
    loaded = Intents().load(words, seed=seed)
    queries, context, calibration = parts(loaded)
    assert len(texts(queries)) == len(loaded.documents) == 150
    assert max(Counter(row.label for row in queries).values()) == 13
    assert min(Counter(row.label for row in queries).values()) == 12
    assert not texts(queries) & texts(context)
    assert not texts(queries) & texts(calibration) and len(texts(calibration)) == 50
    traced = loaded.trace_source.drawn.traces(context, 300, seed)
    assert len(texts(traced)) == 300
    assert not texts(traced) & (texts(queries) | texts(calibration))


def test_every_phrasing_of_a_query_is_demonstrated(words):
    for seed in range(4):
        loaded = Intents().load(words, seed=seed)
        bodies = {row.text.split(", ")[-1].split(": ")[-1] for row in loaded.trace_source.context}
        for intent in loaded.trace_source.drawn.intents:
            for phrasing in intent.phrasings:
                name = slot(phrasing)
                filled = [phrasing.format(**{name: text}) for text in FILLERS[name]] if name else [phrasing]
                assert bodies & set(filled), phrasing


def test_a_seed_is_reproducible_and_seeds_differ(words):
    first, again, other = (Intents().load(words, seed=seed) for seed in (3, 3, 4))
    assert first == again
    assert first.context.key != other.context.key
    assert first.data_sha256 == again.data_sha256 != other.data_sha256
    assert first.traces(20, "gold", 3) == again.traces(20, "gold", 3) != again.traces(20, "gold", 4)


def test_labels_come_from_the_words(words):
    loaded = Intents().load(words, seed=0)
    assert len(loaded.labels) == 12 and set(loaded.labels) <= set(COLOURS)
    assert list(loaded.labels) == sorted(loaded.labels)
    assert all(len(ids) == 1 for ids in loaded.label_ids) and len(set(loaded.label_ids)) == 12
    assert [words.decode(ids) for ids in loaded.label_ids] == [f" {label}" for label in loaded.labels]
    assert [words.decode(ids) for ids in loaded.answer_ids] == [f" {label}\n" for label in loaded.labels]
    assert words.decode([loaded.end_id]) == "\n" and loaded.stop == ("\n",) and loaded.max_new_tokens == 2
    document = loaded.documents[0]
    assert words.decode(document.expected_ids) == f" {document.expected}"


@pytest.mark.parametrize("kind", ["descriptive", "associated"])
def test_other_label_kinds_keep_the_queries(words, kind):
    colours, other = Intents().load(words, seed=0), Intents(label_kind=kind).load(words, seed=0)
    assert [document.query for document in colours.documents] == [
        document.query for document in other.documents
    ]
    assert set(other.labels) <= {getattr(topic, kind) for topic in TOPICS}


def test_more_traces_change_nothing_else(words):
    loaded = Intents().load(words, seed=0)
    few, many = loaded.traces(50, "none", 0), loaded.traces(300, "none", 0)
    assert many[:50] == few
    assert Intents().load(words, seed=0) == loaded


def test_a_limit_keeps_the_first_documents(words):
    whole, cut = Intents().load(words, seed=0), Intents().load(words, seed=0, limit=24)
    assert cut.documents == whole.documents[:24]
    assert (cut.context, cut.data_sha256) == (whole.context, whole.data_sha256)
    assert set(Counter(document.expected for document in cut.documents).values()) == {2}


def test_rounds_balance_every_truncation(words):
    _, context, _ = parts(Intents().load(words, seed=0))
    for length in range(0, len(context) - 12, 12):
        assert len({row.label for row in context[length : length + 12]}) == 12
    _, at_random, _ = parts(Intents(order="random").load(words, seed=0))
    assert len({row.label for row in at_random[:12]}) < 12


def test_the_context_fills_but_never_exceeds_its_tokens(words):
    for tokens in (300, 1024, 4096):
        loaded = Intents(context_tokens=tokens).load(words, seed=2)
        assert tokens - 30 < len(loaded.context) <= tokens
        longer = Intents(context_tokens=tokens + 64).load(words, seed=2)
        assert longer.context.chunks[: len(loaded.context.chunks)] == loaded.context.chunks
        assert longer.documents == loaded.documents
    with pytest.raises(UserError, match=r"task\.context_tokens=8 holds no whole demonstration"):
        Intents(context_tokens=8).load(words, seed=0)


def test_without_description_the_header_is_bos(words):
    loaded = Intents(description=False).load(words, seed=0)
    assert loaded.context.header == (words.bos_token_id,)
    assert words.decode(loaded.context.ids[1:]).startswith("Query: ")
    assert loaded.documents == Intents().load(words, seed=0).documents


def test_traces_with_each_kind_of_label(words):
    loaded = Intents().load(words, seed=0)
    gold, none, wrong = (loaded.traces(40, labels, 0) for labels in ("gold", "none", "wrong"))
    truth = {
        trace.id: row.label
        for trace, row in zip(gold, loaded.trace_source.drawn.traces((), 40, 0), strict=True)
    }
    assert [trace.query_ids for trace in gold] == [trace.query_ids for trace in none]
    assert [trace.query_ids for trace in gold] == [trace.query_ids for trace in wrong]
    for with_label, without, with_other in zip(gold, none, wrong, strict=True):
        assert words.decode(with_label.query_ids).endswith("\nIntent:")
        assert words.decode(with_label.answer_ids) == f" {truth[with_label.id]}\n"
        assert without.answer_ids == ()
        other = words.decode(with_other.answer_ids).strip()
        assert other in loaded.labels and other != truth[with_label.id]
    assert len({trace.answer_ids for trace in loaded.traces(300, "wrong", 0)}) == 12


def test_a_permuted_context_leaves_truth_elsewhere(words):
    plain, permuted = Intents().load(words, seed=0), Intents(permute_labels=True).load(words, seed=0)
    mapping = permuted.permutation
    assert plain.permutation is None
    assert sorted(mapping) == sorted(mapping.values()) == list(plain.labels)
    assert all(shown != true for true, shown in mapping.items())
    assert permuted.documents == plain.documents
    assert permuted.calibration_queries == plain.calibration_queries
    assert permuted.traces(60, "gold", 0) == plain.traces(60, "gold", 0)
    for true, shown in zip(plain.context.chunks, permuted.context.chunks, strict=True):
        lines = [words.decode(chunk).split("\nIntent: ") for chunk in (true, shown)]
        assert lines[0][0] == lines[1][0]
        assert mapping[lines[0][1].strip()] == lines[1][1].strip()


@pytest.mark.parametrize(
    "knobs", [{"phrasings": 2}, {"phrasings": 8}, {"n_labels": 16, "phrasings": 2}, {"n_labels": 2}]
)
def test_difficulty_knobs(words, knobs):
    task = Intents(**knobs)
    loaded = task.load(words, seed=5)
    intents = loaded.trace_source.drawn.intents
    assert len(loaded.documents) == 150
    assert len(intents) == task.n_labels
    for intent in intents:
        assert len(set(intent.phrasings)) == task.phrasings
        assert any(map(slot, intent.phrasings))


def test_a_slot_in_every_phrasing(words):
    loaded = Intents(slots="all").load(words, seed=0)
    assert all(
        slot(phrasing) for intent in loaded.trace_source.drawn.intents for phrasing in intent.phrasings
    )


def test_validation_is_disjoint_from_test_and_its_own_context(words):
    test, validation = (Intents().load(words, seed=0, split=split) for split in ("test", "validation"))
    queries, context, calibration = parts(validation)
    assert len(texts(queries)) == 150
    assert not texts(queries) & {text_of(document) for document in test.documents}
    assert not texts(queries) & (texts(context) | texts(calibration))
    assert not {text_of(document) for document in test.documents} & texts(context)
    assert not texts(queries) & texts(validation.trace_source.drawn.traces(context, 500, 0))


def test_unique_rows_run_out_exactly(words):
    loaded = Intents(n_labels=3, phrasings=1, n_test=6, n_calibration=3).load(words, seed=0)
    with pytest.raises(UserError, match=r"calibration\.n=1000 is more than the 231 traces of task=intents"):
        loaded.traces(1000, "none", 0)  # 3 intents x 1 phrasing x 8 openers x 10 fillers - 9
    assert len(loaded.traces(231, "none", 0)) == 231


def test_too_many_queries_are_refused_with_the_number_that_exists(words):
    with pytest.raises(
        UserError, match=r"task\.n_test=5000 asks for .*: set task\.n_test=(\d+) or less"
    ) as caught:
        Intents(n_test=5000).load(words, seed=0)
    possible = int(str(caught.value).split("set task.n_test=")[1].split()[0])
    with pytest.raises(UserError, match=r"task\.n_calibration=50"):
        Intents(n_test=possible).load(words, seed=0)
    assert len(Intents(n_test=possible - 60).load(words, seed=0).documents) == possible - 60


def test_spare_utterances_stay(words):
    intents = Intents().load(words, seed=0).trace_source.drawn.intents
    unique = UniqueRows(intents, spare=4)
    drawn = unique.rows(random.Random(0), 100_000, "row")
    counts = Counter(next(p for i in intents for p in i.phrasings if _matches(row.text, p)) for row in drawn)
    for intent in intents:
        for phrasing in intent.phrasings:
            assert counts[phrasing] == (80 if slot(phrasing) else 8) - 4


def _matches(text: str, phrasing: str) -> bool:
    before, _, after = (
        phrasing.partition("{" + (slot(phrasing) or "") + "}") if slot(phrasing) else (phrasing, "", "")
    )
    return before in text and text.endswith(after)


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"n_labels": 17}, "task.n_labels=17 is more than there are: set task.n_labels=16 or less"),
        ({"n_labels": 1}, "task.n_labels=1 is too small: set task.n_labels=2 or more"),
        ({"phrasings": 9}, "task.phrasings=9 is more than there are: set task.phrasings=8 or less"),
        ({"phrasings": 5, "slots": "all"}, "task.phrasings=5 is too many for task.slots=all"),
        ({"n_test": 0}, "task.n_test=0 is too small"),
        ({"n_calibration": 0}, "task.n_calibration=0 is too small"),
        ({"context_tokens": 0}, "task.context_tokens=0 is too small"),
    ],
)
def test_bad_knobs_are_one_sentence(knobs, message):
    with pytest.raises(UserError) as caught:
        Intents(**knobs)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_bad_requests_are_one_sentence(words):
    with pytest.raises(UserError, match="split=tset is none of test, validation, did you mean 'test'"):
        Intents().load(words, seed=0, split="tset")
    loaded = Intents().load(words, seed=0)
    with pytest.raises(
        UserError, match=r"calibration\.labels=golden is none of gold, none, wrong, did you mean 'gold'"
    ):
        loaded.traces(10, "golden", 0)
    with pytest.raises(UserError, match=r"calibration\.n=0"):
        loaded.traces(0, "gold", 0)


def test_a_tokenizer_without_the_colours_still_serves():
    loaded = Intents().load(tiny.tokenizer(), seed=0)
    assert [len(ids) for ids in loaded.label_ids] == [len(label) + 1 for label in loaded.labels]
    assert loaded.max_new_tokens == max(map(len, loaded.label_ids)) + 1


def test_a_tokenizer_that_marks_the_start_of_strings(marking):
    loaded = Intents().load(marking, seed=0)
    text = marking.decode(loaded.context.ids)
    assert text.startswith("Classify the query by its intent.\nQuery: ")
    document = loaded.documents[0]
    whole = marking.encode(text + document.query + f" {document.expected}\n", add_special_tokens=False)
    answer = loaded.answer_ids[loaded.labels.index(document.expected)]
    assert [*loaded.context.ids, *document.query_ids, *answer] == whole
    assert [*document.expected_ids, loaded.end_id] == list(answer)


def test_sizes_with_the_embedded_tokenizer(embedded):
    for seed in range(4):
        loaded = Intents().load(embedded, seed=seed)
        within = [len(loaded.context.header)]
        for chunk in loaded.context.chunks:
            within.append(within[-1] + len(chunk))
        assert loaded.context.header[0] == embedded.convert_tokens_to_ids("<|endoftext|>")
        assert 232 <= len(loaded.context.chunks) <= 242
        assert 57 <= sum(length <= 1024 for length in within[1:]) <= 61
        assert 160 <= len(texts(loaded.trace_source.context)) <= 210
        assert 4400 <= sum(len(trace.query_ids) for trace in loaded.traces(300, "none", seed)) <= 4800
        assert all(len(ids) == 1 for ids in loaded.label_ids)
    single = [embedded.encode(f" {colour}", add_special_tokens=False) for colour in COLOURS]
    assert all(len(ids) == 1 for ids in single) and len({ids[0] for ids in single}) == 16
