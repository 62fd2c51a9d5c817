"""Whether queries gather around a mean before RoPE, and how much of attention that mean foretells.

    python scripts/triattention_diagnostics.py [model=NAME] [calibration=stdlib calibration.tokens=24000]
        [data_dir=PATH] [output_dir=outputs]

The words are those of `python -m kvexp`. Means are measured on `calibration.tokens` tokens of the corpus; the
tokens that follow them there are the unseen text, 4 parts of 1,536 keys and 16 queries. Printed, and written
to OUTPUT_DIR/triattention_diagnostics/MODEL/report.json: four definitions of the concentration R of a head
with the shares above 0.90 and 0.95, and the correlations of predicted with true logits. Beside it stand
pictures (with the extra `kvexp[report]`): R of all heads, contributions of bands, logits over distance, and
the dominant band of one head before and after RoPE.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from kvexp import model
from kvexp.calibration.prepare import draw_segments
from kvexp.cli import settings_of
from kvexp.errors import UserError
from kvexp.measure.concentration import BandMeter, LayerBands, dominant_points, summary
from kvexp.measure.reconstruction import ReconstructionMeter
from kvexp.methods.eviction.reconstruction import pearson
from kvexp.progress import track
from kvexp.report import concentration_plot as plot

LENGTH, QUERIES, PARTS = 1536, 16, 4
CURVES = 6  # heads whose logits are drawn over distance, from the least to the most predictable
R_BARS, CORRELATION_BARS = (0.90, 0.95), (0.5, 0.7)


def main(words: Sequence[str]) -> int:
    """Measure, compare, print, write, draw."""
    try:
        return _run(list(words))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2


def _run(words: list[str]) -> int:
    [run] = settings_of(["method=triattention", *words])
    loaded = model.load(run.model, needs_full_layer=True)
    segments, parts = _corpus(run, loaded)
    meter = BandMeter(loaded.model)
    for segment in track(segments, "measuring means", len(segments)):
        meter([segment])
    layers = meter.layers()
    if not layers:
        raise UserError("no full-attention layer of this model rotates: there are no bands to look at")
    compared = ReconstructionMeter(loaded.model, layers, LENGTH, QUERIES)
    for part in track(parts, "comparing logits", len(parts)):
        compared(part)
    report = {
        "words": words,
        "model": loaded.name,
        "model_sha256": loaded.sha256,
        "calibration_tokens": sum(map(len, segments)),
        **_concentration(layers),
        **_reconstruction(layers, compared),
    }
    folder = run.output_dir / "triattention_diagnostics" / run.model.label
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "report.json").write_text(json.dumps(report, indent=2) + "\n")
    print(json.dumps({k: v for k, v in report.items() if k != "heads"}, indent=2))
    try:
        _draw(layers, compared, loaded.model, parts[0], folder)
    except UserError as error:
        print(error, file=sys.stderr)
    return 0


def _corpus(run: Any, loaded: Any) -> tuple[list[Any], list[Any]]:
    """Return the segments that means are measured on, and the unseen parts behind them."""
    spec, size = run.calibration, LENGTH + QUERIES
    tokens = spec.tokens + PARTS * size + spec.segment  # a segment more: none is on both sides
    segments = draw_segments(replace(spec, tokens=tokens), loaded, run.data_dir)
    seen, cut = 0, 0
    while seen < spec.tokens:
        seen += len(segments[cut])
        cut += 1
    unseen = [token for segment in segments[cut:] for token in segment]
    return segments[:cut], [unseen[at : at + size] for at in range(0, PARTS * size, size)]


def _concentration(layers: dict[int, LayerBands]) -> dict[str, Any]:
    found: dict[str, list[torch.Tensor]] = {}
    for layer in layers.values():
        for name, values in layer.concentrations().items():
            found.setdefault(name, []).append(values)
    stacked = {name: torch.stack(values) for name, values in found.items()}
    dominant = torch.cat([layer.dominant for layer in layers.values()])
    share = torch.cat([layer.top2_share() for layer in layers.values()])
    return {
        "concentration": {name: summary(values, R_BARS) for name, values in stacked.items()},
        "top2_share_of_contributions": float(share.mean()),
        "dominant_bands": torch.bincount(dominant).tolist(),
        "heads": {"layers": list(layers), **{name: values.tolist() for name, values in stacked.items()}},
    }


def _reconstruction(layers: dict[int, LayerBands], compared: ReconstructionMeter) -> dict[str, Any]:
    found = compared.correlations()
    weighted = torch.cat([layer.concentrations()["weighted"] for layer in layers.values()])
    together = pearson(weighted, found["trig"].flatten())
    return {
        "reconstruction": {name: summary(values, CORRELATION_BARS) for name, values in found.items()},
        "weighted_r_with_trig_over_heads": float(together),
        "trig_by_layer": dict(zip(map(str, layers), found["trig"].mean(-1).tolist(), strict=True)),
    }


def _draw(
    layers: dict[int, LayerBands], compared: ReconstructionMeter, net: Any, text: Sequence[int], folder: Path
) -> None:
    found = [layer.concentrations() for layer in layers.values()]
    names = ("dominant", "top2", "weighted", "plain")
    plot.histogram({name: torch.cat([one[name] for one in found]) for name in names}, folder / "heads.png")
    counts = {layer.bands.count for layer in layers.values()}
    if len(counts) == 1:
        shares = torch.cat([layer.contributions for layer in layers.values()])
        plot.heatmap(shares / shares.sum(-1, keepdim=True), folder / "bands.png")
    r = compared.correlations()["log_distance"]
    order, indices = r.flatten().argsort().tolist(), list(layers)
    chosen = [order[round(i * (len(order) - 1) / (CURVES - 1))] for i in range(CURVES)]
    heads = {}
    for place in dict.fromkeys(chosen):
        index, head = indices[place // r.shape[1]], place % r.shape[1]
        predicted, true = compared.curves()[index]
        heads[f"layer {index} head {head}, r = {float(r.flatten()[place]):.2f}"] = predicted[head], true[head]
    plot.curves(compared.distances, heads, folder / "curves.png")
    index, head = indices[order[-1] // r.shape[1]], order[-1] % r.shape[1]
    points = dominant_points(net, layers, index, head, text)
    band = int(layers[index].dominant[head])
    plot.scatter(points, f"layer {index}, head {head}, band {band}", folder / "scatter.png")


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
