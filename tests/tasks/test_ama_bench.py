"""ama_bench: prompts and parted steps by hand, groups, the judge, and a run that reuses units."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from http.server import BaseHTTPRequestHandler, HTTPServer

import pytest

from kvexp import tiny
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.notes.chunks import length
from kvexp.notes.rag import Rag
from kvexp.notes.whole import Whole
from kvexp.run import run
from kvexp.tasks.ama_bench import INSTRUCTION, AmaBench
from kvexp.tasks.ama_data import Episode, Step, load_episodes
from kvexp.tasks.ama_scores import Scorer, f1

DATA = os.environ.get("KVEXP_DATA_DIR")


@pytest.fixture(autouse=True)
def nothing_set(monkeypatch):
    for name in ("KVEXP_DATA_DIR", "KVEXP_LLM_URL", "KVEXP_LLM_KEY"):
        monkeypatch.delenv(name, raising=False)


def episode(number: int = 3, domain: str = "Embodied AI", types: str = "ABCD"):
    steps = [
        ("look", "A room with a red lamp."),
        ("go north", "A garden.\n\nIt rains. "),
        ("take key", "Done."),
    ]
    return {
        "episode_id": number,
        "task_type": "alfworld",
        "task": "Find the key.",
        "domain": domain,
        "num_turns": 3,
        "total_tokens": 0,
        "state": "success",
        "trajectory": [
            {"turn_idx": i, "action": action, "observation": seen} for i, (action, seen) in enumerate(steps)
        ],
        "qa_pairs": [
            {"question": f"What of step {i}?", "answer": f"Thing {i}.", "type": kind, "sub_type": ""}
            for i, kind in enumerate(types)
        ],
    }


NOTES = """\
[task] Task: Find the key.
[step 0] Action: look
Observation: A room with a red lamp.
[step 1] Action: go north
Observation: A garden.
It rains.
[step 2] Action: take key
Observation: Done.
"""


def test_prompts_by_hand(folder):
    tokenizer = tiny.tokenizer()
    data = folder("ama_bench", "test", [episode(), episode(4, "Gaming", "BB")])
    loaded = AmaBench(notes=Whole()).load(tokenizer, seed=0, data_dir=data)
    assert loaded.metrics == ("f1",) and loaded.stop == ("\nQuestion:",)
    assert {tokenizer.decode(q.context.ids) for q in loaded.questions} == {f"<|begin|>{INSTRUCTION}\n{NOTES}"}
    first = loaded.questions[0]
    assert first.query == "Question: What of step 0?\nAnswer:" and first.expected == ("Thing 0.",)
    assert tokenizer.decode(first.answer_ids) == " Thing 0." and first.max_new_tokens == 256
    assert [question.id for question in loaded.questions] == ["3-0", "3-1", "3-2", "3-3", "4-0", "4-1"]
    assert [question.group for question in loaded.questions] == [
        "recall | embodied_ai",
        "causal inference | embodied_ai",
        "state updating | embodied_ai",
        "state abstraction | embodied_ai",
        "causal inference | game",
        "causal inference | game",
    ]
    assert loaded.notes == {"memory": "none", "domains": {"embodied_ai": 4, "game": 2}}
    assert loaded.score(first, "Answer: thing, 0") == {"f1": 1.0}


@pytest.mark.parametrize(
    ("written", "name"),
    [
        *(("Game", "game"), ("Gaming", "game"), ("EMBODIED_AI", "embodied_ai"), ("TEXT2SQL", "text2sql")),
        *(
            ("Text 2 SQL", "text2sql"),
            ("WEB", "web"),
            ("Web Task Execution", "web"),
            ("SOFTWARE", "software"),
        ),
        *(("Software Engineering", "software"), ("OPENWORLD_QA", "openworld_qa"), ("Other", "other")),
    ],
)
def test_domains_of_the_hub_and_of_the_site(folder, written, name):
    (one,) = load_episodes(folder("ama_bench", "test", [episode(domain=written)]))
    assert one.domain == name


def test_draws(folder):
    tokenizer = tiny.tokenizer()
    data = folder("ama_bench", "test", [episode(0), episode(1, "WEB"), episode(2, "Game")])

    def ids(seed=0, limit=None, **knobs):
        loaded = AmaBench(notes=Rag(), **knobs).load(tokenizer, seed=seed, limit=limit, data_dir=data)
        return [question.id for question in loaded.questions]

    assert len(ids()) == 12 and ids(limit=2) == ["0-0", "0-1"]
    assert ids(domains=("web", "game")) == [f"{i}-{j}" for i in (1, 2) for j in range(4)]
    some = ids(n=5)
    assert len(some) == 5 and some == sorted(some) == ids(n=5) and some != ids(n=5, seed=1)
    with pytest.raises(UserError, match=r"no question that task\.domains allows"):
        ids(domains=("software",))
    with pytest.raises(UserError, match=r"task\.n=13 is more than there are"):
        ids(n=13)


def test_long_steps_are_parted():
    lines = "\n".join(f"row {i} of the table" for i in range(30))
    steps = (Step("7", "query", lines), Step("8", "", "word " * 100 + "\nend"), Step("9", "x" * 900, ""))
    turns = Episode("e", "Count.", "web", steps, ()).turns(32)
    assert turns[0].line == "[task] Task: Count."
    assert max(length(turn.said) for turn in turns) <= 32
    for number, step in zip("789", steps, strict=True):
        parts = [turn for turn in turns if turn.id.split(".")[0] == number]
        assert [part.id for part in parts] == [f"{number}.{i}" for i in range(len(parts))]
        assert [part.time for part in parts] == [f"step {number}"] + [f"step {number}, continued"] * (
            len(parts) - 1
        )
        whole = f"Action: {step.action}\nObservation: {step.observation}"
        joined = "".join("".join(part.text.split()) for part in parts)
        assert joined == "".join(whole.split()) and len(parts) > 3
    table = [turn.text for turn in turns if turn.id.startswith("7.")]
    assert "\n".join(text.strip() for text in table) == f"Action: query\nObservation: {lines}"
    assert turns[-1].text and "end" in next(t.text for t in reversed(turns) if t.id.startswith("8."))


def test_what_cannot_be(folder):
    tokenizer, data = tiny.tokenizer(), folder("ama_bench", "test", [episode()])
    with pytest.raises(UserError, match=r"task\.step_tokens=15 is too small"):
        AmaBench(step_tokens=15)
    with pytest.raises(
        UserError, match=r"task\.domains=\[games\] is not possible: .* one of game, embodied_ai"
    ):
        settings_of(["method=full", "task=ama_bench", "task.domains=[games]"])
    with pytest.raises(UserError, match="task=ama_bench has no split=validation"):
        AmaBench().load(tokenizer, seed=0, split="validation", data_dir=data)
    with pytest.raises(UserError, match=r"has no ama_bench/test\.jsonl\.gz: set data_dir=PATH"):
        AmaBench().load(tokenizer, seed=0, data_dir=f"{data}/ama_bench")
    with pytest.raises(UserError, match=r"task\.judge=gpt needs an endpoint, and KVEXP_LLM_URL is not set"):
        AmaBench(judge="gpt")
    with pytest.raises(UserError, match=r"task\.judge=gpt needs an endpoint"):  # before a model is there
        settings_of(["method=full", "task=ama_bench", "task.judge=gpt"])
    with pytest.raises(UserError, match=r"task\.domains=\[\] allows no question"):
        settings_of(["method=full", "task=ama_bench", "task.domains=[]"])
    folder("ama_bench", "test", [episode(types="AX")])
    with pytest.raises(UserError, match="a record that is no episode of AMA-Bench"):
        AmaBench().load(tokenizer, seed=0, data_dir=data)
    assert AmaBench().data_sha256(data) is None


@pytest.fixture
def judge(monkeypatch, tmp_path):
    """An endpoint that finds an answer right where it says "north"; what it was asked."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self):
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            asked.append((self.path, body))
            right = "Answer to judge: north" in body["messages"][0]["content"]
            answer = {"choices": [{"message": {"content": "Yes." if right else "no"}}]}
            self.send_response(200)
            self.end_headers()
            self.wfile.write(json.dumps(answer).encode())

        def log_message(self, *_):
            pass

    server = HTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    monkeypatch.setenv("KVEXP_LLM_URL", f"http://127.0.0.1:{server.server_port}/v1")
    monkeypatch.setenv("KVEXP_CACHE", str(tmp_path / "cache"))
    yield asked
    server.shutdown()
    server.server_close()
    thread.join()


def test_a_judge_behind_an_endpoint(folder, judge):
    data = folder("ama_bench", "test", [episode()])
    loaded = AmaBench(notes=Whole(), judge="gpt").load(tiny.tokenizer(), seed=0, data_dir=data)
    question = loaded.questions[0]
    assert loaded.metrics == ("f1", "judge")
    for _ in range(2):  # the second time from what is kept
        assert loaded.score(question, "Answer: north, thing 0") == {"f1": pytest.approx(4 / 5), "judge": 1.0}
    assert loaded.score(question, "south") == {"f1": 0.0, "judge": 0.0}
    assert [path for path, _ in judge] == ["/v1/chat/completions"] * 2
    body = judge[0][1]
    assert (body["model"], body["temperature"], body["max_tokens"]) == ("gpt", 0, 2048)
    assert "Question: What of step 0?\nReference answer: Thing 0.\n" in body["messages"][0]["content"]
    chat = Scorer(judge=lambda prompt: "yes" if "Question: What of step 0?\nRef" in prompt else "no")
    assert chat(question, "x")["judge"] == 1


def test_a_run_encodes_each_unit_once(folder, tmp_path):
    data = folder("ama_bench", "test", [episode(0), episode(1, "WEB")])
    words = f"task=ama_bench task.k=2 task.max_new_tokens=3 model=tiny-llama data_dir={data} logger=none"
    reuse = "method=agentkvshift method.recompute=0.2 batch_size=1"
    (settings,) = settings_of([*words.split(), *reuse.split(), f"output_dir={tmp_path}/out"])
    done = run(settings)
    contexts = {q.context.key: q.context for q in settings.load_task(tiny.tokenizer()).questions}.values()
    units = Counter(chunk for context in contexts for chunk in context.chunks)
    assert max(units.values()) > 1  # both episodes have the same steps, and questions share some
    cache = done["cache"]
    assert cache["store_misses"] == len(units)
    assert cache["store_hits"] == sum(units.values()) - len(units)
    assert cache["unit_tokens"] == sum(n * len(unit) for unit, n in units.items())
    assert 0 < cache["reused"] < 3 * cache["unit_tokens"] and cache["recomputed"] > 0
    metrics = done["metrics"]
    assert {metrics[f"f1 [{name}]"]["n"] for name in ("recall", "state updating", "state abstraction")} == {2}
    assert metrics["f1"]["n"] == 8 and metrics["f1 [web]"]["n"] == metrics["f1 [embodied_ai]"]["n"] == 4
    assert done["provenance"]["data_sha256"] == AmaBench().data_sha256(data)


@pytest.mark.skipif(DATA is None, reason="KVEXP_DATA_DIR is not set")
def test_the_real_episodes():
    episodes = load_episodes(DATA)
    assert len(episodes) == 178 and sum(len(one.asked) for one in episodes) == 2136
    domains = Counter(one.domain for one in episodes)
    assert domains == {"text2sql": 51, "software": 36, "web": 31, "embodied_ai": 30, "game": 30}
    kinds = Counter(asked.capability for one in episodes for asked in one.asked)
    assert kinds == {
        "recall": 741,
        "state updating": 540,
        "causal inference": 501,
        "state abstraction": 354,
    }
    assert {f1(asked.answer, asked.answer) for one in episodes[:40] for asked in one.asked} == {1.0}
    loaded = AmaBench(notes=Rag()).load(tiny.tokenizer(), seed=0, limit=24, data_dir=DATA)
    units = Counter(chunk for question in loaded.questions for chunk in question.context.chunks)
    assert sum(n > 1 for n in units.values()) > 5 and all(
        question.answer_ids for question in loaded.questions
    )
