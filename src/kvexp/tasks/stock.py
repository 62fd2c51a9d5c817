"""Tasks that lm-eval brings along, run and scored by lm-eval itself over our adapter."""

from __future__ import annotations

import hashlib
import json
from typing import Any

from kvexp.errors import UserError
from kvexp.tasks.adapter import KVLM


def evaluate_stock(
    task: Any, adapter: KVLM, limit: int | None, seed: int
) -> tuple[dict[str, Any], list[dict[str, Any]], str]:
    """Return (metrics, samples, sha256 of the documents) of one lm-eval task, or of a group's tasks together.

    Raises UserError when lm-eval does not know the task or cannot load its data.
    """
    import lm_eval
    from lm_eval.tasks import TaskManager

    manager = TaskManager(include_path=task.include_path)
    try:
        results = lm_eval.simple_evaluate(
            model=adapter,
            tasks=[task.name],
            num_fewshot=task.num_fewshot,
            limit=limit,
            apply_chat_template=task.apply_chat_template,
            log_samples=True,
            bootstrap_iters=1000,
            random_seed=seed,
            numpy_random_seed=seed,
            torch_random_seed=seed,
            fewshot_random_seed=seed,
            task_manager=manager,
            verbosity="ERROR",
        )
    except (KeyError, ValueError, OSError, ConnectionError) as error:
        reason = str(error).strip().splitlines()[0][:200] if str(error).strip() else type(error).__name__
        raise UserError(
            f"lm-eval cannot run task.name={task.name} ({reason}): check the name, or give a local task with "
            "task.include_path=FOLDER"
        ) from error
    return _metrics(results), *_samples(results, seed)


def _metrics(results: dict[str, Any]) -> dict[str, Any]:
    """Flatten lm-eval's results: `acc`, or `task/acc` where there are several tasks; `filter` names kept unless none."""
    several, found = len(results["samples"]) > 1, {}
    for name in results["samples"]:
        row, better = results["results"][name], results["higher_is_better"].get(name, {})
        for key, value in row.items():
            metric, _, kind = key.partition(",")
            if not kind or metric.endswith("_stderr") or not isinstance(value, int | float):
                continue
            stderr = row.get(f"{metric}_stderr,{kind}")
            label = metric if kind == "none" else f"{metric}_{kind}"
            found[f"{name}/{label}" if several else label] = {
                "value": float(value),
                "stderr": float(stderr) if isinstance(stderr, int | float) else None,
                "n": results["n-samples"][name]["effective"],
                "higher_is_better": bool(better.get(metric, True)),
            }
    return found


def _samples(results: dict[str, Any], seed: int) -> tuple[list[dict[str, Any]], str]:
    """Return lines for samples.jsonl, and the sha256 over all documents."""
    lines, digest = [], hashlib.sha256()
    for name, rows in results["samples"].items():
        for row in rows:
            digest.update(json.dumps(row["doc"], sort_keys=True, default=str).encode())
            scores = {m: float(row[m]) for m in row["metrics"] if isinstance(row.get(m), int | float | bool)}
            first = next(iter(row["arguments"].values())) if isinstance(row["arguments"], dict) else row["arguments"][0]
            prompt = first["arg_0"] if isinstance(first, dict) else first[0]
            lines.append(
                {
                    "id": f"{name}/{row['doc_id']}/{row.get('filter', 'none')}",
                    "sample": 0,
                    "seed": seed,
                    "query": prompt,
                    "answer": json.dumps(row["filtered_resps"], default=str),
                    "expected": str(row["target"]),
                    "scores": scores,
                    "prompt_tokens": None,
                    "new_tokens": None,
                    "stop": None,
                }
            )
    return lines, digest.hexdigest()
