"""Tasks that lm-eval brings along, run and scored by lm-eval itself over our adapter."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvexp.errors import UserError, suggest
from kvexp.tasks.adapter import KVLM


def evaluate_stock(
    task: Any, adapter: KVLM, limit: int | None, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Return (metrics, samples, sha256 of the documents) of one lm-eval task, or of a group's tasks together.

    Seed 0 draws what lm-eval draws by default. Raises UserError for a method that would do nothing here, and
    when lm-eval does not know the task or cannot load its data.
    """
    import lm_eval
    from lm_eval.defaults import DEFAULT_OTHER_SEED, DEFAULT_RANDOM_SEED

    if adapter.session.method.id != "full":
        raise UserError(
            "task=lm_eval gives whole prompts without a context apart, so no method has anything to act on: "
            "use method=full"
        )
    other = DEFAULT_OTHER_SEED + seed
    with _quiet():
        manager = _manager(task)
        try:
            results = lm_eval.simple_evaluate(
                model=adapter,
                tasks=[task.name],
                num_fewshot=task.num_fewshot,
                limit=limit,
                apply_chat_template=task.apply_chat_template,
                log_samples=True,
                bootstrap_iters=1000,
                random_seed=DEFAULT_RANDOM_SEED + seed,
                numpy_random_seed=other,
                torch_random_seed=other,
                fewshot_random_seed=other,
                task_manager=manager,
            )
        except (KeyError, ValueError, OSError) as error:
            reason = (str(error).strip() or type(error).__name__).splitlines()[0][:200]
            raise UserError(
                f"lm-eval cannot run task.name={task.name} ({reason}): its data may need the hub, "
                "task.include_path=FOLDER gives a local task"
            ) from error
    return _metrics(results, task.name), *_samples(results, adapter, seed)


@contextmanager
def _quiet() -> Iterator[None]:
    """Keep lm-eval's running commentary out of the log."""
    logger = logging.getLogger("lm_eval")
    before = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(before)


def _manager(task: Any) -> Any:
    """Return lm-eval's index of tasks; a task of one's own needs no scan of those that lm-eval brings."""
    from lm_eval.tasks import TaskManager

    if task.include_path is not None:
        own = TaskManager(include_path=task.include_path, include_defaults=False)
        if task.name in own.all_subtasks:
            return own
    manager = TaskManager(include_path=task.include_path)
    if not manager.match_tasks([task.name]):
        raise UserError(
            f"lm-eval has no task.name={task.name}{suggest(task.name, manager.all_tasks)}: "
            "`lm-eval ls tasks` lists them, task.include_path=FOLDER adds your own"
        )
    return manager


def _metrics(results: dict[str, Any], asked: str) -> dict[str, Any]:
    """Flatten lm-eval's results: `acc` of the task that was asked for, `task/acc` of those in a group.

    A filter's name is kept (`exact_match_strict-match`) unless it is lm-eval's `none`.
    """
    found = {}
    for name, row in results["results"].items():
        better = results["higher_is_better"].get(name, {})
        prefix = "" if name == asked or len(results["results"]) == 1 else f"{name}/"
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = row.get(f"{metric}_stderr,{kind}")
            found[prefix + (metric if kind == "none" else f"{metric}_{kind}")] = {
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "n": _documents(results, name),
                "higher_is_better": bool(better.get(metric, True)),
            }
    return found


def _documents(results: dict[str, Any], name: str) -> int:
    if name in results["n-samples"]:
        return results["n-samples"][name]["effective"]
    return sum(_documents(results, child) for child in results["group_subtasks"][name])


def _samples(results: dict[str, Any], adapter: KVLM, seed: int) -> tuple[list[dict[str, Any]], str]:
    """Return lines for samples.jsonl, and the sha256 over all documents.

    `answer` is the generated text, or [log-likelihood, greedy] of each choice.
    """
    lines: list[dict[str, Any]] = []
    digest = hashlib.sha256()
    for name, rows in results["samples"].items():
        for row in rows:
            digest.update(json.dumps(row["doc"], sort_keys=True, default=str).encode())
            prompt, answers = row["arguments"][0][0], row["filtered_resps"]
            lines.append(
                {
                    "id": f"{name}/{row['doc_id']}/{row['filter']}",
                    "sample": len(lines),
                    "seed": seed,
                    "query": prompt,
                    "answer": answers[0] if len(answers) == 1 else answers,
                    "expected": str(row["target"]),
                    "scores": {m: float(row[m]) for m in row["metrics"] if isinstance(row[m], int | float)},
                    "prompt_tokens": len(adapter.tok_encode(prompt)),
                    "new_tokens": None,
                    "stop": None,
                }
            )
    return lines, digest.hexdigest()
