"""Eviction methods beside each other: what each loses of full attention, and what it still recalls.

    python scripts/eviction_tables.py PART [PART ...] [key=value ...]

    interval   texts of 4,096 tokens behind a prompt of 1,024, budgets 256, 512 and 1,024: methods that evict
               every 128 tokens
    step       the same texts to 2,560, budgets 256 and 512: methods that read every step's attention
    ablation   TriAttention without parts of its score, and with other calibrations, to 2,048 at budget 256
    beyond     what may be added to TriAttention, on the same measure
    window     SnapKV and R-KV over observation windows, on the same measure and on recall
    passkey    recall of facts by budget and depth

Each row is one cell of `python -m kvexp` and is kept under output_dir: a second call continues, and prints
what is done. Words such as model=NAME, task.source=essays, data_dir=PATH, seed=1 go to every cell. Tables are
printed as Markdown, with bootstrap standard errors over blocks of 128 tokens (facts, for passkey).
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass

from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.run import run
from kvexp.tasks.metrics import paired_difference

Cell = tuple[str, Sequence[str]]  # its name in the table, and its words

TRI = ("method=triattention", "method.mode=per_layer_perhead", "method.protect_prompt=false")
SNAP = ("method=snapkv", "method.interval=128", "method.window=16")
RKV = ("method=rkv", "method.window=16", "method.balance=0.1")
EVERY = "method.interval=128"
EVERY_128: tuple[Cell, ...] = (
    ("triattention per_layer_perhead", TRI),
    ("triattention per_head", (TRI[0], TRI[2])),
    ("triattention union", (TRI[0], "method.mode=union", TRI[2])),
    ("triattention_plus", ("method=triattention_plus",)),
    ("rkv, window 16", RKV),
    ("snapkv, window 16", SNAP),
    ("snapkv, window 64", (*SNAP[:2], "method.window=64")),
    ("adakv over snapkv", ("method=adakv", "method.base={name:snapkv,window:16}", EVERY)),
    ("pyramidkv, window 16", ("method=pyramidkv", "method.window=16", EVERY)),
    ("expected_attention", ("method=expected_attention", EVERY)),
    ("streaming_llm", ("method=streaming_llm", EVERY)),
    ("knorm", ("method=knorm", EVERY)),
    ("random", ("method=random", EVERY)),
)
EVERY_STEP: tuple[Cell, ...] = (
    ("h2o", ("method=h2o",)),
    ("tova", ("method=tova",)),
    ("vatp over h2o", ("method=vatp",)),
    ("lazyeviction, window 64", ("method=lazyeviction", "method.interval=64")),
    ("raas", ("method=raas",)),
    ("streaming_llm", ("method=streaming_llm",)),
)
ABLATIONS: tuple[Cell, ...] = (
    ("as in the paper", TRI),
    ("no S_trig", (*TRI, "method.trig=false")),
    ("no S_norm", (*TRI, "method.norm=none")),
    ("unweighted S_norm", (*TRI, "method.norm=unweighted")),
    ("linear offsets", (*TRI, "method.offsets=linear")),
    ("offsets to 4,096", (*TRI, "method.max_offset=4096")),
    ("offsets to 128", (*TRI, "method.max_offset=128")),
    ("mean over query heads", (*TRI, "method.group=mean")),
    ("5,000 calibration tokens", (*TRI, "calibration.tokens=5000")),
    ("calibrated on code", (*TRI, "calibration.source=stdlib_code")),
)
BEYOND: tuple[Cell, ...] = (
    ("as in the paper", TRI),
    ("recent 128, 4 sinks", (*TRI, "method.recent=128", "method.sinks=4")),
    ("the same, variance (plus)", ("method=triattention_plus",)),
    ("plus, value norm", ("method=triattention_plus", "method.value_norm=true")),
    ("plus, window 64 mixed in", ("method=triattention_plus", "method.mix=window")),
    ("plus, accumulated mixed in", ("method=triattention_plus", "method.mix=accumulated")),
    ("plus, smooth gain", ("method=triattention_plus", "method.gain=smooth")),
    ("plus, layers by concentration", ("method=triattention_plus", "method.budgets=concentration")),
    ("plus, centres follow (ema .05)", ("method=triattention_plus", "method.ema=0.05")),
    ("rkv, window 16", RKV),
)
WINDOWS: tuple[Cell, ...] = tuple(
    (f"{words[0].removeprefix('method=')}, window {size}", (*words, f"method.window={size}"))
    for words in (SNAP[:2], (RKV[0], RKV[2]))
    for size in (8, 16, 32, 64, 128)
)
RECALLED: tuple[Cell, ...] = (
    ("full", ("method=full",)),
    *EVERY_128[:3],
    ("triattention_plus", ("method=triattention_plus",)),
    ("plus, accumulated mixed in", ("method=triattention_plus", "method.mix=accumulated")),
    *EVERY_128[4:],
    ("h2o", ("method=h2o",)),
    ("tova", ("method=tova",)),
    ("kvzip", ("method=kvzip",)),
)


@dataclass(frozen=True)
class Part:
    """A table: rows of cells, a column of budgets."""

    cells: Sequence[Cell]
    budgets: Sequence[int]
    task: Sequence[str]
    metrics: Sequence[str] = ("kl", "top1_agreement", "nll")


LONG = ("task=continuation", "task.prefill=1024", "task.length=4096")
SHORT = ("task=continuation", "task.prefill=1024", "task.length=2048")
PASSKEY = ("task=passkey", "task.context_tokens=2048")
PARTS = {
    "interval": Part(EVERY_128, (256, 512, 1024), LONG),
    "step": Part(EVERY_STEP, (256, 512), (*LONG[:2], "task.length=2560")),
    "ablation": Part(ABLATIONS, (256,), SHORT),
    "beyond": Part(BEYOND, (256,), SHORT),
    "window": Part(WINDOWS, (256,), SHORT),
    "passkey": Part(RECALLED, (512, 1024), PASSKEY, ("logprob", "accuracy")),
    "passkey_window": Part(WINDOWS, (512, 1024), PASSKEY, ("logprob", "accuracy")),
}


def main(arguments: Sequence[str]) -> int:
    """Run the parts that are named, one table each."""
    names = [word for word in arguments if "=" not in word]
    words = [word for word in arguments if "=" in word]
    unknown = [name for name in names if name not in PARTS]
    if unknown or not names:
        raise UserError(f"{unknown or 'nothing'} is no part: name some of {', '.join(PARTS)}")
    for name in names:
        print(table(name, PARTS[name], words), flush=True)
    return 0


def table(name: str, part: Part, words: Sequence[str]) -> str:
    """Run the cells of a part; return its table."""
    head = ["method", "budget", *part.metrics, "KL beside the first row" if "kl" in part.metrics else "facts"]
    lines = [f"\n## {name}: {' '.join((*part.task, *words))}\n", row(head), row(["---"] * len(head))]
    for budget in part.budgets:
        first: dict | None = None
        for label, of_method in part.cells:
            if of_method[0] == "method=full" and budget != part.budgets[0]:
                continue
            record, samples = result(part, of_method, budget, words)
            first = first or {"samples": samples}
            cells = [figure(record["metrics"][metric]) for metric in part.metrics]
            lines.append(row([label, str(budget), *cells, beside(samples, first["samples"])]))
            print(lines[-1], file=sys.stderr, flush=True)
    return "\n".join(lines)


def result(
    part: Part, of_method: Sequence[str], budget: int, words: Sequence[str]
) -> tuple[dict, list[dict]]:
    """Return the record and the samples of one cell, run now or before."""
    from kvexp.report.folder import RunFolder

    cell = ["logger=none", "batch_size=8", *part.task, *of_method, f"budget={budget}", *words]
    [settings] = settings_of(cell)
    record = run(settings)
    return record, RunFolder(settings.run_dir).samples()


def beside(samples: Sequence[dict], first: Sequence[dict]) -> str:
    """Return the paired difference of KL to the first row, by block; for facts their number."""
    if "blocks" not in samples[0]:
        return str(len(samples))
    ours, theirs = ([v for one in some for v in one["blocks"]["kl"]] for some in (samples, first))
    gap = paired_difference(ours, theirs)
    return f"{gap.value:+.3f} ({gap.low:+.3f}, {gap.high:+.3f})"


def figure(metric: dict) -> str:
    """Return a value and its standard error."""
    error = metric["stderr"]
    return f"{metric['value']:.3f}" + ("" if error is None else f" ± {error:.3f}")


def row(cells: Sequence[str]) -> str:
    """Return a line of a Markdown table."""
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(f"eviction_tables: {error}")
