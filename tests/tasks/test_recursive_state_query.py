"""recursive_state_query: the simulator against a recursive search, graphs, prompts, reading of answers."""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from dataclasses import replace

import pytest

from kvexp import tiny
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.tasks.dfs_answers import read_state
from kvexp.tasks.dfs_graphs import State, draw_graph, simulate
from kvexp.tasks.recursive_state_query import RecursiveStateQuery, parse_steps

# 0 - 1 - 3, 0 - 2, 2 - 4, and 1 - 2: the search goes 0 1 2 4 (2) (1) 3 (1) (0)
EDGES = ((0, 1), (0, 2), (1, 2), (1, 3), (2, 4))
STATES = [
    State(0, (0,), (0,)),
    State(1, (0, 1), (0, 1)),
    State(2, (0, 1, 2), (0, 1, 2)),
    State(4, (0, 1, 2, 4), (0, 1, 2, 4)),
    State(2, (0, 1, 2), (0, 1, 2, 4)),
    State(1, (0, 1), (0, 1, 2, 4)),
    State(3, (0, 1, 3), (0, 1, 2, 3, 4)),
    State(1, (0, 1), (0, 1, 2, 3, 4)),
    State(0, (0,), (0, 1, 2, 3, 4)),
    State(None, (), (0, 1, 2, 3, 4)),
]


@pytest.mark.parametrize("steps", range(len(STATES)))
def test_a_search_by_hand(steps):
    assert simulate(EDGES, 0, steps) == STATES[steps]


def test_edges_may_come_in_any_order_and_the_start_may_be_alone():
    turned = [(b, a) for a, b in reversed(EDGES)]
    assert [simulate(turned, 0, steps) for steps in range(10)] == STATES
    assert simulate(EDGES, 4, 2) == State(0, (4, 2, 0), (0, 2, 4))
    assert simulate([], 7, 0) == State(7, (7,), (7,)) and simulate([], 7, 1) == State(None, (), (7,))
    with pytest.raises(ValueError, match="ends after 9 steps, before step 10"):
        simulate(EDGES, 0, 10)


def events(edges, nodes):
    """The states of a search, from a recursion that knows nothing of stacks or single steps."""
    adjacent = [[b for b in range(nodes) if (a, b) in edges or (b, a) in edges] for a in range(nodes)]
    order, states = [], []

    def record(path):
        states.append(State(path[-1] if path else None, tuple(path), tuple(sorted(order))))

    def visit(path):
        order.append(path[-1])
        record(path)
        for neighbour in adjacent[path[-1]]:
            if neighbour not in order:
                visit([*path, neighbour])
        record(path[:-1])

    visit([0])
    return states


@pytest.mark.parametrize("kind", ["tree", "sparse"])
def test_random_searches_equal_the_recursion(kind):
    rng = random.Random(kind)
    for _ in range(40):
        nodes = rng.randint(6, 20)
        edges = draw_graph(kind, nodes, rng)
        states = events(edges, nodes)
        assert len(states) == 2 * nodes
        assert [simulate(edges, 0, steps) for steps in range(2 * nodes)] == states


@pytest.mark.parametrize(("kind", "edges_of"), [("tree", lambda n: n - 1), ("sparse", lambda n: 2 * n)])
def test_graphs(kind, edges_of):
    for nodes in (6, 15, 30):
        edges = draw_graph(kind, nodes, random.Random(nodes))
        assert edges == draw_graph(kind, nodes, random.Random(nodes))  # networkx has no stream of its own
        assert edges != draw_graph(kind, nodes, random.Random(nodes + 1))
        assert len(edges) == len(set(edges)) == edges_of(nodes)
        assert all(0 <= a < b < nodes for a, b in edges) and list(edges) == sorted(edges)
        assert len(simulate(edges, 0, 2 * nodes - 1).visited) == nodes  # connected


def graph_of(text):
    nodes = [int(n) for n in re.search(r"Nodes: (.*)", text)[1].split(", ")]
    edges = [tuple(map(int, e.split("-"))) for e in re.search(r"Edges: (.*)", text)[1].split(", ")]
    return nodes, edges, int(re.search(r"after step (\d+)\?", text)[1])


def text_of(question, tokenizer):
    return tokenizer.decode(question.context.ids + question.query_ids)


def test_a_prompt_holds_what_its_answer_follows_from(words):
    loaded = RecursiveStateQuery().load(words, seed=0)
    assert loaded.metrics == ("stack_exact_match", "node", "visited", "stack_f1")
    assert Counter(q.group for q in loaded.questions) == {f"{k} steps": 10 for k in range(6, 21, 2)}
    for question in loaded.questions:
        text = text_of(question, words)
        assert text.startswith("<s>") and text.endswith("\n\nSimulation:") and len(question.query_ids) == 1
        assert 'Answer: {"current_node": 0, "stack": [0], "visited": [0]}' in text
        nodes, edges, steps = graph_of(text)
        assert nodes == list(range(len(nodes))) and 10 <= len(nodes) <= 30
        assert question.group == f"{steps} steps" and question.max_new_tokens == 32768
        state = simulate(edges, 0, steps)
        assert json.loads(question.expected[0]) == {
            "current_node": state.node,
            "stack": list(state.stack),
            "visited": list(state.visited),
        }
        assert state.node is not None
        perfect = dict.fromkeys(loaded.metrics, 1.0)
        assert loaded.score(question, f"...\nAnswer: {question.expected[0]}") == perfect


def test_a_chat_prompt(words):
    tokenizer = tiny.tokenizer()
    with pytest.raises(UserError, match=r"no chat template: set task\.prompt=plain"):
        RecursiveStateQuery(prompt="chat").load(tokenizer, seed=0)
    tokenizer.chat_template = "<u>{{ messages[0].content }}</u>"
    question = RecursiveStateQuery(prompt="chat").load(tokenizer, seed=0, limit=1).questions[0]
    text = text_of(question, tokenizer)
    plain = text_of(RecursiveStateQuery().load(tokenizer, seed=0, limit=1).questions[0], tokenizer)
    assert text == f"<u>{plain.removeprefix('<|begin|>').removesuffix(chr(10) * 2 + 'Simulation:')}</u>"


def test_draws(words):
    def drawn(seed=0, split="test", limit=None, **knobs):
        loaded = RecursiveStateQuery(steps="6:10:2", **knobs).load(words, seed=seed, split=split, limit=limit)
        return loaded, [(q.id, text_of(q, words)) for q in loaded.questions]

    loaded, rows = drawn(n_per_step=4)
    assert drawn(n_per_step=4)[1] == rows and drawn(n_per_step=4)[0].data_sha256 == loaded.data_sha256
    assert drawn(n_per_step=6)[1][:12] == drawn(n_per_step=6, limit=12)[1] == rows
    assert drawn(seed=1, n_per_step=4)[1] != rows
    assert [q.group for q in loaded.questions[:4]] == ["6 steps", "8 steps", "10 steps", "6 steps"]
    held_out = drawn(split="validation", n_per_step=40, nodes_min=6, nodes_max=7, graphs="tree")[1]
    tests = drawn(n_per_step=40, nodes_min=6, nodes_max=7, graphs="tree")[1]
    edges = [{str(graph_of(text)[1]) for _, text in side} for side in (held_out, tests)]
    assert all(edges) and not edges[0] & edges[1]


def test_kinds_and_sizes(words):
    loaded = RecursiveStateQuery().load(words, seed=0)
    found = Counter(
        "tree" if len(edges) == len(nodes) - 1 else "sparse"
        for nodes, edges, _ in (graph_of(text_of(q, words)) for q in loaded.questions)
    )
    assert loaded.notes == {"graphs": dict(sorted(found.items()))} and min(found.values()) > 20
    only = RecursiveStateQuery(graphs="sparse", steps=(20,), nodes_max=11).load(words, seed=0)
    sizes = {
        (len(nodes), len(edges)) for nodes, edges, _ in (graph_of(text_of(q, words)) for q in only.questions)
    }
    assert sizes == {(11, 22)}  # with ten nodes the search could end at step 19


def test_scores(words):
    loaded = RecursiveStateQuery(steps=(6,)).load(words, seed=0, limit=1)
    question = replace(
        loaded.questions[0],
        expected=('{"current_node": 4, "stack": [0, 1, 2, 4], "visited": [0, 1, 2, 4]}',),
    )

    def scores(text):
        return tuple(loaded.score(question, text)[metric] for metric in loaded.metrics)

    def answer(node, stack, visited):
        return f"Answer: {json.dumps({'current_node': node, 'stack': stack, 'visited': visited})}"

    assert scores(answer(4, [0, 1, 2, 4], [4, 2, 1, 0])) == (1, 1, 1, 1)
    assert scores(answer("4", ["0", "1", "2", "4"], [0, 1, 2])) == (1, 1, 0, 1)
    assert scores(answer(4, [4, 2, 1, 0], [0, 1, 2, 4])) == (0, 1, 1, 1)
    assert scores(answer(2, [0, 1], [])) == (0, 0, 0, pytest.approx(2 * 2 / 6))
    assert scores(answer(True, [0, 0, 0, 0], [0, 1, 2, 4, 5])) == (0, 0, 0, pytest.approx(2 * 1 / 8))
    assert scores(answer(None, [], None)) == (0, 0, 0, 0)
    assert scores(answer(4, 4, "0, 1")) == (0, 1, 0, 0)
    assert scores(answer(4, [0, [1], 2, 4], [0, 1, 2, 4])) == (0, 1, 1, 0)
    assert scores('Answer: {"current_node": 4}') == (0, 1, 0, 0)
    for unreadable in ("", "Answer: node 4", '{"current_node": 4, "stack": [0, 1, 2, 4]}', "Answer: [0, 1]"):
        assert scores(unreadable) == (0, 0, 0, 0)


WANTED = {"current_node": 3, "stack": [0, 3]}


@pytest.mark.parametrize(
    "text",
    [
        'Answer: {"current_node": 3, "stack": [0, 3]}',
        '**Answer:**\n```json\n{\n  "current_node": 3,\n  "stack": [0, 3]\n}\n```\nI hope that helps {}.',
        '**Answer**: {"current_node": 1} wait\nAnswer: {"current_node": 3, "stack": [0, 3]}',
        'final answer: \\boxed{{"current\\_node": 3, "stack": [0, 3]}}',
        "ANSWER: {'current_node': 3, 'stack': [0, 3,],}",
        'Answer: {"current_node": 3, "stack": [0, 3]} of {0, 3} and {"n": 1}',
    ],
)
def test_reading(text):
    assert read_state(text) == WANTED


def test_reading_what_python_writes():
    assert read_state("Answer: {'current_node': None, 'stack': []}") == {"current_node": None, "stack": []}
    assert read_state("The answerer: {'stack': [1]}") is None


@pytest.mark.parametrize(
    ("steps", "numbers"),
    [
        ("6:20:2", (6, 8, 10, 12, 14, 16, 18, 20)),
        ("6:9:2", (6, 8)),
        ("3:5", (3, 4, 5)),
        ("7", (7,)),
        ((9, 1, 9), (9, 1)),
    ],
)
def test_numbers_of_steps(steps, numbers):
    assert parse_steps(steps) == numbers


@pytest.mark.parametrize(
    "steps", ["", "a", "6:", "6:4", "0:4", "1:9:0", "9:1:-1", "1:2:3:4", (), (0,), "1.5"]
)
def test_no_numbers_of_steps(steps):
    with pytest.raises(UserError, match=r"write task\.steps=6:20:2 .* or task\.steps=\[6,8\]"):
        RecursiveStateQuery(steps=steps)


def test_knobs_that_cannot_be():
    with pytest.raises(UserError, match=r"task\.nodes_max=10 is too small: set task\.nodes_max=11 or more"):
        RecursiveStateQuery(nodes_max=10)
    with pytest.raises(UserError, match=r"task\.nodes_min=5 is too small"):
        RecursiveStateQuery(nodes_min=5)
    with pytest.raises(UserError, match=r"task\.nodes_max=12 is too small: set task\.nodes_max=14 or more"):
        RecursiveStateQuery(nodes_min=14, nodes_max=12)


@pytest.mark.parametrize(
    ("written", "numbers"), [("6:10:2", (6, 8, 10)), ("[6,9]", (6, 9)), ("12", (12,)), ("'4:5'", (4, 5))]
)
def test_steps_on_the_command_line(written, numbers):
    task = settings_of(["method=full", "task=recursive_state_query", f"task.steps={written}"])[0].task
    assert parse_steps(task.steps) == numbers
