"""nba: the published format, prompts that share the rulebook, its two scores, and problems of our own."""

from __future__ import annotations

import gzip
import json
import os
import re
from itertools import islice

import pytest

from kvexp.errors import UserError
from kvexp.prompt import encode
from kvexp.tasks import nba_made
from kvexp.tasks.nba import ASK, INSTRUCTION, Nba, score
from kvexp.tasks.nba_data import Problem, load_problems
from kvexp.tasks.questions import Question

DATA = os.environ.get("KVEXP_DATA_DIR")
RULES = "# Salaries\n\n(a) No team may pay too much.\n  (b) A player may have 25%.  \n\n(c) Ten.\n"


@pytest.fixture(autouse=True)
def no_data_folder(monkeypatch):
    monkeypatch.delenv("KVEXP_DATA_DIR", raising=False)


def row(number, answer=True, level=0, **more):
    return {
        "id": f"comp_{level}-{number}",
        "level": level,
        "team_situations": [f"Team A has a team salary of ${number},000,000."],
        "player_situations": ["Player A is 20 years old.", "Player B is not."],
        "operations": ["A. Team A signs Player A.", "B. Team A signs Player B."],
        "answer": answer,
        **({"illegal_operation": "B", "problematic_team": "A"} if answer else {}),
        **more,
    }


@pytest.fixture
def league(folder, tmp_path):
    rows = [row(n, level=level, answer=n % 2 == 0) for level in (0, 1, 2) for n in range(4)]
    rows[1]["illegal_operation"] = "C"  # of a problem without a violation: means nothing
    data = folder("nba", "test", rows)
    (tmp_path / "nba" / "reference_rules.txt.gz").write_bytes(gzip.compress(RULES.encode()))
    return data


def asked(expected: str) -> Question:
    return Question("x", 0, None, "", (1,), (expected,), 8)


VIOLATION = "Answer: True. Illegal Operation: B. Problematic Team: A"
GOLDEN = [  # answer, expected, (accuracy, accuracy_last)
    ("Answer: False.", "Answer: False", (1, 1)),
    ("Answer: False", "Answer: False", (1, 1)),
    (f"The cap is exceeded.\n**{VIOLATION}.**", VIOLATION, (1, 1)),
    ("Answer: **True**. Illegal Operation: **B**. Problematic Team: **A**.", VIOLATION, (1, 1)),
    ("Answer: True. Illegal Operation: A. Problematic Team: A.", VIOLATION, (0, 0)),
    ("Answer: True. Illegal Operation: B. Problematic Team: B.", VIOLATION, (0, 0)),
    ("answer: false.", "Answer: False", (0, 0)),  # the published score has regard to case
    (f'Were it so, "{VIOLATION}." But no: Answer: False.', VIOLATION, (1, 0)),  # in the midst of an argument
    (f"First Answer: False. On second thought {VIOLATION}.", VIOLATION, (1, 1)),
    ("Answer: True. Illegal Operation: BC. Problematic Team: A.", VIOLATION, (0, 0)),
    ("True", VIOLATION, (0, 0)),
    ("", "Answer: False", (0, 0)),
]


@pytest.mark.parametrize(("answer", "expected", "right"), GOLDEN)
def test_scores(answer, expected, right):
    found = score(asked(expected), answer)
    assert (found["accuracy"], found["accuracy_last"]) == right


def test_all_problems_stand_behind_one_rulebook(words, league):
    loaded = Nba().load(words, seed=0, data_dir=league)
    assert loaded == Nba().load(words, seed=1, data_dir=league)
    assert len(loaded.questions) == 12 and {q.context.key for q in loaded.questions} == {loaded.context.key}
    assert len(loaded.context.chunks) == 4  # lines of the rulebook that are not empty
    text = words.decode(loaded.context.ids)
    assert text.endswith(
        f"{INSTRUCTION}\n" + "\n".join(line.strip() for line in RULES.split("\n") if line.strip()) + "\n"
    )
    for question in loaded.questions:
        whole = encode(words, text.removeprefix("<s>") + question.query)
        assert tuple(whole) == (*loaded.context.ids[1:], *question.query_ids)
        assert question.query.endswith(f"B. Team A signs Player B.\n{ASK}")
        gold = words.decode(question.answer_ids)
        assert gold == f" {question.expected[0]}." and score(question, gold)["accuracy_last"] == 1
    golds = sorted(q.expected[0] for q in loaded.questions)
    assert golds == ["Answer: False"] * 6 + [VIOLATION] * 6
    assert {q.group for q in loaded.questions[:6]} == {
        "level 0",
        "level 1",
        "level 2",
    }  # the first few are of all
    assert loaded.questions[:3] == Nba().load(words, seed=0, limit=3, data_dir=league).questions
    only = Nba(levels=(2,)).load(words, seed=0, data_dir=league)
    assert [q.id.startswith("comp_2") for q in only.questions] == [True] * 4 and only.questions[0].group == ""
    assert loaded.data_sha256 == Nba().data_sha256(league) == only.data_sha256


def test_the_published_files(words, tmp_path, monkeypatch):
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    (tmp_path / "annotated_problems").mkdir()
    for level in (0, 1, 2):
        rows = [{k: v for k, v in row(n).items() if k not in ("id", "level")} for n in range(2)]
        (tmp_path / "annotated_problems" / f"comp_{level}.json").write_text(json.dumps(rows))
    (tmp_path / "reference_rules.txt").write_text(RULES)
    loaded = Nba(source=tmp_path.as_uri()).load(words, seed=0)
    assert sorted(q.id for q in loaded.questions) == [
        f"comp_{level}-{n}" for level in (0, 1, 2) for n in (0, 1)
    ]


def test_traces_and_validation_are_made_and_apart(words, league):
    test = Nba().load(words, seed=0, data_dir=league)
    held = Nba(n=30).load(words, seed=0, split="validation", data_dir=league)
    assert len(held.questions) == 30 and not {q.query for q in held.questions} & {
        q.query for q in test.questions
    }
    gold, bare = test.traces(40, "gold", 0), test.traces(40, "none", 0)
    assert [t.query_ids for t in gold] == [t.query_ids for t in bare] and all(
        t.answer_ids == () for t in bare
    )
    assert gold[:10] == test.traces(10, "gold", 0) != test.traces(10, "gold", 1)
    assert len({t.query_ids for t in gold}) == 40
    assert not {t.query_ids for t in gold} & {q.query_ids for q in (*held.questions, *test.questions)}
    said = [words.decode(t.answer_ids) for t in gold]
    assert all(
        re.fullmatch(r" Answer: (False|True\. Illegal Operation: A\. Problematic Team: [ABC])\.\n", s)
        for s in said
    )
    assert 10 < sum(s == " Answer: False.\n" for s in said) < 30
    for labels in ("wrong", "model"):
        with pytest.raises(UserError, match=f"calibration.labels={labels} needs a set of labels"):
            test.traces(3, labels, 0)


def test_made_problems_never_state_a_published_one(words, folder, tmp_path):
    first = next(nba_made.made("nba/traces/0"))
    rows = [row(0, team_situations=first.teams, player_situations=first.players, operations=first.operations)]
    data = folder("nba", "test", rows)
    (tmp_path / "nba" / "reference_rules.txt.gz").write_bytes(gzip.compress(RULES.encode()))
    loaded = Nba().load(words, seed=0, data_dir=data)
    assert loaded.questions[0].query_ids not in {t.query_ids for t in loaded.traces(20, "none", 0)}


def test_the_answers_of_made_problems_follow_from_the_rules():
    """Each verdict again, from the words of the problem alone."""
    cap, verdicts = 140_588_000, []
    for problem in islice(nba_made.made("check"), 400):
        [team], [drafted, signed], [deal] = problem.teams, problem.players, problem.operations
        dollars = [
            int(found.replace(",", "")) for found in re.findall(r"\$([\d,]+\d)", f"{team} {signed} {deal}")
        ]
        team_salary, _, salary = dollars
        service = 2024 - int(re.search(r"in (\d{4}) NBA", drafted)[1])
        own = re.search(r"pick of Team (\w)", drafted)[1] == re.search(r"A\. Team (\w)", deal)[1]
        years, percent = int(re.search(r"(\d)-year", deal)[1]), int(re.search(r"(\d+)% increase", deal)[1])
        share = 35 if service >= 10 else 30 if service >= 7 else 25
        legal = salary <= cap * share / 100 and years <= (5 if own else 4) and percent <= (8 if own else 5)
        if not own and team_salary + salary > cap:
            legal = legal and team_salary >= cap and salary <= 0.0912 * cap
        assert problem.operation == ("" if legal else "A"), problem
        assert problem.team == ("" if legal else re.search(r"A\. Team (\w)", deal)[1])
        verdicts.append(legal)
    assert 120 < sum(verdicts) < 280


def test_what_cannot_be_asked_is_one_sentence(words, folder):
    with pytest.raises(UserError, match=r"set task\.levels=\[0,1,2\]"):
        Nba(levels=(3,))
    data = folder("nba", "test", [{"answer": True}])
    with pytest.raises(UserError, match=r"test\.jsonl\.gz has a row that is no problem"):
        Nba().load(words, seed=0, data_dir=data)
    with pytest.raises(UserError, match=r"has no nba/reference_rules\.txt\.gz"):
        Nba().load(words, seed=0, data_dir=folder("nba", "test", [row(0)]))
    assert Problem("x", 0, (), (), ()).target == "Answer: False"


@pytest.mark.skipif(not DATA, reason="KVEXP_DATA_DIR is not set")
def test_real_data():
    problems = load_problems(DATA, "")
    assert len(problems) <= 216 and {one.level for one in problems} == {0, 1, 2}
    [odd] = [one for one in problems if one.id == "comp_1-79"] or [None]
    assert odd is None or odd.target == "Answer: False"  # it names an operation, and no violation
