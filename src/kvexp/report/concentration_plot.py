"""Pictures of query concentration: how narrow heads are, which bands matter, what distances they prefer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.errors import UserError

Points = Mapping[str, Any]  # names of `dominant_points` to complex tensors [T]


def histogram(values: Mapping[str, Any], path: Path) -> Path:
    """Draw how many heads have which R, for each definition: name to numbers of all heads."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 4.2))
    for name, heads in values.items():
        axis.hist(_array(heads), bins=50, range=(0, 1), histtype="step", linewidth=1.6, label=name)
    axis.set_xlabel("R, mean resultant length before RoPE")
    axis.set_ylabel("heads")
    axis.legend(frameon=False)
    return _saved(pyplot, figure, path)


def heatmap(shares: Any, path: Path) -> Path:
    """Draw what each band contributes to a head's logits: shares [heads, F], heads in order of layers."""
    pyplot = _pyplot()
    figure, axis = pyplot.subplots(figsize=(7, 5.5))
    image = axis.imshow(_array(shares), aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, label="share of C")
    axis.set_xlabel("band, from fast to slow")
    axis.set_ylabel("query head, layer by layer")
    return _saved(pyplot, figure, path)


def curves(distances: Any, heads: Mapping[str, tuple[Any, Any]], path: Path) -> Path:
    """Draw logits over distance: for each head (its label) what means foretell, and the true mean."""
    pyplot = _pyplot()
    columns = min(3, len(heads))
    rows = -(-len(heads) // columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(4 * columns, 2.9 * rows), squeeze=False)
    for axis, (label, (predicted, true)) in zip(axes.flat, heads.items(), strict=False):
        axis.semilogx(_array(distances), _array(true), label="true mean")
        axis.semilogx(_array(distances), _array(predicted), linestyle="--", label="from the means")
        axis.set_title(label, fontsize=9)
    for axis in axes.flat[len(heads) :]:
        axis.set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.supxlabel("distance in tokens")
    figure.supylabel("logit before scaling")
    return _saved(pyplot, figure, path)


def scatter(points: Points, title: str, path: Path) -> Path:
    """Draw the dominant band of a head before and after RoPE, its queries and keys as points of the plane."""
    pyplot = _pyplot()
    figure, axes = pyplot.subplots(1, 2, figsize=(9, 4.4))
    for axis, prefix, name in zip(axes, ("", "turned_"), ("before RoPE", "after RoPE"), strict=True):
        for what in ("queries", "keys"):
            found = _array(points[prefix + what])
            axis.scatter(found.real, found.imag, s=4, alpha=0.5, label=what)
        axis.axhline(0, color="grey", linewidth=0.5)
        axis.axvline(0, color="grey", linewidth=0.5)
        axis.set_title(name)
        axis.set_aspect("equal", adjustable="datalim")
    axes[0].legend(frameon=False)
    figure.suptitle(title)
    return _saved(pyplot, figure, path)


def _pyplot() -> Any:
    """Return matplotlib's pyplot, drawing into files; UserError where it is not installed."""
    try:
        import matplotlib
    except ImportError as error:
        raise UserError(
            "plots need matplotlib, which is not installed: pip install 'kvexp[report]', or read the JSON"
        ) from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _array(values: Any) -> Any:
    """Return a tensor as the array that matplotlib wants; anything else as it is."""
    return values.cpu().numpy() if hasattr(values, "cpu") else values


def _saved(pyplot: Any, figure: Any, path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return path
