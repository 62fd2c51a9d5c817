"""passkey: where the facts lie, what is asked, and how an answer is scored."""

from __future__ import annotations

import random
import re

import pytest

from kvexp import tiny
from kvexp.errors import UserError
from kvexp.prompt import Context, bos_ids
from kvexp.tasks.passkey import Passkey, score
from kvexp.tasks.passkey_text import NAMES, WORDS, Piece, build, draw, take
from kvexp.tasks.questions import Question
from kvexp.tasks.texts import Text

FACT = re.compile(r"The secret word of (\w+) is (\w+)\.")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


@pytest.fixture(scope="session")
def walk(tmp_path_factory) -> str:
    """Three texts of short sentences; a sentence tells its text and number."""
    folder = tmp_path_factory.mktemp("walk")
    for name in ("north", "south", "west"):
        text = "".join(f"On day {i} we went {name}. " for i in range(120))
        (folder / f"{name}.txt").write_text(text, encoding="utf-8")
    return str(folder)


@pytest.fixture(scope="session")
def loaded(words, walk):
    return Passkey(source=walk).load(words, seed=0)


def text_of(tokenizer, question) -> str:
    return tokenizer.decode(question.context.ids[len(bos_ids(tokenizer)) :])


def test_questions_come_context_by_context_and_share_it(loaded):
    assert [question.id for question in loaded.questions[:9]] == [*(f"0-{i}" for i in range(8)), "1-0"]
    assert [question.sample for question in loaded.questions] == list(range(32))
    contexts = [question.context for question in loaded.questions]
    assert all(contexts[i] is contexts[i - i % 8] for i in range(32)) and len({c.key for c in contexts}) == 4
    assert loaded.metrics == ("accuracy",) and loaded.stop == ("\n",)


def test_the_facts_of_a_context_are_those_asked_for_in_order(loaded, words):
    for at in range(0, 32, 8):
        asked = loaded.questions[at : at + 8]
        found = FACT.findall(text_of(words, asked[0]))
        assert [word for _, word in found] == [question.expected[0] for question in asked]
        assert [f"The secret word of {name} is" for name, _ in found] == [q.query for q in asked]
        assert len({name for name, _ in found}) == len({word for _, word in found}) == 8
        assert {name for name, _ in found} <= set(NAMES) and {word for _, word in found} <= set(WORDS)


def test_facts_lie_at_their_depths(loaded, words):
    depths = [100 * 0.35 * (i + 0.5) / 8 for i in range(8)]
    assert [question.group for question in loaded.questions[:8]] == [f"depth {round(d)}%" for d in depths]
    assert [round(depth) for depth in depths] == [2, 7, 11, 15, 20, 24, 28, 33]
    for place, question in enumerate(loaded.questions):
        text = text_of(words, question)
        before = words.encode(text[: text.index(question.query)], add_special_tokens=False)
        assert abs(1 + len(before) - depths[place % 8] / 100 * 2048) < 20  # a sentence has 17 tokens


def test_contexts_have_the_length_asked_for(words, walk):
    for tokens in (700, 1001, 2048):
        for question in (
            Passkey(source=walk, context_tokens=tokens, n=2, n_facts=2).load(words, seed=1).questions
        ):
            assert tokens - 8 < len(question.context) <= tokens
            assert question.context.header == bos_ids(words)


@pytest.mark.parametrize("tokenizer", ["words", "marking", "bytes"])
def test_the_context_is_an_exact_prefix_of_the_prompt(request, tokenizer, walk):
    tokenizer = tiny.tokenizer() if tokenizer == "bytes" else request.getfixturevalue(tokenizer)
    header = len(bos_ids(tokenizer))
    for question in Passkey(source=walk, n=2, n_facts=4).load(tokenizer, seed=2).questions:
        text = text_of(tokenizer, question)
        assert text.endswith("\n") and FACT.search(text)
        answer = f" {question.expected[0]}"
        whole = tokenizer.encode(text + question.query + answer, add_special_tokens=False)
        assert [*question.context.ids[header:], *question.query_ids, *question.answer_ids] == whole
        assert question.max_new_tokens == len(question.answer_ids) + 2


def test_most_words_are_one_token_of_a_real_tokenizer(embedded):
    one = [word for word in WORDS if len(embedded.encode(f" {word}", add_special_tokens=False)) == 1]
    assert len(one) >= len(WORDS) - 2


def test_words_of_one_token_come_first(words):
    facts = draw(words, 4, 0.5, [], random.Random(0))
    single = {word for word in WORDS if len(words.encode(f" {word}", add_special_tokens=False)) == 1}
    assert len(single) >= 4 and {fact.word for fact in facts} <= single  # colours of the label tasks


def test_words_that_the_text_has_come_last(words):
    tokenizer = tiny.tokenizer()  # no word is one token
    pieces = [Piece(f"{word.title()}! ", 1) for word in WORDS[:-3]]
    assert {fact.word for fact in draw(tokenizer, 3, 0.5, pieces, random.Random(0))} == set(WORDS[-3:])


def test_lists_have_no_word_twice():
    assert len(set(NAMES)) == len(NAMES) == 32 and len(set(WORDS)) == len(WORDS) >= 64
    assert not any(a != b and a.startswith(b) for a in WORDS for b in WORDS)


def test_pieces_join_to_texts_that_start_within_the_first(words):
    texts = [Text("a", "One. Two. Three."), Text("b", "Four! Five.")]
    for seed in range(20):
        pieces = take(words, texts, 200, random.Random(seed))
        joined = "".join(piece.text for piece in pieces)
        endless = {
            first: (first + second) * 20
            for first, second in (
                ("One. Two. Three.\n\n", "Four! Five.\n\n"),
                ("Four! Five.\n\n", "One. Two. Three.\n\n"),
            )
        }
        assert any(joined in text for text in endless.values())
        total = len(words.encode(joined, add_special_tokens=False))
        assert sum(piece.tokens for piece in pieces) == total and 200 <= total < 210
    starts = {take(words, texts, 5, random.Random(seed))[0].text.strip() for seed in range(50)}
    assert starts == {"One.", "Two.", "Three.", "Four!", "Five."}


def test_long_sentences_are_parted(words):
    line = " ".join(["step"] * 30)
    (text,) = [Text("a", f"{line}\n{line}\n{' '.join(['walk'] * 90)}")]
    pieces = [piece.text for piece in take(words, [text], 10**4, random.Random(0))]
    assert max(len(piece.split()) for piece in pieces) == 40
    assert f"{line}\n" in pieces and "".join(pieces).count(f"{line}\n{line}\n") > 2


def test_a_fact_goes_to_the_nearest_border():
    tokenizer = tiny.tokenizer()
    (fact,) = draw(tokenizer, 1, 0.5, [], random.Random(0))  # at a quarter of the text
    pieces = [Piece(f"{'x' * 38}. ", 40) for _ in range(10)]
    for tokens, border in ((220, 1), (241, 1), (243, 1), (246, 2), (398, 2)):  # BOS is a token
        text = build(tokenizer, pieces, [fact], tokens)
        assert text.index(fact.sentence) == 40 * border, tokens
        assert len(text) <= tokens - 1


def test_a_seed_is_reproducible_and_splits_differ(words, walk, loaded):
    task = Passkey(source=walk)
    assert task.load(words, seed=0).questions == loaded.questions
    assert task.load(words, seed=0, limit=11).questions == loaded.questions[:11]
    assert Passkey(source=walk, n=1).load(words, seed=0).questions == loaded.questions[:8]
    keys = {question.context.key for question in loaded.questions}
    for other in (task.load(words, seed=1), task.load(words, seed=0, split="validation")):
        assert not keys & {question.context.key for question in other.questions}
        assert other.data_sha256 == loaded.data_sha256


def test_stdlib_surrounds_the_facts_by_default(words, monkeypatch):
    monkeypatch.setattr("kvexp.tasks.passkey.load_texts", lambda source, data_dir: [Text("a", f"{source} ")])
    loaded = Passkey(n=1, n_facts=1, context_tokens=512).load(words, seed=0)
    assert set(FACT.sub("", text_of(words, loaded.questions[0])).split()) == {"stdlib"}
    assert loaded.notes == {"source": "stdlib"}


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        (" tiger.", 1.0),
        ("tiger", 1.0),
        (' "Tiger", he said', 1.0),
        (" tigers", 0.0),
        (" a tiger", 0.0),
        (" tig", 0.0),
        ("", 0.0),
        ("\n", 0.0),
    ],
)
def test_answers_scored_by_hand(answer, right):
    question = Question("0", 0, Context((), ()), "?", (0,), ("tiger",), 3)
    assert score(question, answer) == {"accuracy": right}


@pytest.mark.parametrize(
    ("knobs", "message"),
    [
        ({"context_tokens": 10}, r"task\.context_tokens=10 is too small"),
        ({"n_facts": 0}, r"task\.n_facts=0 is too small"),
        ({"n_facts": 33}, r"set task\.n_facts=32 or less"),
        ({"n": 0}, r"task\.n=0 is too small"),
        ({"region": 0.0}, r"task\.region=0\.0 is no share of the context"),
        ({"region": 1.1}, r"task\.region=1\.1 is no share of the context"),
    ],
)
def test_knobs_that_cannot_be(knobs, message):
    with pytest.raises(UserError, match=message):
        Passkey(**knobs)


def test_too_many_facts_are_told(words, walk):
    with pytest.raises(UserError, match=r"task\.context_tokens=100 has no room for 32 facts"):
        Passkey(source=walk, context_tokens=100, n_facts=32, region=1.0).load(words, seed=0)
    with pytest.raises(UserError, match="split=train is none of test, validation"):
        Passkey(source=walk).load(words, seed=0, split="train")
