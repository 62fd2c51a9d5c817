"""Compare what our eviction methods keep with what kvpress keeps, on tiny random models with grouped queries.

    python scripts/conformance_kvpress.py [--environment FOLDER]

kvpress needs a transformers of its own, so it runs in an environment of its own: FOLDER, by default in the
user's cache, made on first use (some GB and minutes). `--ours DIR` writes models, token ids and our kept sets
to a folder, `--theirs DIR` reads them in the other environment and writes those of kvpress; without either,
both run, and a table follows.

Where both define a method alike, kept sets have to be `equal`. Where a difference is known, they may be
`nested`: in each head the smaller set lies in the larger one, so the scores agree and only the numbers of
rows differ; or differ `by the last` token, which one of the two pins. The exit status is 1 when a row is not
as it should be. JSON goes to outputs/conformance_kvpress.json.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

FAMILIES = ("llama", "qwen3")  # six query heads, two KV heads; qwen3 normalises queries and keys
LAYERS, TOKENS, BUDGETS = 4, 200, (40, 120)
INSTRUCTION = [10, 10, 82, 58, 10]  # what both are told to repeat the context with
SNAP, SNAP_ARGUMENTS = {"window": 8, "kernel": 5, "pool": "avg"}, {"window_size": 8, "kernel_size": 5}
KVZIP = {"chunk": 64, "repeat": INSTRUCTION}
ADAKV = {"base": {"name": "snapkv", **SNAP}}
Kept = list[list[list[int]]]  # positions, [layer][KV head][n]


@dataclass(frozen=True)
class Case:
    """Our method with knobs, and a press with arguments; `differs` says how the two definitions do."""

    method: str
    knobs: dict[str, Any]
    press: str
    arguments: dict[str, Any] = field(default_factory=dict)
    differs: str = ""

    @property
    def name(self) -> str:
        """The method and its knobs."""
        words = [self.method, *(f"{key}={value}" for key, value in self.knobs.items())]
        return " ".join(words).replace("'", "")


LAST = "kvpress pins the last token, the paper and we do not"
LAYERWISE = (
    "kvpress spreads all rows over the layers, we those beside the window, as the paper does; and it gives"
    " every layer as many when the last one would have fewer than the window"
)
HEADWISE = (
    "kvpress pins alpha of an equal share of rows in each head, the window among them, and the scores divide"
    " the others; we mix an equal and an adaptive division, as the paper does"
)
CASES = (
    Case("knorm", {}, "Knorm"),
    Case("snapkv", SNAP, "SnapKV", SNAP_ARGUMENTS),
    Case("tova", {"recent": 1}, "TOVA"),
    Case("tova", {}, "TOVA", differs=LAST),
    Case("streaming_llm", {"sinks": 4}, "StreamingLLM", {"n_sink": 4}),
    Case("pyramidkv", {**SNAP, "beta": 1}, "PyramidKV", {**SNAP_ARGUMENTS, "beta": 1}),
    Case("pyramidkv", {**SNAP, "beta": 20}, "PyramidKV", {**SNAP_ARGUMENTS, "beta": 20}, LAYERWISE),
    Case("adakv", {**ADAKV, "alpha": 0.0}, "AdaKV", {"alpha_safeguard": 0.0}),
    Case("adakv", {**ADAKV, "alpha": 0.2}, "AdaKV", {"alpha_safeguard": 0.2}, HEADWISE),
    Case("expected_attention", {}, "ExpectedAttention"),
    Case("kvzip", {"level": "pair", **KVZIP}, "KVzip", {"chunk_size": 64}),
    Case("kvzip", {"level": "layer", **KVZIP}, "KVzip", {"chunk_size": 64, "layerwise": True}),
    Case("kvzip", {"plus": True, **KVZIP}, "KVzip", {"chunk_size": 64, "kvzip_plus_normalization": True}),
)
RUNS = [(case, budget) for case in CASES for budget in BUDGETS]


def ours(folder: Path) -> None:
    """Write models, token ids, the full keys and our kept sets."""
    import torch
    from safetensors.torch import save_file
    from transformers.utils.logging import disable_progress_bar

    import kvexp
    from kvexp import tiny

    disable_progress_bar()
    # No token twice: in the first layer equal tokens have keys of equal norm, and kvpress lets ties fall as
    # torch.topk does.
    ids = torch.randperm(tiny.VOCABULARY - 3, generator=torch.Generator().manual_seed(7))[:TOKENS].tolist()
    for family in FAMILIES:
        model = tiny.build(family, changes={"num_hidden_layers": LAYERS})
        model.save_pretrained(folder / family)
        whole = kvexp.method("keep_all").encode(model, ids)
        keys = {str(i): layer.keys.contiguous() for i, layer in enumerate(whole.layers)}
        save_file(keys, folder / family / "keys.safetensors")
        found = [
            positions(kvexp.method(case.method, **case.knobs).encode(model, ids, budget=budget))
            for case, budget in RUNS
        ]
        (folder / family / "ours.json").write_text(json.dumps({"ids": ids, "kept": found}))


def positions(cache: Any) -> Kept:
    """The positions that a cache of ours holds."""
    kept: Kept = []
    for layer in cache.layers:
        [rows] = [source.unpack() for source in layer.sources] or [layer.held()]
        heads = zip(rows.positions[0], rows.mask()[0], strict=True)
        kept.append([at[real].tolist() for at, real in heads])
    return kept


def theirs(folder: Path) -> None:
    """Write the kept sets of kvpress; needs nothing of ours but what `ours` wrote."""
    import logging

    import torch
    from kvpress.presses import kvzip_press
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils.logging import disable_progress_bar

    class Instruction:
        """A tokenizer that knows the instruction alone: kvpress puts nothing before and after it."""

        chat_template = None

        @staticmethod
        def encode(text: str, **_: Any) -> torch.Tensor:
            return torch.tensor([INSTRUCTION if text.strip() else []], dtype=torch.long)

    kvzip_press.AutoTokenizer.from_pretrained = lambda name: Instruction
    logging.getLogger("kvpress").setLevel(logging.ERROR)
    disable_progress_bar()
    for family in FAMILIES:
        model = AutoModelForCausalLM.from_pretrained(folder / family, dtype=torch.float32).eval()
        ids = torch.tensor([json.loads((folder / family / "ours.json").read_text())["ids"]])
        with torch.no_grad():
            full: Any = DynamicCache()
            model(ids, past_key_values=full)
            keys = [layer.keys[0] for layer in full.layers]
            mine = load_file(folder / family / "keys.safetensors")
            apart = max(float((mine[str(i)][0] - key).abs().max()) for i, key in enumerate(keys))
            found = [pressed(model, ids, case, budget, keys) for case, budget in RUNS]
        (folder / family / "theirs.json").write_text(json.dumps({"kept": found, "apart": apart}))


def pressed(model: Any, ids: Any, case: Case, budget: int, keys: list[Any]) -> Kept:
    """The positions that a press keeps: those whose keys are still there, less those it masks."""
    from transformers import DynamicCache

    for module in model.modules():
        module.masked_key_indices = None
    cache: Any = DynamicCache()
    with press_of(case, budget)(model):
        model(ids, past_key_values=cache)
    kept = []
    for layer, key in zip(cache.layers, keys, strict=True):
        same = (layer.keys[0][:, :, None] == key[:, None]).all(-1)  # [H, kept, all]
        assert same.sum(-1).eq(1).all(), "a key was changed, or stands there twice"
        kept.append([set(head.nonzero()[:, 1].tolist()) for head in same])
    for module, heads in zip((layer.self_attn for layer in model.model.layers), kept, strict=True):
        _, masked_heads, masked = getattr(module, "masked_key_indices", None) or ((), (), ())
        for head, at in zip(masked_heads, masked, strict=True):
            heads[int(head)].discard(int(at))
    return [[sorted(head) for head in heads] for heads in kept]


def press_of(case: Case, budget: int) -> Any:
    """The press of a case, with the ratio of which it makes exactly this budget."""
    import kvpress

    # PyramidKV takes the number as it is, KVzip rounds down what leaves, the others what stays.
    rounded = {"PyramidKV": 0.0, "KVzip": -0.01}.get(case.press, 0.5)
    ratio = {"compression_ratio": 1 - (budget + rounded) / TOKENS}
    make = getattr(kvpress, f"{case.press}Press")
    if case.press == "AdaKV":
        return make(press=kvpress.SnapKVPress(**ratio, **SNAP_ARGUMENTS), **case.arguments)
    return make(**ratio, **case.arguments)


def compare(folder: Path) -> list[dict[str, Any]]:
    """One row for each family, case and budget."""
    rows = []
    for family in FAMILIES:
        a, b = (json.loads((folder / family / f"{side}.json").read_text()) for side in ("ours", "theirs"))
        for (case, budget), mine, other in zip(RUNS, a["kept"], b["kept"], strict=True):
            about = {"family": family, "budget": budget, "case": case.name, "differs": case.differs}
            rows.append({**about, **compared(mine, other, case.differs)})
        print(f"{family}: cached keys of the two transformers differ by at most {b['apart']:.1e}")
    return rows


def compared(mine: Kept, other: Kept, differs: str) -> dict[str, Any]:
    """What there is to say about two kept sets."""
    heads = (pair for layers in zip(mine, other, strict=True) for pair in zip(*layers, strict=True))
    pairs = [(set(one), set(two)) for one, two in heads]
    equal = all(one == two for one, two in pairs)
    nested = all(one <= two or two <= one for one, two in pairs)
    last = all(one == two or (two - one == {TOKENS - 1} and len(one - two) == 1) for one, two in pairs)
    return {
        "verdict": "equal" if equal else "nested" if nested else "by the last" if last else "different",
        "shared": sum(len(one & two) for one, two in pairs) / sum(len(two) for _, two in pairs),
        "rows": [[[len(head) for head in layer] for layer in side] for side in (mine, other)],
        "expected": equal or (bool(differs) and (nested or last)),
    }


def show(rows: list[dict[str, Any]]) -> None:
    """Print the table, and for each known difference what was measured."""
    print(f"\n{'model':6} {'budget':>6}  {'kept sets':11} {'shared':>6}  method")
    for one in rows:
        print(f"{one['family']:6} {one['budget']:6}  {one['verdict']:11} {one['shared']:6.1%}  {one['case']}")
    for case in CASES:
        if case.differs:
            print(f"\n{case.name}: {case.differs}.")
        for one in rows:
            if one["case"] == case.name and one["verdict"] == "nested" and one["family"] == FAMILIES[0]:
                ours, theirs = (" ".join("+".join(map(str, layer)) for layer in side) for side in one["rows"])
                print(
                    f"  budget {one['budget']}, rows of the heads, layer by layer: {ours}; kvpress {theirs}"
                )


def main() -> int:
    """Run both sides and print the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--environment", type=Path, help="default: a folder in the user's cache")
    parser.add_argument("--ours", type=Path, metavar="FOLDER", help="write our side there, and stop")
    parser.add_argument("--theirs", type=Path, metavar="FOLDER", help="write the side of kvpress there")
    given = parser.parse_args()
    if given.ours or given.theirs:
        (ours if given.ours else theirs)(given.ours or given.theirs)
        return 0
    from kvexp.bench.kvpress import default_folder, environment

    python = environment((given.environment or default_folder()).absolute())
    with tempfile.TemporaryDirectory(prefix="kvexp-") as folder:
        for which, flag in ((sys.executable, "--ours"), (python, "--theirs")):
            subprocess.run([which, __file__, flag, folder], check=True)
        rows = compare(Path(folder))
    show(rows)
    Path("outputs").mkdir(exist_ok=True)
    Path("outputs/conformance_kvpress.json").write_text(json.dumps(rows, indent=2) + "\n")
    return 0 if all(one["expected"] for one in rows) else 1


if __name__ == "__main__":
    raise SystemExit(main())
