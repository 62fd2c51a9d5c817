"""From samples to metrics: every figure with its bootstrap standard error over documents."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from kvexp.errors import UserError
from kvexp.tasks import metrics, nested

LOWER_IS_BETTER = ("kl", "nll", "nll_full", "stale")
FIDELITY = ("kl", "top1_agreement")


def check_scores(samples: Sequence[dict[str, Any]]) -> None:
    """Raise UserError unless all samples have the same scores, which are numbers: other code wrote some."""
    expected = set(samples[0].get("scores") or ())
    for sample in samples:
        scores = sample.get("scores") or {}
        if set(scores) != expected or not all(isinstance(value, int | float) for value in scores.values()):
            raise UserError(
                f"sample {sample.get('id')!r} has other scores than the first one: start with resume=false,"
                " which sets the old files aside"
            )


def label_metrics(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return accuracies (raw, calibrated, free) and macro-F1 (raw, calibrated) of a label task's samples."""
    check_scores(samples)
    names = [name for name in samples[0]["scores"] if name not in FIDELITY]
    found: dict[str, Any] = {
        name: metrics.mean([sample["scores"][name] for sample in samples], name not in LOWER_IS_BETTER)
        for name in names
    }
    expected = [sample["expected"] for sample in samples]
    found["macro_f1"] = metrics.macro_f1(expected, [sample["answer"] for sample in samples])
    found["macro_f1_calibrated"] = metrics.macro_f1(
        expected, [sample["answer_calibrated"] for sample in samples]
    )
    return found


def question_metrics(samples: Sequence[dict[str, Any]], task: Any, drawn: int) -> dict[str, Any]:
    """Return the metrics of a task of questions: over all of them, and by group where there are several.

    A question may be in several groups, written with " | " between them.

    Answers to one question count together, by their mean: questions are what is resampled, and the answers
    within each. `truncated` is the share of answers that the limit on new tokens ended.
    """
    check_scores(samples)
    by_question = [samples[at : at + drawn] for at in range(0, len(samples), drawn)]
    names = [*task.metrics, *(n for n in samples[0]["scores"] if n not in (*task.metrics, *FIDELITY))]

    def over(questions: Sequence[Sequence[dict[str, Any]]], name: str) -> Any:
        values = [[one["scores"][name] for one in answers] for answers in questions]
        return nested.mean(values, name not in LOWER_IS_BETTER)

    found: dict[str, Any] = task.overall(samples) if task.overall else {}
    found |= {name: over(by_question, name) for name in names}
    groups_of = [answers[0].get("group", "").split(" | ") for answers in by_question]
    groups = list(dict.fromkeys(group for own in groups_of for group in own))
    if len(groups) > 1:
        for group in groups:
            members = [one for one, own in zip(by_question, groups_of, strict=True) if group in own]
            found |= {f"{name} [{group}]": over(members, name) for name in names}
    cut_short = [sum(one["stop"] == "length" for one in answers) / drawn for answers in by_question]
    found["truncated"] = metrics.mean(cut_short, higher_is_better=False)
    return found


def continuation_metrics(samples: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return means over all blocks of all texts, which are what is resampled, and perplexities."""
    check_scores(samples)
    found: dict[str, Any] = {}
    for name in ("kl", "top1_agreement", "nll", "nll_full"):
        blocks = [value for sample in samples for value in sample["blocks"][name]]
        found[name] = metrics.mean(blocks, name not in LOWER_IS_BETTER)
    for name, source in (("perplexity", "nll"), ("perplexity_full", "nll_full")):
        value = math.exp(found[source]["value"])
        stderr = found[source]["stderr"]  # of the logarithm: a relative error of the perplexity
        error = None if stderr is None else value * stderr
        found[name] = {**found[source], "value": value, "stderr": error}
    return found


def fidelity_summary(samples: Sequence[dict[str, Any]], decay: dict[str, Any] | None) -> dict[str, Any]:
    """Return the `fidelity` section: KL to full attention (mean, median, errors) and top-1 agreement."""
    check_scores(samples)
    kl = [sample["scores"]["kl"] for sample in samples]
    agreement = [sample["scores"]["top1_agreement"] for sample in samples]
    mean, middle = metrics.mean(kl, False), metrics.median(kl, False)
    agrees = metrics.mean(agreement, True)
    summary: dict[str, Any] = {
        "kl": mean["value"],
        "kl_stderr": mean["stderr"],
        "kl_median": middle["value"],
        "kl_median_stderr": middle["stderr"],
        "top1_agreement": agrees["value"],
        "top1_agreement_stderr": agrees["stderr"],
        "n": mean["n"],
    }
    if decay is not None:
        summary["by_position"] = decay
    return summary
