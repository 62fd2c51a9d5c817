"""What reused keys and values are off by, and how much of it one shift for a whole unit explains.

    python scripts/reuse_diagnostics.py [prompts=12] [encoded=behind_header,old_context,alone]
        [data_dir=PATH] [output_dir=outputs] [model=NAME method.recompute=0.1 ...]

All other words are those of `python -m kvexp`, with method=agentkvshift and task=locomo. Prompts are those of
the task; without data each is ten passages of the standard library's documentation, 96 tokens long. Printed:
a table beside the paper's figure, energies of all heads together, means over layers from the second on (that
of the first token: at the check layer). Written to OUTPUT_DIR/reuse_diagnostics/MODEL/: report.json (by
layer, with singular spectra), heads.csv (by layer and KV head), and pictures (with `kvexp[report]`).
`kvexp.measure.residuals` and `kvexp.stats.residuals` say what each number is.
"""

from __future__ import annotations

import csv
import json
import random
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvexp import model
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.measure.residuals import ESTIMATORS, PARTS, ResidualMeter, fresh_rows
from kvexp.methods.reuse.agentkvshift import AgentKVShift
from kvexp.progress import track
from kvexp.prompt import Context, bos_ids, encode
from kvexp.report import residual_plot
from kvexp.tasks.texts import load_texts

ENCODED = ("behind_header", "old_context", "alone")
PAPER = (0.64, 0.86)  # share of residual energy that the shared shift explains, of keys and values alike
PAPER_TEXT = "64 to 86 %"
UNITS, UNIT_TOKENS = 10, 96
SCALARS: tuple[str, ...] = ("norm", "relative", "explained", "chance", "unit_share")
SCALARS += ("first", "first_two", "top", "top_centred")
NAMES = residual_plot.NAMES


def main(words: Sequence[str]) -> int:
    """Measure, print, write, draw."""
    try:
        return _run(list(words))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    prompts, encoded, rest = _own(words)
    [run] = settings_of(["method=agentkvshift", "task=locomo", *rest])
    method = run.method
    if not isinstance(method, AgentKVShift):
        raise UserError(f"method={method.id} shifts nothing: leave it out, or use method=agentkvshift")
    loaded = model.load(run.model)
    knobs: list[Any] = encoded
    meters = {one: ResidualMeter(loaded.model, replace(method, encoded=one)) for one in knobs}
    contexts, source = _contexts(run, loaded, prompts)
    steps = [(context, one) for context in contexts for one in encoded]
    fresh: list[Any] = []
    for context, one in track(steps, "measuring", len(steps), "prompt"):
        if one == encoded[0]:
            fresh = fresh_rows(method, loaded.model, context)
        meters[one](context, fresh)
    found = {one: layers(meter) for one, meter in meters.items()}
    means = {one: summary(meter, method.check) for one, meter in meters.items()}
    facts = {
        "words": words,
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "source": source,
        "prompts": len(contexts),
        "unit_tokens": sum(len(unit) for context in contexts for unit in context.chunks),
        "held_out": {one: meter.held_out for one, meter in meters.items()},
    }
    folder = run.output_dir / "reuse_diagnostics" / run.model.label
    folder.mkdir(parents=True, exist_ok=True)
    report = {**facts, "paper_explained": PAPER, "means": means, "layers": found}
    (folder / "report.json").write_text(json.dumps(_plain(report), allow_nan=False) + "\n")
    _write_heads(meters, folder / "heads.csv")
    print(f"{len(contexts)} prompts ({source}), {loaded.name}, r = {method.recompute}\n")
    print(f"{table(means)}\n\n{verdict(means)}\n\n{folder}")
    try:
        residual_plot.pictures(found, means, PAPER, folder)
    except UserError as error:
        print(error, file=sys.stderr)
    return 0


def _own(words: Sequence[str]) -> tuple[int, list[str], list[str]]:
    """Return the script's own words, prompts and encoded, and all others."""
    given = dict(word.split("=", 1) for word in words if word.startswith(("prompts=", "encoded=")))
    encoded = list(dict.fromkeys(given.get("encoded", ",".join(ENCODED)).strip("[]").split(",")))
    if not set(encoded) <= set(ENCODED):
        raise UserError(f"encoded={given['encoded']} is not possible: write encoded={','.join(ENCODED)}")
    prompts = given.get("prompts", "12")
    if not prompts.isdigit() or not int(prompts):
        raise UserError(f"prompts={prompts} is not possible: write a number above 0, such as prompts=12")
    return int(prompts), encoded, [word for word in words if word.split("=")[0] not in ("prompts", "encoded")]


def _contexts(run: Any, loaded: Any, prompts: int) -> tuple[list[Context], str]:
    """Return contexts that have units, and where they come from."""
    if run.task.kind != "questions":
        raise UserError(f"task={run.task.id} has no prompts made of units: use task=locomo")
    if run.task.id == "locomo" and run.data_dir is None:
        return _passages(loaded.tokenizer, prompts, run.seed), "stdlib"
    task = replace(run.task, n=prompts) if hasattr(run.task, "n") else run.task
    found = task.load(loaded.tokenizer, seed=run.seed, limit=prompts, data_dir=run.data_dir)
    return [one.context for one in found.questions], run.task.id


def _passages(tokenizer: Any, prompts: int, seed: int) -> list[Context]:
    """Return contexts of passages that were drawn from the standard library's documentation."""
    texts = [one.text for one in load_texts("stdlib") if len(one.text) > 40 * UNIT_TOKENS]
    numbers, header = random.Random(f"reuse_diagnostics/{seed}"), "Passages from a manual.\n\n"
    contexts = []
    for _ in range(prompts):
        units = []
        for text in numbers.sample(texts, UNITS):
            at = numbers.randrange(len(text) - 20 * UNIT_TOKENS)  # enough characters for its tokens
            at = max(at, text.find(" ", at))
            units.append(tuple(encode(tokenizer, text[at : at + 20 * UNIT_TOKENS])[:UNIT_TOKENS]))
        contexts.append(Context((*bos_ids(tokenizer), *encode(tokenizer, header)), tuple(units)))
    return contexts


def layers(meter: ResidualMeter) -> list[dict[str, Any]]:
    """Return the figures of each layer, all heads together, as plain numbers."""
    found = []
    for sums, removed in zip(meter.sums, meter.removed, strict=True):
        parts = {part: {k: v.tolist() for k, v in sums[part].figures().items()} for part in PARTS}
        shifts = {
            name: {part: float(one.removed()) for part, one in of_parts.items()}
            for name, of_parts in removed.items()
        }
        found.append({**parts, "removed": shifts})
    return found


def summary(meter: ResidualMeter, check: int) -> dict[str, dict[str, Any]]:
    """Return means over the layers in which rows are off, by part; first tokens at the check layer."""
    means: dict[str, dict[str, Any]] = {}
    for part in PARTS:
        figures = [sums[part].figures() for sums in meter.sums]
        mean = {name: torch.stack([one[name] for one in figures[1:]]).nanmean(0) for name in figures[0]}
        for name in ("first", "first_two"):
            mean[name] = figures[check][name]
        means[part] = {name: x.tolist() for name, x in mean.items()}
        of = "values" if part == "values" else "keys"
        means[part]["removed"] = {
            name: float(
                torch.stack([one[name][of].removed() for one in meter.removed[max(1, check) :]]).nanmean()
            )
            for name in ESTIMATORS
        }
    return means


def table(means: Mapping[str, Any]) -> str:
    """Return the means as Markdown."""
    head = ["encoded", "rows", "explained by the mean", "paper", "by chance", "residual / state energy"]
    head += ["top-1 before -> after centring", "first token", *(f"removed: {name}" for name in ESTIMATORS)]
    rows = [head, ["---"] * len(head)]
    for one, parts in means.items():
        for part, mean in parts.items():
            row = [one, NAMES[part], percent(mean["explained"]), PAPER_TEXT]
            row += [percent(mean["chance"]), percent(mean["relative"])]
            row += [f"{percent(mean['top'])} -> {percent(mean['top_centred'])}", percent(mean["first"])]
            rows.append(row + [percent(mean["removed"][name]) for name in ESTIMATORS])
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def verdict(means: Mapping[str, Any]) -> str:
    """Return in words how the paper's figure stands, and whether divergent tokens speak for the others."""
    lines = []
    for one, parts in means.items():
        of = {part: parts[part]["explained"] for part in ("keys", "values")}
        found = [part for part, share in of.items() if PAPER[0] <= share <= PAPER[1]]
        where = {0: "not found", 1: f"found for {'/'.join(found)} alone", 2: "found"}[len(found)]
        said = (
            f"{one}: the mean of a unit explains {percent(of['keys'])} of the residual energy of K and"
            f" {percent(of['values'])} of V; the paper's {PAPER_TEXT} is {where} here."
        )
        worse = [part for part in of if parts[part]["removed"]["top_unweighted"] < 0]
        if worse:
            said += (
                f" The unweighted shift of the most divergent tokens makes the {' and '.join(worse)} of the"
                " others worse than no shift does: they were chosen for being unlike the rest."
            )
        lines.append(said)
    return "\n".join(lines)


def percent(x: float) -> str:
    """Return a share in percent, with a digit behind the point below ten."""
    return f"{100 * x:.0f} %" if abs(x) >= 0.0995 else f"{100 * x:.1f} %"


def _write_heads(meters: Mapping[str, ResidualMeter], path: Path) -> None:
    """Write a row for each encoding, layer, kind of rows and KV head."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(["encoded", "layer", "rows", "head", *SCALARS, *(f"removed_{x}" for x in ESTIMATORS)])
        for one, meter in meters.items():
            for layer, (sums, removed) in enumerate(zip(meter.sums, meter.removed, strict=True)):
                for part in PARTS:
                    figures = sums[part].figures(by_head=True)
                    of = "values" if part == "values" else "keys"
                    columns = [figures[name] for name in SCALARS]
                    columns += [removed[name][of].removed(by_head=True) for name in ESTIMATORS]
                    for head, numbers in enumerate(torch.stack(columns, 1).tolist()):
                        writer.writerow([one, layer, part, head, *(f"{x:.6g}" for x in numbers)])


def _plain(x: Any) -> Any:
    """Return x with floats of six digits, and null for what is no number."""
    if isinstance(x, Mapping):
        return {key: _plain(value) for key, value in x.items()}
    if isinstance(x, (list, tuple)):
        return [_plain(value) for value in x]
    if isinstance(x, float):
        return None if x != x else float(f"{x:.6g}")
    return x


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
