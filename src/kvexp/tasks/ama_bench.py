"""ama_bench: open questions about what an agent did, answered from the notes that its memory returns.

AMA-Bench: Evaluating Long-Horizon Memory for Agentic Applications (Zhao et al., 2026, arXiv 2602.22769):
token F1 by capability (recall, causal inference, state updating, state abstraction) and domain, over
questions, and a language model that judges answers, which is optional here. The types of the data are taken
for the paper's capabilities in order.

Departures: prompts are in our own words; each question is asked alone; long steps are parted; the judge sees
question, reference and answer alone. Of the six domains, `openworld_qa` is only in the set itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.notes.amem import AMem
from kvexp.notes.endpoint import configured
from kvexp.notes.units import Ask, NotesKind
from kvexp.tasks.ama_data import Asked, Episode, load_episodes
from kvexp.tasks.ama_scores import Scorer
from kvexp.tasks.base import Task, at_least
from kvexp.tasks.labels import rows_sha256
from kvexp.tasks.noted import Filled, Form, Frame, drawn
from kvexp.tasks.questions import Question, QuestionSet

INSTRUCTION = (
    "These are notes of what an agent was to do, did and saw, each with the number of its step. Answer the"
    " question after them from the notes, briefly and exactly."
)

Domain = Literal["game", "embodied_ai", "text2sql", "web", "software", "openworld_qa"]
_JUDGE_TOKENS = 2048  # of a judge's answer, which may think first


@dataclass(frozen=True)
class AmaBench(Task):
    """The knobs of ama_bench.

    `notes`: the memory: its name, or {name: NAME, knob: value}; `k`: units that it returns.
    `step_tokens`: tokens of a turn, about, at most: longer steps are parted, and each part is taken in.
    `domains`: only the questions of these (null: all).
    `n`: questions, drawn from all with the seed, in published order (null: all).
    `judge`: the model at the endpoint that judges answers (null: none).
    `prompt`: "plain" or "chat" (the user's turn of the model's chat template).
    `max_new_tokens`: length of an answer.
    """

    id: ClassVar[str] = "ama_bench"
    kind: ClassVar[str] = "questions"
    splits: ClassVar[tuple[str, ...]] = ("test",)
    shared_context: ClassVar[bool] = False
    known_answers: ClassVar[bool] = True
    units: ClassVar[bool] = True

    notes: NotesKind = field(default_factory=AMem)
    k: int = 10
    step_tokens: int = 128
    domains: tuple[Domain, ...] | None = None
    n: int | None = None
    judge: str | None = None
    prompt: Form = "plain"
    max_new_tokens: int = 256

    def __post_init__(self) -> None:
        for knob in ("k", "n", "max_new_tokens"):
            at_least(f"task.{knob}", getattr(self, knob), 1)
        at_least("task.step_tokens", self.step_tokens, 16)
        if self.domains is not None and not self.domains:
            raise UserError(
                "task.domains=[] allows no question: set task.domains=[game,web], or null for all of them"
            )
        self._judge()  # an endpoint that is not there is told before anything loads

    @property
    def has_units(self) -> bool:
        """Whether a context holds more than one note."""
        return self.k > 1

    def load(
        self,
        tokenizer: Any,
        *,
        seed: int,
        split: str = "test",
        limit: int | None = None,
        data_dir: str | None = None,
    ) -> QuestionSet:
        """Return the questions in published order.

        Raises:
            UserError: there is no such split, the data cannot be read or has no such questions, fewer than
                are wanted, a judge without an endpoint, or a chat of a tokenizer without a template.
        """
        self.check_asked(split, limit)
        score = Scorer(self._judge())
        episodes = load_episodes(data_dir)
        chosen = self._chosen(episodes, seed)[:limit]
        frame = Frame(tokenizer, INSTRUCTION, self.prompt)
        filled: dict[str, Filled] = {}  # of one episode at a time: its questions stand together
        questions = []
        for sample, (episode, asked) in enumerate(chosen):
            if episode.id not in filled:
                filled = {episode.id: Filled(self.notes, episode.turns(self.step_tokens))}
            questions.append(self._question(frame, filled[episode.id], episode, asked, sample))
        return QuestionSet(
            questions=questions,
            score=score,
            metrics=score.metrics,
            data_sha256=_sha256(episodes),
            stop=("\nQuestion:",),
            notes={
                "memory": self.notes.id,
                "domains": dict(sorted(Counter(episode.domain for episode, _ in chosen).items())),
            },
        )

    def data_sha256(self, data_dir: str | None) -> str | None:
        """See `Task.data_sha256`; nothing is fetched."""
        try:
            return None if data_dir is None else _sha256(load_episodes(data_dir))
        except UserError:  # the files are gone: nothing to compare with
            return None

    def _judge(self) -> Ask | None:
        if self.judge is None:
            return None
        return replace(configured(self.judge, "task.judge"), max_tokens=_JUDGE_TOKENS)

    def _chosen(self, episodes: Sequence[Episode], seed: int) -> list[tuple[Episode, Asked]]:
        every = [
            (one, asked)
            for one in episodes
            if self.domains is None or one.domain in self.domains
            for asked in one.asked
        ]
        return drawn(every, self.n, f"{self.id}/{seed}", "task.domains")

    def _question(
        self, frame: Frame, filled: Filled, episode: Episode, asked: Asked, sample: int
    ) -> Question:
        return frame.question(
            filled.notes.retrieve(asked.question, self.k),
            f"Question: {asked.question}\nAnswer:",
            asked.answer,
            id=asked.id,
            sample=sample,
            expected=(asked.answer,),
            max_new_tokens=self.max_new_tokens,
            group=f"{asked.capability} | {episode.domain}",
        )


def _sha256(episodes: Sequence[Episode]) -> str:
    return rows_sha256(
        [
            row
            for one in episodes
            for row in (
                [one.id, one.task, one.domain],
                *([step.number, step.action, step.observation] for step in one.steps),
                *([asked.id, asked.question, asked.answer, asked.capability] for asked in one.asked),
            )
        ]
    )
