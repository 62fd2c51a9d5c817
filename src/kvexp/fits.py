"""Which method serves which task and model, told before anything heavy loads."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from kvexp.errors import UserError
from kvexp.specs import CalibrationSpec, ModelSpec, SamplingSpec

if TYPE_CHECKING:
    from kvexp.methods.base import Method
    from kvexp.tasks.base import Task


def refuse_unfit(
    model: ModelSpec,
    method: Method,
    calibration: CalibrationSpec,
    task: Task,
    fidelity: bool,
    split: str,
    choices: Mapping[str, str],
) -> None:
    """Raise UserError where a choice means nothing beside another one."""
    if method.needs_shared_context and not task.shared_context:
        raise UserError(
            f"method={choices['method']} serves only tasks with one context for all queries, and"
            f" {choices['task']} has one for each: take method=full, or a task such as intents"
        )
    if method.needs_query and task.kind != "questions":
        raise UserError(
            f"method={choices['method']} chooses by the question before it is asked, and"
            f" task={choices['task']} asks many on one context: take a task of questions, such as locomo, or"
            " a method that reads none, such as agentkvshift"
        )
    if method.needs_units and task.kind != "lm_eval" and not task.has_units:
        raise UserError(
            f"method={choices['method']} reuses units of text in other places, and a context of"
            f" task={choices['task']} is one unit in its own place, so that nothing would be wrong with it:"
            " take task=locomo or ama_bench with task.k=10, state_change, or a label task such as intents"
        )
    if model.tp_plan is not None and not (method.by_head and not method.needs_calibration):
        raise UserError(
            f"method={choices['method']} chooses by all heads together, or learns from them, and with"
            " model.tp_plan=auto a process holds some of them: take full, truncate, streaming_llm, knorm,"
            " snapkv, pyramidkv, h2o or rkv, or model.device_map=auto"
        )
    if model.tp_plan is not None and task.kind not in ("labels", "questions"):
        raise UserError(
            f"task={choices['task']} cannot run with model.tp_plan=auto: take a task of labels or questions,"
            " or model.device_map=auto"
        )
    if task.kind == "lm_eval" and method.id != "full":
        raise UserError(
            f"method={choices['method']} cannot serve task={choices['task']}, whose prompts have no context"
            " apart from the query: take method=full"
        )
    if task.kind == "lm_eval" and split != "test":
        raise UserError(
            "split=validation means nothing to a stock task: leave it out, or name a task of that split"
        )
    for key, given in (
        ("fidelity", fidelity),
        ("calibration.empty_prefix", calibration.empty_prefix),
    ):
        if task.kind == "lm_eval" and given:
            raise UserError(f"{key}=true means nothing to task={choices['task']}: leave it out")
    if fidelity and task.kind == "questions" and not task.known_answers:
        raise UserError(
            f"fidelity=true compares along known answers, and task={choices['task']} has none: leave it out,"
            " or take task=continuation"
        )
    if method.needs_full_layer and not model.full_attention:
        raise UserError(
            f"method={choices['method']} needs a layer that attends to the whole context, and every layer of"
            f" model={choices['model']} has a sliding window: take method=full or another model"
        )


def sampling_of(values: Mapping[str, Any], task: Task, choice: str) -> SamplingSpec:
    """Return how answers are sampled; raise UserError where a task samples none."""
    spec = SamplingSpec(values["temperature"], values["top_p"], values["samples"])
    if spec != SamplingSpec() and task.kind != "questions":
        raise UserError(
            f"temperature, top_p and samples mean nothing to task={choice}, which samples no answers:"
            " leave them out"
        )
    return spec
