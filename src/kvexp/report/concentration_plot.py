"""Pictures of query concentration: how narrow heads are, which bands matter, what distances they prefer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from kvexp.report.figures import pyplot, saved

Points = Mapping[str, Any]  # names of `dominant_points` to complex tensors [T]


def histogram(values: Mapping[str, Any], path: Path) -> Path:
    """Draw how many heads have which R, for each definition: name to numbers of all heads."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4.2))
    for name, heads in values.items():
        axis.hist(_array(heads), bins=50, range=(0, 1), histtype="step", linewidth=1.6, label=name)
    axis.set_xlabel("R, mean resultant length before RoPE")
    axis.set_ylabel("heads")
    axis.legend(frameon=False)
    return saved(figure, path)


def heatmap(shares: Any, path: Path) -> Path:
    """Draw what each band contributes to a head's logits: shares [heads, F], heads in order of layers."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 5.5))
    image = axis.imshow(_array(shares), aspect="auto", interpolation="nearest", cmap="viridis")
    figure.colorbar(image, label="share of C")
    axis.set_xlabel("band, from fast to slow")
    axis.set_ylabel("query head, layer by layer")
    return saved(figure, path)


def curves(distances: Any, heads: Mapping[str, tuple[Any, Any]], path: Path) -> Path:
    """Draw logits over distance: for each head (its label) what means foretell, and the true mean."""
    plt = pyplot()
    columns = min(3, len(heads))
    rows = -(-len(heads) // columns)
    figure, axes = plt.subplots(rows, columns, figsize=(4 * columns, 2.9 * rows), squeeze=False)
    for axis, (label, (predicted, true)) in zip(axes.flat, heads.items(), strict=False):
        axis.semilogx(_array(distances), _array(true), label="true mean")
        axis.semilogx(_array(distances), _array(predicted), linestyle="--", label="from the means")
        axis.set_title(label, fontsize=9)
    for axis in axes.flat[len(heads) :]:
        axis.set_visible(False)
    axes[0, 0].legend(frameon=False, fontsize=8)
    figure.supxlabel("distance in tokens")
    figure.supylabel("logit before scaling")
    return saved(figure, path)


def scatter(points: Points, title: str, path: Path) -> Path:
    """Draw the dominant band of a head before and after RoPE, its queries and keys as points of the plane."""
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(9, 4.4))
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
    return saved(figure, path)


def _array(values: Any) -> Any:
    """Return a tensor as the array that matplotlib wants; anything else as it is."""
    return values.cpu().numpy() if hasattr(values, "cpu") else values
