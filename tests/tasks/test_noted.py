"""Prompts made of notes: exact prefixes, chats, units with the same tokens everywhere, memories on demand."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import ClassVar

import pytest

from kvexp import tiny
from kvexp.cli import main, settings_of
from kvexp.errors import UserError
from kvexp.notes.units import NotesKind, Turn, Unit
from kvexp.prompt import bos_ids
from kvexp.tasks.noted import Filled, Frame, drawn

UNITS = [
    Unit("a", "[8 May] Ann: a red kayak, 12.5 m | tags: boat\n", ("D1",)),
    Unit("b", "(step 7)\nAction: look\nObservation: [{'id': 3}]\n", ("D2",)),
    Unit("c", "7 of them\n", ("D3",)),
]
ASKED = "Question: How long is it?\nAnswer:"


def question(frame, units, gold="12.5 m"):
    return frame.question(
        units, ASKED, gold, id="q-1", sample=4, expected=("12.5 m",), max_new_tokens=9, group="g | h"
    )


@pytest.mark.parametrize("name", ["words", "marking", "bytes"])
@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0), (1,), ()])
def test_a_prompt_is_what_the_tokenizer_makes_of_its_text(request, name, order):
    tokenizer = tiny.tokenizer() if name == "bytes" else request.getfixturevalue(name)
    units = [UNITS[place] for place in order]
    made = question(Frame(tokenizer, "These are notes."), units)
    text = f"These are notes.\n{''.join(unit.text for unit in units)}{ASKED} 12.5 m"
    whole = bos_ids(tokenizer) + tuple(tokenizer.encode(text, add_special_tokens=False))
    assert made.context.ids + made.query_ids + made.answer_ids == whole
    header = tokenizer.encode("These are notes.\n", add_special_tokens=False)
    assert made.context.header == bos_ids(tokenizer) + tuple(header)
    assert len(made.context.chunks) == len(units) and made.query == ASKED


def test_a_unit_is_the_same_tokens_wherever_it_stands(words):
    frame = Frame(words, "Notes.")
    one, other = frame.context(UNITS).chunks, frame.context(UNITS[::-1]).chunks
    assert one == other[::-1] and all(a is b for a, b in zip(one, other[::-1], strict=True))
    assert Frame(words, "Other words.").context(UNITS[:1]).chunks == one[:1]


def test_what_is_asked_is_passed_on():
    made = question(Frame(tiny.tokenizer(), "Notes."), UNITS)
    assert (made.id, made.sample, made.group, made.max_new_tokens) == ("q-1", 4, "g | h", 9)
    assert made.expected == ("12.5 m",)
    assert question(Frame(tiny.tokenizer(), "Notes."), UNITS, gold="").answer_ids == ()


def test_a_chat():
    tokenizer = tiny.tokenizer()
    with pytest.raises(UserError, match=r"no chat template: set task\.prompt=plain"):
        question(Frame(tokenizer, "Notes.", "chat"), UNITS)
    tokenizer.chat_template = (
        "<|begin|><u>{{ messages[0].content | trim }}</u><a>{% if enable_thinking %}<think>{% endif %}"
    )
    made = question(Frame(tokenizer, "Notes.", "chat"), UNITS[:1])
    assert tokenizer.decode(made.context.header) == "<|begin|><u>Notes.\n"
    assert made.context.header.count(bos_ids(tokenizer)[0]) == 1
    assert tokenizer.decode(made.query_ids) == made.query == f"{ASKED}</u><a>"  # and nothing to think in
    assert tokenizer.decode(made.answer_ids) == "12.5 m"
    text = f"<u>Notes.\n{UNITS[0].text}{ASKED}</u><a>12.5 m"
    assert tokenizer.decode((made.context.ids + made.query_ids + made.answer_ids)[1:]) == text


def test_draws_keep_the_order():
    every = list("abcdefgh")
    assert drawn(every, None, "x", "task.kind") == drawn(every, 8, "x", "task.kind") == every
    some = [tuple(drawn(every, 3, f"x/{i}", "task.kind")) for i in range(60)]
    assert all(len(one) == 3 and list(one) == sorted(one) for one in some) and len(set(some)) > 20
    assert {letter for one in some for letter in one} == set(every)
    with pytest.raises(UserError, match=r"task\.n=9 is more than there are: set task\.n=8 or less"):
        drawn(every, 9, "x", "task.kind")
    with pytest.raises(UserError, match=r"no question that task\.kind allows"):
        drawn([], None, "x", "task.kind")


def test_a_memory_is_filled_once_and_only_when_it_is_asked():
    log = []

    @dataclass(frozen=True)
    class Kind(NotesKind):
        id: ClassVar[str] = "kind"

        def open(self, ask=None):
            log.append("open")
            return self

        def add(self, turn):
            log.append(turn.id)

    filled = Filled(Kind(), [Turn("1", "Ann", "Hi."), Turn("2", "Bob", "Oh.")])
    assert log == []
    assert filled.notes is filled.notes and log == ["open", "1", "2"]


def test_help_says_how_memories_are_chosen(capsys):
    assert main(["--help", *WORDS]) == 0
    page = capsys.readouterr().out
    assert re.search(r"^  task\.notes\n +amem +A-MEM: ", page, re.MULTILINE)
    assert re.search(r"^ +task\.notes=amem +the memory: amem, licomemory, rag, none, or ", page, re.MULTILINE)


WORDS = ("method=full", "model=tiny-llama", "task=locomo")


def test_memories_on_the_command_line():
    def notes(written):
        return settings_of([*WORDS, f"task.notes={written}"])[0].task.notes

    assert [notes(name).id for name in ("amem", "licomemory", "rag", "none")] == [
        "amem",
        "licomemory",
        "rag",
        "none",
    ]
    assert notes("{name: rag, tokens: 64}").tokens == 64 and notes("rag").tokens == 128
    cells = {settings_of([*WORDS, f"task.notes={one}"])[0].cell for one in ("rag", "{name: rag, tokens: 64}")}
    assert len(cells) == 2
    (settings,) = settings_of([*WORDS, "task.notes={name: rag, tokens: 128}"])
    assert settings.cell == settings_of([*WORDS, "task.notes=rag"])[0].cell


@pytest.mark.parametrize(
    ("written", "message"),
    [
        ("notes=amem", r"notes is part of a task: write task\.notes=amem, with a task that has it"),
        ("notes=ame", r"write task\.notes=ame, "),
        ("+notes=rag", r"write task\.notes=rag, "),
        ("notes.tokens=64", r'write "task\.notes=\{name: NAME, tokens: 64\}"'),
        ("task.notes.tokens=64", r'cannot be set alone: write "task\.notes=\{name: NAME, tokens: 64\}"'),
        ("task.notes=ame", r"there is no task\.notes 'ame', did you mean 'amem'\? Choices: amem, licomemory"),
        ("task.notes={tokens: 64}", r"task\.notes is the name of a choice of notes, or \{name: NAME, knob"),
        ("task.notes={name: rag, token: 64}", "there is no 'notes.token', did you mean 'tokens'?"),
        ("task.notes=null", r"task\.notes is the name of a choice of notes"),
    ],
)
def test_memories_that_cannot_be(written, message):
    with pytest.raises(UserError, match=message):
        settings_of([*WORDS, written])
