"""Tasks of questions: each has a context of its own (or shares one with some) and is answered freely."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from kvexp.cache.kv_cache import KVCache
from kvexp.crew.crew import ALONE, Crew
from kvexp.errors import UserError
from kvexp.evaluation.known import known_answers
from kvexp.evaluation.labels import context_of, facts_of
from kvexp.evaluation.length import warn_of_questions
from kvexp.evaluation.shares import score_batches
from kvexp.measure.answered import Answered
from kvexp.measure.latency import LatencyFile, Steps
from kvexp.measure.timing import Stopwatch
from kvexp.measure.usage import added, cache_usage, total_usage
from kvexp.prompt import Context
from kvexp.report.folder import RunFolder
from kvexp.schema import Settings
from kvexp.tasks.adapter import KVLM, cut
from kvexp.tasks.batch import QueryBatch, greedy
from kvexp.tasks.fidelity import compared
from kvexp.tasks.questions import Question, QuestionSet
from kvexp.tasks.sampling import Sampler
from kvexp.tasks.scores import fidelity_summary, question_metrics
from kvexp.tasks.session import Session

CONTEXT_TOKENS = 32_768  # of the contexts that one batch encodes together


@dataclass(frozen=True)
class Asked:
    """One answer that is wanted: sample `number` of a question."""

    question: Question
    number: int
    id: str


def answer(
    settings: Settings,
    loaded: Any,
    task: QuestionSet,
    memory: Any,
    folder: RunFolder,
    watch: Stopwatch,
    crew: Crew = ALONE,
) -> Answered:
    """Ask every question that is not answered on disk yet, a batch at a time."""
    if settings.fidelity and not all(question.answer_ids for question in task.questions):
        raise UserError(
            "fidelity=true compares along known answers, and this task has none: leave it out, or take"
            " task=continuation"
        )
    if settings.calibration.empty_prefix and task.context is not None:
        bare = context_of(settings, task)
        task = replace(task, questions=[replace(one, context=bare) for one in task.questions])
    session = Session(loaded, settings.method, memory, settings.budget, watch)
    warn_of_questions(session, settings.task, task.questions)
    run = Run(settings, session, task, watch, folder.latency if crew.first else None)
    apart = settings.method.needs_query
    batches = planned(task.questions, settings.batch_size, settings.sampling.samples, apart)
    order = [asked.id for asked in every(task.questions, settings.sampling.samples)]
    with settings.method.attach(loaded.model, memory):
        score_batches(
            folder,
            crew,
            batches,
            [[asked.id for asked in batch] for batch in batches],
            ["+".join(sorted({run.name(asked) for asked in batch})) for batch in batches],
            order,
            run.ask,
            f"{settings.choices['task']} {settings.choices['method']}",
        )
        others = crew.gather([run.usages, session.counters])[1:]
        crew.done()
        if not run.usages:  # everything was on disk: one batch tells what the method does and holds
            run.ask(batches[0])
    samples = folder.samples()
    fidelity = fidelity_summary(samples, None) if settings.fidelity else None
    metrics = question_metrics(samples, task, settings.sampling.samples)
    usages = [usage for theirs, _ in others for usage in theirs]
    usage = added(total_usage([*usages, *run.usages]), [counters for _, counters in others])
    usage |= facts_of(memory)
    return Answered(metrics, usage, fidelity, session.decoded, task.data_sha256, task.notes)


def every(questions: Sequence[Question], samples: int) -> list[Asked]:
    """Return all answers that are wanted, in the order of the questions."""
    return [
        Asked(question, number, question.id if samples == 1 else f"{question.id}/{number}")
        for question in questions
        for number in range(samples)
    ]


def planned(
    questions: Sequence[Question], batch_size: int, samples: int, apart: bool = False
) -> list[list[Asked]]:
    """Return batches: of one context's questions where it has several, else of several contexts' questions.

    Contexts of a batch are of similar length, so that little is padded. `apart`: a context is encoded for
    each of its questions.
    """
    by_context: defaultdict[str, list[Question]] = defaultdict(list)
    for question in questions:
        by_context[question.id if apart else question.context.key].append(question)
    batches: list[list[Asked]] = []
    alone: list[Question] = []
    for members in by_context.values():
        if len(members) == 1:
            alone += members
            continue
        wanted = every(members, samples)
        batches += [wanted[at : at + batch_size] for at in range(0, len(wanted), batch_size)]
    alone.sort(key=lambda question: len(question.context))
    group: list[Question] = []
    for question in alone:
        room = max(1, min(batch_size // samples, CONTEXT_TOKENS // max(1, len(question.context))))
        if len(group) >= room:
            batches.append(every(group, samples))
            group = []
        group.append(question)
    return batches + ([every(group, samples)] if group else [])


class Run:
    """Asks batches of questions under one method; what single steps took is kept in `latency`, if given."""

    def __init__(
        self,
        settings: Settings,
        session: Session,
        task: QuestionSet,
        watch: Stopwatch,
        latency: LatencyFile | None,
    ) -> None:
        self.settings, self.session, self.task = settings, session, task
        self.watch, self.latency = watch, latency
        self.adapter = KVLM(session, settings.batch_size)
        self.stopped = self.adapter.stopper(task.stop)
        self.usages: list[dict[str, Any]] = []
        self._latest: KVCache | None = None
        self.known = known_answers(settings, session.loaded)

    def name(self, asked: Asked) -> str:
        """Return the name of what is encoded for an answer: its context, or for its question alone."""
        question = asked.question
        return question.id if self.settings.method.needs_query else question.context.key

    def encode(
        self, batch: Sequence[Asked]
    ) -> tuple[Context | list[Context], list[int], list[Sequence[int]] | None]:
        """Encode the contexts of a batch; return them, which of them each answer stands on, and for what."""
        apart = self.settings.method.needs_query
        names = [self.name(one) for one in batch]
        first = {name: one.question for name, one in zip(names, batch, strict=True)}
        contexts = [question.context for question in first.values()]
        places = {name: place for place, name in enumerate(first)}
        on = contexts[0] if len(contexts) == 1 else contexts
        asked: list[Sequence[int]] | None = [one.query_ids for one in first.values()] if apart else None
        cache = self.session.context(on, asked)
        if not self.usages or self._latest is not cache:
            self._latest = cache
            self.usages.append({})
        self._use(contexts)
        return on, [places[name] for name in names], asked

    def _use(self, contexts: Sequence[Context]) -> None:
        """Note what the latest cache and its forks have held so far."""
        longest = max(map(len, contexts))
        nominal = self.settings.budget.rows or longest
        assert self._latest is not None
        self.usages[-1] = cache_usage(self.session.model, self._latest, longest, nominal)

    def ask(self, batch: Sequence[Asked]) -> list[dict[str, Any]]:
        """Return the samples of one batch."""
        on, rows, asked_for = self.encode(batch)
        queries = [asked.question.query_ids for asked in batch]
        asked_on = self.session.run(on, queries, rows, asked_for)
        made, ends = self._generated(asked_on, batch)
        more = self._teacher_forced(asked_on, on, queries, rows, batch)
        self._use([on] if isinstance(on, Context) else on)
        lines = []
        for row, asked in enumerate(batch):
            question = asked.question
            text = cut(self.adapter.tokenizer.decode(made[row], skip_special_tokens=True), self.task.stop)
            lines.append(
                {
                    "id": asked.id,
                    "sample": question.sample,
                    "seed": self.settings.seed,
                    "query": question.query,
                    "answer": text,
                    "expected": list(question.expected),
                    "scores": {**self.task.score(question, text), **more[row]},
                    "prompt_tokens": len(question.context) + len(question.query_ids),
                    "new_tokens": len(made[row]),
                    "stop": ends[row],
                    "group": question.group,
                }
            )
        return lines

    def _generated(self, batch: QueryBatch, asked: Sequence[Asked]) -> tuple[list[list[int]], list[str]]:
        sampling = self.settings.sampling
        choose: Callable[[torch.Tensor], torch.Tensor] = greedy
        if sampling.temperature > 0:
            names = [f"{self.settings.seed}/{one.question.id}/{one.number}" for one in asked]
            choose = Sampler(names, sampling.temperature, sampling.top_p)
        limits = [one.question.max_new_tokens for one in asked]
        steps = Steps(self.watch, batch.cache.counters)
        with self.watch("decode"):
            made, ends = batch.generate(limits, self.stopped, choose, steps)
        if self.latency is not None:
            self.latency.add([one.id for one in asked], steps)
        self.session.decoded += sum(len(ids) - 1 for ids in made)
        return made, ends

    def _teacher_forced(
        self,
        batch: QueryBatch,
        on: Context | list[Context],
        queries: Sequence[Sequence[int]],
        rows: Sequence[int],
        asked: Sequence[Asked],
    ) -> list[dict[str, float]]:
        """Log-probability of the known answers, and their fidelity to full attention where that is wanted."""
        answers = [one.question.answer_ids for one in asked]
        if not all(answers):
            return [{} for _ in asked]
        ours = batch.answer_distributions(answers)
        found = [
            {"logprob": float(q.gather(1, torch.tensor(a, device=q.device)[:, None]).sum())}
            for q, a in zip(ours, answers, strict=True)
        ]
        if self.known is not None:
            full = self.known.distributions(on, queries, rows, answers)
            for scores, q, p in zip(found, ours, full, strict=True):
                scores |= compared(p, q)
        return found
