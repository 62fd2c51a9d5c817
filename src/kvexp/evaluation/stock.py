"""Stock tasks of lm-eval, run and scored by lm-eval over our adapter."""

from __future__ import annotations

from typing import Any

from kvexp.measure.answered import Answered
from kvexp.measure.timing import Stopwatch
from kvexp.measure.usage import cache_usage
from kvexp.report.folder import RunFolder
from kvexp.schema import Settings
from kvexp.tasks.adapter import KVLM, NOTHING
from kvexp.tasks.session import Session
from kvexp.tasks.stock import evaluate_stock


def answer(settings: Settings, loaded: Any, folder: RunFolder, watch: Stopwatch) -> Answered:
    """Let lm-eval run one of its own tasks."""
    session = Session(loaded, settings.method, None, settings.budget, watch)
    with settings.method.attach(loaded.model):
        metrics, samples, digest = evaluate_stock(
            settings.task, KVLM(session, settings.batch_size), settings.limit, settings.seed
        )
    folder.check_inputs({"model_sha256": loaded.sha256, "data_sha256": digest})
    if folder.resume([[sample["id"] for sample in samples]]):
        folder.append(samples)
    usage = cache_usage(loaded.model, session.context(NOTHING), 0, 0)
    return Answered(metrics, usage, None, session.decoded, digest)
