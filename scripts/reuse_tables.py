"""Methods of reuse beside each other: how far each is from full recompute, on prompts made of notes.

    python scripts/reuse_tables.py PART [PART ...] [prompts=40] [answers=true] [key=value ...]

    prefix     units encoded behind the header, shares 0.05, 0.1, 0.2 and 0.3
    old        units encoded in an earlier prompt, in another order, share 0.1
    alone      units encoded alone, at position 0, share 0.1
    quantised  units behind the header, by kivi and ott in 4 and 2 bits, shares 0.1 and 0.3 (prompts=12)
    ablation   parts of agentkvshift and of agentkvshift_plus, behind the header, share 0.1

Prompts are questions of LoCoMo behind ten notes of about 128 tokens, in turn from all conversations; a note
with evidence is among them. Words such as model=NAME, model.dtype=bfloat16, data_dir=PATH, seed=1 or
task.notes=amem are those of `python -m kvexp`.

Two kinds of tokens are told apart: those of the question, and those of the gold answer, which is
teacher-forced. For both: KL of full recompute to the method in nats, and how often they agree on the most
likely token; then the log-probability of the gold answer. `union` is the share of unit tokens that were
chosen, `computed` that of unit tokens times layers that were run, with the check layer's. "At equal union" a
method refreshes as many tokens of a prompt as agentkvshift of the same share does (agentkvshift_plus: or one
or two less, where several units are of one length). answers=true also decodes answers, and gives their F1.

A line for each prompt and row goes to OUTPUT_DIR/reuse_tables/MODEL/CELL/PART.jsonl. A second call goes on
from there; other words start another folder, and a row with other knobs is measured anew. Tables are printed,
and written beside the lines, as Markdown: means with bootstrap standard errors; ratios of mean KL to that of
the row `beside`, with the central 95 % of their paired bootstrap over prompts and the number of prompts on
which KL was lower; and how the goals of the part were met.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from reuse_prompts import Bench, Line, Prompt, knobs_of, share_within
from reuse_rows import FULL, GOALS, PARTS, Goal, Part, Row

from kvexp.bench.decoder import numbers_of
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.progress import track
from kvexp.tasks.metrics import RESAMPLES, bootstrap
from kvexp.tasks.questions import Question

WORDS = ("logger=none", "method=full", "task=locomo", "task.k=10", "task.categories=[1,2,3,4]")
NOTES = ("task.notes={name:rag,tokens:128}", "model.dtype=float32")
ANSWERS = "answers=true"
FIGURES = ("kl_question", "kl_answer", "top1_question", "top1_answer", "logprob", "f1", "f1_set")
Lines = dict[str, dict[str, Line]]  # by prompt, by row


def measure(bench: Bench, part: Part, questions: Sequence[Question], path: Path, answers: bool) -> Lines:
    """Measure what `path` does not hold yet, a prompt at a time; return all lines of these questions."""
    lines = read(path)
    rows = (FULL, *part.rows)

    def due(row: Row, question: Question, done: dict[str, Line]) -> bool:
        line = done.get(row.name)
        if line is None or (answers and "f1" not in line) or (row.equal and rival_of(part, row) not in done):
            return True
        return line["knobs"] != knobs_of(method_of(part, row, question, done))

    missing = [one for one in questions if any(due(row, one, lines.get(one.id, {})) for row in rows)]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a", encoding="utf-8") as file:
        for question in track(missing, path.stem, unit="prompts"):
            prompt, done = Prompt(bench, question, answers), lines.setdefault(question.id, {})
            for row in rows:
                if not due(row, question, done):
                    continue
                method = method_of(part, row, question, done)
                found = prompt.full if method is None else prompt.under(method)
                line = {"prompt": question.id, "row": row.name, "knobs": knobs_of(method), **found}
                done[row.name] = line
                file.write(json.dumps(line) + "\n")
                file.flush()
    return {one.id: lines[one.id] for one in questions}


def method_of(part: Part, row: Row, question: Question, done: dict[str, Line]) -> Any:
    """Return the method of a row for a question; None: full recompute."""
    if not row.method:
        return None
    share = row.share
    if row.equal:
        lengths = [len(chunk) for chunk in question.context.chunks]
        first = row.built(part.encoded, share).first * len(lengths)
        share = str(share_within(lengths, done[rival_of(part, row)]["union_tokens"] - first))
    return row.built(part.encoded, share)


def rival_of(part: Part, row: Row) -> str:
    """Return the name of the row that a row is compared with."""
    rival = row.rival(part.rows)
    return "" if rival is None else rival.name


def read(path: Path) -> Lines:
    """Return the lines of a file; of two for the same row the later one, and none that was cut short."""
    lines: Lines = {}
    for text in path.read_text(encoding="utf-8").splitlines() if path.exists() else ():
        try:
            line = json.loads(text)
        except json.JSONDecodeError:  # the process was killed while it wrote
            continue
        lines.setdefault(line["prompt"], {})[line["row"]] = line
    return lines


class Ratio(NamedTuple):
    """The ratio of two means over the same prompts, the central 95 % of it, and where the first is lower."""

    value: float
    low: float
    high: float
    wins: int
    n: int

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}, {self.high:.2f})"


def ratio(ours: Sequence[float], theirs: Sequence[float], seed: int = 0) -> Ratio:
    """Return mean of `ours` / mean of `theirs`; resamples of prompts take both together."""
    pairs = np.array([ours, theirs], dtype=np.float64)
    n = pairs.shape[1]
    counts = np.random.default_rng(seed).multinomial(n, np.full(n, 1 / n), size=RESAMPLES)
    above, below = pairs @ counts.T
    low, high = np.quantile(above / below, [0.025, 0.975])
    value = pairs[0].sum() / pairs[1].sum()
    return Ratio(float(value), float(low), float(high), int((pairs[0] < pairs[1]).sum()), n)


def values(lines: Lines, row: str, figure: str) -> list[float]:
    """Return a figure of a row, for each prompt."""
    return [one[row][figure] for one in lines.values()]


def table(part: Part, lines: Lines) -> str:
    """Return the table of a part."""
    rows = (FULL, *part.rows)
    figures = [
        name for name in FIGURES if all(name in one[row.name] for one in lines.values() for row in rows)
    ]
    beside = ["beside", "KL question / its", "lower", "KL answer / its", "lower"]
    head = ["stored", "share", "method", "union", "computed", *figures, *beside]
    found = [cells(head), cells(["---"] * len(head))]
    for row in rows:
        sizes = [
            f"{np.mean(values(lines, row.name, name)):.3f}" if row.method else "1"
            for name in ("union", "computed")
        ]
        means = [mean(values(lines, row.name, name)) for name in figures]
        rival, compared = row.rival(part.rows), ["–"] * 5
        if rival is not None:
            compared = [rival.label]
            for name in ("kl_question", "kl_answer"):
                one = ratio(values(lines, row.name, name), values(lines, rival.name, name))
                compared += [str(one), f"{one.wins}/{one.n}"]
        found.append(cells([row.stored or "exact", row.share or "–", row.label, *sizes, *means, *compared]))
    return "\n".join(found)


def mean(data: Sequence[float]) -> str:
    """Return a mean and its standard error."""
    found = bootstrap(data)
    return f"{found.value:.3f}" + ("" if found.stderr is None else f" ± {found.stderr:.3f}")


def cells(words: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(words)} |"


def judged(goals: Sequence[Goal], lines: Lines) -> str:
    """Return the goals, and how they were met."""
    head = ["goal", "KL", "on", "at most", "measured", "", "lower"]
    found = [cells(head), cells(["---"] * len(head))]
    for goal in goals:
        for tokens, bar in goal.bars.items():
            ours, theirs = (values(lines, name, f"kl_{tokens}") for name in (goal.row, goal.beside))
            one = ratio(ours, theirs)
            verdict = "met" if one.value <= bar else "missed"
            if one.low <= bar < one.high:
                verdict += ", within the interval"
            compared = f"{goal.row} / {goal.beside}"
            found.append(
                cells([goal.name, compared, tokens, str(bar), str(one), verdict, f"{one.wins}/{one.n}"])
            )
    return "\n".join(found)


def main(arguments: Sequence[str]) -> int:
    """Measure the parts that are named, print and write their tables."""
    numbers, others = numbers_of(arguments, {"prompts": 0})
    names = [word for word in others if "=" not in word]
    words = [word for word in others if "=" in word and word != ANSWERS]
    if not names or not set(names) <= set(PARTS):
        raise UserError(f"{' '.join(names) or 'nothing'} names no part: name some of {', '.join(PARTS)}")
    [settings] = settings_of([*WORDS, *NOTES, *words])
    bench = Bench(settings)
    folder = settings.output_dir / "reuse_tables" / settings.model.label / settings.cell
    for name in names:
        part, path = PARTS[name], folder / f"{name}.jsonl"
        questions = bench.questions(numbers["prompts"] or part.prompts)
        lines = measure(bench, part, questions, path, ANSWERS in others)
        written = f"## {name}: {len(lines)} prompts {' '.join(words)}\n\n{table(part, lines)}\n"
        if goals := [goal for goal in GOALS if goal.part == name]:
            written += f"\n{judged(goals, lines)}\n"
        path.with_suffix(".md").write_text(written, encoding="utf-8")
        print(written, flush=True)
    return 0


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"reuse_tables: {error}")
