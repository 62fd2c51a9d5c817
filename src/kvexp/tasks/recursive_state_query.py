"""recursive_state_query: where a depth-first search stands after so many steps, to be simulated step by step.

The benchmark of "TriAttention: Efficient Long Reasoning with Trigonometric KV Compression": an undirected
connected graph, a search from node 0 that takes the smallest unvisited neighbour, and the question for the
current node, the stack and the visited nodes after k steps. The paper decodes greedily in the model's chat
template (`prompt=chat`) and reports the exact match of the stack against k, ten graphs for each.

Departures: the prompt is in our own words; graphs are drawn anew (both random streams from the seed) with
enough nodes for the search to be still on its way after k steps; an answer that cannot be read scores zero,
where the published evaluation leaves it out.
"""

from __future__ import annotations

import hashlib
import json
import random
from collections import Counter
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, NamedTuple

from kvexp.errors import UserError
from kvexp.tasks.base import SPLITS, Task, at_least
from kvexp.tasks.dfs_answers import score_state
from kvexp.tasks.dfs_graphs import MIN_NODES, Edges, Kind, State, draw_graph, simulate
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.questions import Question, QuestionSet
from kvexp.tasks.whole_prompt import cut_last, prompt_ids

METRICS = ("stack_exact_match", "node", "visited", "stack_f1")

_PROMPT = """\
A depth-first search walks over an undirected graph.
Nodes: {nodes}
Edges: {edges}

The search keeps the current node, the set of visited nodes, and a stack: the path from the start to the \
current node, which is its last element.
At step 0 the search stands at node 0: the current node is 0, the stack is [0], and the visited nodes are [0].
Every later step does exactly one of two things:
- Visit: if the current node has neighbours that are not visited yet, the smallest of them becomes the \
current node. It is marked as visited and put on the stack.
- Go back: otherwise the current node is taken from the stack, and the node that is then last on the stack \
becomes the current node.
Each visit counts as one step, and so does going back by one node.

What is the state after step {steps}? Simulate every step, one after the other, and write down the current \
node, the stack and the visited nodes after each. Then end with the word "Answer:" and one JSON object with \
the keys "current_node" (a number), "stack" (a list from the start to the current node) and "visited" (a \
list in increasing order). The state at step 0, for example, is written as
Answer: {example}"""


class _Draw(NamedTuple):
    id: str
    steps: int
    kind: Kind
    nodes: int
    edges: Edges
    state: State


@dataclass(frozen=True)
class RecursiveStateQuery(Task):
    """The generated task and its knobs.

    `steps`: the numbers of steps asked for, as "first:last:stride" (last included) or as a list.
    `n_per_step`: graphs for each number of steps.
    `nodes_min`, `nodes_max`: nodes of a graph; more than `nodes_min` where k steps need more.
    `graphs`: "tree", "sparse" (small-world, four neighbours), or "mixed" (either, drawn for each graph).
    `prompt`: "plain" (text to go on with) or "chat" (the user's turn of the model's chat template).
    `max_new_tokens`: length of an answer.
    """

    id: ClassVar[str] = "recursive_state_query"
    kind: ClassVar[str] = "questions"
    shared_context: ClassVar[bool] = False

    steps: str | tuple[int, ...] = "6:20:2"
    n_per_step: int = 10
    nodes_min: int = 10
    nodes_max: int = 30
    graphs: Literal["mixed", "tree", "sparse"] = "mixed"
    prompt: Literal["plain", "chat"] = "plain"
    max_new_tokens: int = 32768

    def __post_init__(self) -> None:
        at_least("task.n_per_step", self.n_per_step, 1)
        at_least("task.nodes_min", self.nodes_min, MIN_NODES)
        at_least("task.nodes_max", self.nodes_max, self.nodes_min)
        at_least("task.max_new_tokens", self.max_new_tokens, 1)
        most = max(parse_steps(self.steps))
        at_least("task.nodes_max", self.nodes_max, _nodes_for(most))

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions of a seed and split: rounds of one question for each number of steps.

        No graph is in both splits. Raises UserError for a chat with a tokenizer that has no chat template.
        """
        self.check_asked(split, limit)
        drawn = [
            self._draw(steps, number, seed, split)
            for number in range(self.n_per_step)
            for steps in parse_steps(self.steps)
        ]
        return QuestionSet(
            questions=[self._question(tokenizer, sample, draw) for sample, draw in enumerate(drawn[:limit])],
            score=score_state,
            metrics=METRICS,
            data_sha256=rows_sha256([(str(draw.steps), str(draw.nodes), str(draw.edges)) for draw in drawn]),
            notes={"graphs": dict(sorted(Counter(draw.kind for draw in drawn).items()))},
        )

    def _draw(self, steps: int, number: int, seed: int, split: str) -> _Draw:
        rng = random.Random(f"{self.id}/{seed}/{split}/{steps}/{number}")
        fewest = max(self.nodes_min, _nodes_for(steps))
        kinds: tuple[Kind, ...] = ("tree", "sparse") if self.graphs == "mixed" else (self.graphs,)
        while True:
            kind, nodes = rng.choice(kinds), rng.randint(fewest, self.nodes_max)
            edges = draw_graph(kind, nodes, rng)
            if _split_of(edges) == split:
                break
        return _Draw(f"{split}-{steps}-{number}", steps, kind, nodes, edges, simulate(edges, 0, steps))

    def _question(self, tokenizer: Any, sample: int, draw: _Draw) -> Question:
        chat = self.prompt == "chat"
        text = prompt_text(draw.nodes, draw.edges, draw.steps)
        ids = prompt_ids(tokenizer, text if chat else f"{text}\n\nSimulation:", chat=chat)
        context, query, query_ids = cut_last(tokenizer, ids)
        return Question(
            id=draw.id,
            sample=sample,
            context=context,
            query=query,
            query_ids=query_ids,
            expected=(as_json(draw.state),),
            max_new_tokens=self.max_new_tokens,
            group=f"{draw.steps} steps",
        )


def parse_steps(steps: str | tuple[int, ...]) -> tuple[int, ...]:
    """Return the numbers of steps that the knob `steps` names; a UserError where it names none."""
    if not isinstance(steps, str):
        numbers = tuple(steps)
    else:
        first, *rest = steps.split(":")
        try:
            last, stride = (int(rest[0]) if rest else int(first)), (int(rest[1]) if rest[1:] else 1)
            numbers = tuple(range(int(first), last + 1, stride)) if len(rest) < 3 and stride > 0 else ()
        except ValueError:
            numbers = ()
    if not numbers or min(numbers) < 1:
        raise UserError(
            f"task.steps={steps} names no numbers of steps from 1 on: write task.steps=6:20:2 "
            "(first:last:stride) or task.steps=[6,8]"
        )
    return tuple(dict.fromkeys(numbers))


def prompt_text(nodes: int, edges: Edges, steps: int) -> str:
    """Return the question for the state after `steps` steps on a graph of the nodes 0 to `nodes` - 1."""
    return _PROMPT.format(
        nodes=", ".join(map(str, range(nodes))),
        edges=", ".join(f"{a}-{b}" for a, b in edges),
        steps=steps,
        example=as_json(State(0, (0,), (0,))),
    )


def as_json(state: State) -> str:
    """Return a state as the JSON object that an answer has to give."""
    return json.dumps(
        {"current_node": state.node, "stack": list(state.stack), "visited": list(state.visited)}
    )


def _nodes_for(steps: int) -> int:
    """Fewest nodes of a graph on which no search has left the start after `steps` of its 2n - 1 steps."""
    return (steps + 1) // 2 + 1


def _split_of(edges: Edges) -> str:
    """The split that may hold a graph: half of all graphs each, so that the splits share none."""
    return SPLITS[hashlib.sha256(str(edges).encode()).digest()[0] % 2]
