"""locomo: the published format, prompts, draws, and a whole run that reuses units."""

from __future__ import annotations

import os
from collections import Counter
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvexp import tiny
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.notes.rag import Rag
from kvexp.notes.units import NotesKind, Unit, as_unit
from kvexp.notes.whole import Whole
from kvexp.run import run
from kvexp.tasks.locomo import INSTRUCTION, Locomo
from kvexp.tasks.locomo_data import load_conversations
from kvexp.tasks.locomo_scores import NOT_MENTIONED

DATA = os.environ.get("KVEXP_DATA_DIR")


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


def turn(name: str, speaker: str, text: str, **more):
    return {"dia_id": name, "speaker": speaker, "text": text, **more}


def record(name: str = "conv-1", **more):
    photo = {"img_url": ["u"], "blip_caption": "a grey cat", "query": "cat", "re-download": True}
    return {
        "sample_id": name,
        "conversation": {
            "speaker_a": "Ann",
            "speaker_b": "Bob",
            "session_1_date_time": "1:56 pm on 8 May, 2023",
            "session_1": [
                turn("D1:1", "Ann", "I bought a red kayak."),
                turn("D1:2", "Bob", "My cat  Milo\nsleeps.", **photo),
            ],
            "session_10_date_time": "9:05 am on 1 July, 2023",
            "session_10": [turn("D10:1", "Bob", "Rain again.")],
            "session_2_date_time": "some day",
            "session_2": [turn("D2:1", "Ann", "I sold the kayak to Carl.")],
            "session_3_date_time": "12:00 am on 2 July, 2023",
        },
        "qa": [
            {"question": "Who is Milo?", "answer": "Bob's cat", "evidence": ["D1:2"], "category": 4},
            {"question": "When was it sold?", "answer": 2023, "evidence": ["D2:1; D10:1"], "category": 2},
            {"question": "What did Ann do?", "answer": "bought, sold", "evidence": [], "category": 1},
            {"question": "Is Ann sad?", "answer": "No; she sold it", "evidence": ["D:2:01"], "category": 3},
            {"question": "Who is Rex?", "adversarial_answer": "a dog", "evidence": ["D9:9"], "category": 5},
        ],
        "event_summary": {},
        "observation": {},
        "session_summary": {},
        **more,
    }


NOTES = """\
[1:56 pm on 8 May, 2023] Ann: I bought a red kayak.
[1:56 pm on 8 May, 2023] Bob: My cat Milo sleeps. [shares a grey cat]
[some day] Ann: I sold the kayak to Carl.
[9:05 am on 1 July, 2023] Bob: Rain again.
"""


def test_the_published_format(folder):
    (one,) = load_conversations(folder("locomo", "test", [record()]))
    assert (one.id, one.speakers) == ("conv-1", ("Ann", "Bob"))
    assert [(t.id, t.session) for t in one.turns] == [
        ("D1:1", "1"),
        ("D1:2", "1"),
        ("D2:1", "2"),
        ("D10:1", "10"),
    ]
    days = [t.day for t in one.turns]
    assert days[0] == days[1] and days[2] is None
    assert days[3] - days[0] == pytest.approx(54 - (13 * 60 + 56 - 9 * 60 - 5) / 1440)
    assert [q.answer for q in one.asked] == ["Bob's cat", "2023", "bought, sold", "No; she sold it", "a dog"]
    assert [q.category for q in one.asked] == [4, 2, 1, 3, 5]
    evidence = [set(q.evidence) for q in one.asked]
    assert evidence == [{"D1:2"}, {"D2:1", "D10:1"}, set(), {"D2:1"}, {"D9:9"}]


def test_prompts_by_hand(folder):
    tokenizer = tiny.tokenizer()
    data = folder("locomo", "test", [record()])
    loaded = Locomo(notes=Whole()).load(tokenizer, seed=0, data_dir=data)
    assert loaded.metrics == ("f1", "f1_set") and loaded.stop == ("\n",)
    before = f"<|begin|>{INSTRUCTION}\n{NOTES}"
    assert all(tokenizer.decode(question.context.ids) == before for question in loaded.questions)
    assert [question.query for question in loaded.questions[:4]] == [
        "Question: Who is Milo?\nAnswer:",
        "Question: When was it sold? Give an approximate date, worked out from the dates in the notes."
        "\nAnswer:",
        "Question: What did Ann do?\nAnswer:",
        "Question: Is Ann sad?\nAnswer:",
    ]
    assert [tokenizer.decode(question.answer_ids) for question in loaded.questions[:4]] == [
        " Bob's cat",
        " 2023",
        " bought, sold",
        " No",
    ]
    assert [question.group for question in loaded.questions] == [
        "single-hop | categories 1-4",
        "temporal | categories 1-4",
        "multi-hop | categories 1-4",
        "open-domain | categories 1-4",
        "adversarial",
    ]
    assert {question.max_new_tokens for question in loaded.questions} == {32}
    assert [question.id for question in loaded.questions] == [f"conv-1-{i}" for i in range(5)]
    perfect = {"f1": 1.0, "f1_set": 1.0}
    assert all(loaded.score(question, question.expected[0]) == perfect for question in loaded.questions)


def test_the_choices_of_category_5_stand_in_both_orders(folder):
    tokenizer = tiny.tokenizer()
    data = folder("locomo", "test", [record()])
    found = set()
    for seed in range(8):
        (question,) = (
            Locomo(notes=Whole(), categories=(5,)).load(tokenizer, seed=seed, data_dir=data).questions
        )
        found.add((question.query, tokenizer.decode(question.answer_ids), question.expected))
    start = "Question: Who is Rex? Choose the right answer:\n"
    assert found == {
        (f"{start}(a) {NOT_MENTIONED}\n(b) a dog\nAnswer:", f" (a) {NOT_MENTIONED}", (NOT_MENTIONED,)),
        (f"{start}(a) a dog\n(b) {NOT_MENTIONED}\nAnswer:", f" (b) {NOT_MENTIONED}", (NOT_MENTIONED,)),
    }


@dataclass(frozen=True)
class Ordered(NotesKind):
    """A memory that returns its units in an order which the question says."""

    id: ClassVar[str] = "ordered"

    def open(self, ask=None):
        units: list[Unit] = []

        class Notes:
            def add(self, turn):
                units.append(Unit(turn.id, as_unit(turn.text), (turn.id,)))

            def retrieve(self, query, k):
                return (units[::-1] if query.startswith("W") else units)[:k]

        return Notes()


def test_units_stand_in_the_order_found_and_have_the_same_tokens_everywhere(folder):
    tokenizer = tiny.tokenizer()
    loaded = Locomo(notes=Ordered(), k=2, categories=(3, 4)).load(
        tokenizer, seed=0, data_dir=folder("locomo", "test", [record()])
    )
    who, sad = (question.context for question in loaded.questions)
    assert [tokenizer.decode(chunk) for chunk in who.chunks] == [
        "Rain again.\n",
        "I sold the kayak to Carl.\n",
    ]
    first = ["I bought a red kayak.\n", "My cat Milo sleeps. [shares a grey cat]\n"]
    assert [tokenizer.decode(chunk) for chunk in sad.chunks] == first
    assert who.header == sad.header and loaded.notes["memory"] == "ordered"


def test_draws(folder):
    tokenizer = tiny.tokenizer()
    data = folder("locomo", "test", [record(f"conv-{i}") for i in range(4)])

    def ids(seed=0, limit=None, **knobs):
        loaded = Locomo(notes=Whole(), **knobs).load(tokenizer, seed=seed, limit=limit, data_dir=data)
        assert [question.sample for question in loaded.questions] == list(range(len(loaded.questions)))
        return [question.id for question in loaded.questions]

    every = ids()
    assert len(every) == 20 and every[5:7] == ["conv-1-0", "conv-1-1"]
    some = ids(n=7)
    assert len(some) == 7 and some == sorted(some) and set(some) < set(every) and some == ids(n=7)
    assert some != ids(n=7, seed=1) and ids(n=7, limit=3) == some[:3] and ids(limit=3) == every[:3]
    assert ids(categories=(1, 5)) == [f"conv-{i}-{j}" for i in range(4) for j in (2, 4)]
    with pytest.raises(UserError, match=r"task\.n=21 is more than there are"):
        ids(n=21)


def test_what_cannot_be(folder):
    tokenizer, data = tiny.tokenizer(), folder("locomo", "test", [record()])
    for knobs, message in (
        ({"categories": ()}, r"task\.categories is a list of numbers from 1 to 5"),
        ({"categories": (0,)}, r"task\.categories is a list of numbers from 1 to 5"),
        ({"k": 0}, r"task\.k=0 is too small"),
        ({"n": 0}, r"task\.n=0 is too small"),
    ):
        with pytest.raises(UserError, match=message):
            Locomo(**knobs)
    with pytest.raises(UserError, match="task=locomo has no split=validation: leave split out"):
        Locomo().load(tokenizer, seed=0, split="validation", data_dir=data)
    with pytest.raises(UserError, match=r"has no locomo/test\.jsonl\.gz: set data_dir=PATH"):
        Locomo().load(tokenizer, seed=0, data_dir=f"{data}/locomo")
    with pytest.raises(UserError, match=r"no chat template: set task\.prompt=plain"):
        Locomo(prompt="chat").load(tokenizer, seed=0, data_dir=data)
    folder("locomo", "test", [record(qa=[{"question": "?", "answer": "!", "category": 5}])])
    with pytest.raises(UserError, match=r"no question that task\.categories allows"):
        Locomo(categories=(1,)).load(tokenizer, seed=0, data_dir=data)
    for broken in (record(qa=[{"question": "?"}]), record(qa=[{"question": "?", "category": 6}]), {}):
        folder("locomo", "test", [broken])
        with pytest.raises(UserError, match="a record that is no conversation of LoCoMo"):
            Locomo().load(tokenizer, seed=0, data_dir=data)


def test_the_data_has_a_hash(folder):
    tokenizer, data = tiny.tokenizer(), folder("locomo", "test", [record()])
    first = Locomo(notes=Whole()).load(tokenizer, seed=0, data_dir=data).data_sha256
    assert Locomo().data_sha256(data) == first and Locomo().data_sha256(None) is None
    changed = record()
    changed["conversation"]["session_10"][0]["text"] = "Sun again."
    assert Locomo().data_sha256(folder("locomo", "test", [changed])) != first
    assert Locomo().data_sha256(f"{data}/locomo") is None


@pytest.mark.parametrize("notes", ["amem", "licomemory", "{name: rag, tokens: 16}"])
def test_a_run_encodes_each_unit_once(folder, tmp_path, notes):
    data = folder("locomo", "test", [record("conv-1"), record("conv-2")])
    words = f"task=locomo task.k=2 task.max_new_tokens=3 model=tiny-llama method=reposition data_dir={data}"
    (settings,) = settings_of(
        [*words.split(), f"task.notes={notes}", "batch_size=1", "logger=none", f"output_dir={tmp_path}/out"]
    )
    done = run(settings)
    questions = settings.load_task(tiny.tokenizer()).questions
    contexts = {question.context.key: question.context for question in questions}.values()
    units = Counter(chunk for context in contexts for chunk in context.chunks)
    assert len({len(context.chunks) for context in contexts}) == 1 and max(units.values()) > 1
    cache = done["cache"]
    assert cache["store_misses"] == len(units)  # each unit once; headers are not counted
    assert cache["store_hits"] == sum(units.values()) - len(units)
    assert cache["reused"] == 3 * sum(n * len(unit) for unit, n in units.items())  # in each of three layers
    metrics = done["metrics"]
    assert metrics["f1"]["n"] == 10 and metrics["f1 [categories 1-4]"]["n"] == 8
    assert {metrics[f"f1_set [{name}]"]["n"] for name in ("multi-hop", "temporal", "adversarial")} == {2}
    assert done["provenance"]["data_sha256"] == Locomo().data_sha256(data)
    assert done["provenance"]["task"]["memory"] in ("amem", "licomemory", "rag", "none")


@pytest.mark.skipif(DATA is None, reason="KVEXP_DATA_DIR is not set")
def test_the_real_conversations():
    conversations = load_conversations(DATA)
    kinds = Counter(q.category for one in conversations for q in one.asked)
    assert len(conversations) == 7 and sum(kinds.values()) == 1393
    assert kinds == {1: 198, 2: 218, 3: 63, 4: 601, 5: 313}
    known = [{t.id for t in one.turns} for one in conversations]
    evidence = [(q.evidence, ids) for one, ids in zip(conversations, known, strict=True) for q in one.asked]
    assert sum(bool(wanted) and wanted <= ids for wanted, ids in evidence) > 1380
    assert all(t.day and "\n" not in t.text for one in conversations for t in one.turns)
    loaded = Locomo(notes=Rag()).load(tiny.tokenizer(), seed=0, limit=60, data_dir=DATA)
    neighbours = Counter(chunk for question in loaded.questions for chunk in question.context.chunks)
    assert sum(n > 1 for n in neighbours.values()) > 20  # units that several questions share
    assert len({question.context.key for question in loaded.questions}) > 50
    assert all(question.answer_ids for question in loaded.questions)
