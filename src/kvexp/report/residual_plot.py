"""Pictures of the residuals of reused rows: numbers over layers, and spectra, one panel for each encoding."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from kvexp.report.figures import pyplot, saved

NAMES = {"keys": "K before RoPE", "turned_keys": "K after RoPE", "values": "V"}
COLOURS = {"keys": "C0", "turned_keys": "C2", "values": "C1"}
STYLES = {"agentkvshift": "-", "top_unweighted": ":", "random_unweighted": "--", "oracle": "-."}
BOTH = ("keys", "values")

Layers = Mapping[str, Sequence[Mapping[str, Any]]]
"""For each encoding the figures of each layer: `layer[part][name]`, and `layer["removed"][name][part]`."""
Lines = Mapping[str, tuple[Sequence[float], str]]
"""Label to (values, how they are drawn in matplotlib's short form: "C0-")."""


def pictures(layers: Layers, means: Mapping[str, Any], paper: tuple[float, float], folder: Path) -> None:
    """Draw five pictures into `folder`: explained, energy, top1, held_out, spectra (.png).

    `means[encoding][part]` holds the mean spectra, `paper` is the range of what the paper says is explained.
    """
    shares = _joined(_of(layers, "explained", NAMES), _of(layers, "chance", BOTH[:1], ":", ", by chance"))
    label = "residual energy that the mean explains"
    by_layer(shares, label, folder / "explained.png", band=(*paper, "paper"))
    energy = _of(layers, "relative", BOTH)
    by_layer(energy, "residual energy / state energy", folder / "energy.png", log=True)
    top = _joined(_of(layers, "top", BOTH), _of(layers, "top_centred", BOTH, "--", ", centred"))
    by_layer(top, "share of the largest singular direction", folder / "top1.png")
    held_out = {
        one: {
            f"{NAMES[part]}, {name}": ([x["removed"][name][part] for x in found], COLOURS[part] + style)
            for part in BOTH
            for name, style in STYLES.items()
        }
        for one, found in layers.items()
    }
    label = "energy removed on held-out tokens (cut at -1)"
    by_layer(held_out, label, folder / "held_out.png", limits=(-1, 1))
    drawn = {
        one: {
            f"{NAMES[part]}{note}": (parts[part][name], COLOURS[part] + style)
            for part in BOTH
            for name, style, note in (("spectrum", "-", ""), ("centred", "--", ", centred"))
        }
        for one, parts in means.items()
    }
    spectra(drawn, folder / "spectra.png")


def by_layer(
    panels: Mapping[str, Lines],
    label: str,
    path: Path,
    *,
    band: tuple[float, float, str] | None = None,
    log: bool = False,
    limits: tuple[float, float] | None = None,
) -> Path:
    """Draw numbers of layers 0, 1, 2, ...; layer 0 is left out, since nothing is off there.

    `panels`: title to lines. `band`: from, to and label of a grey band. `limits` of the vertical axis.
    Returns the path of the PNG.
    """
    figure, axes = _panels(panels)
    for axis, lines in zip(axes, panels.values(), strict=True):
        for name, (values, style) in lines.items():
            axis.plot(range(1, len(values)), values[1:], style, label=name, linewidth=1.4, markersize=3)
        if band is not None:
            axis.axhspan(band[0], band[1], color="grey", alpha=0.2, label=band[2])
        if log:
            axis.set_yscale("log")
        if limits is not None:
            axis.set_ylim(*limits)
        axis.set_xlabel("layer")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel(label)
    return _saved(figure, axes, path)


def spectra(panels: Mapping[str, Lines], path: Path) -> Path:
    """Draw singular energies, largest first, as shares of all energy of a residual."""
    figure, axes = _panels(panels)
    for axis, lines in zip(axes, panels.values(), strict=True):
        for name, (values, style) in lines.items():
            axis.plot(range(1, len(values) + 1), values, style, label=name, linewidth=1.4)
        axis.set_xscale("log")
        axis.set_xlabel("singular direction")
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("share of a unit's residual energy")
    return _saved(figure, axes, path)


def _of(
    layers: Layers, name: str, parts: Iterable[str], style: str = "-", note: str = ""
) -> dict[str, Lines]:
    return {
        one: {f"{NAMES[p]}{note}": ([x[p][name] for x in found], COLOURS[p] + style) for p in parts}
        for one, found in layers.items()
    }


def _joined(some: dict[str, Lines], more: dict[str, Lines]) -> dict[str, Lines]:
    return {one: {**lines, **more[one]} for one, lines in some.items()}


def _panels(panels: Mapping[str, Lines]) -> tuple[Any, list[Any]]:
    size = (4.6 * len(panels), 4.4)
    figure, axes = pyplot().subplots(1, len(panels), figsize=size, sharey=True, squeeze=False)
    for axis, title in zip(axes[0], panels, strict=True):
        axis.set_title(title)
    return figure, list(axes[0])


def _saved(figure: Any, axes: Sequence[Any], path: Path) -> Path:
    handles, labels = axes[0].get_legend_handles_labels()
    columns = min(4, len(labels))
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=8)
    return saved(figure, path, bottom=0.02 + 0.04 * -(-len(labels) // columns))
