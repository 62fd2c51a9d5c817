"""Pictures of concentration are drawn from plain numbers, or refused with a sentence."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from kvexp.errors import UserError
from kvexp.report import concentration_plot as plot

PNG = b"\x89PNG"


def test_each_picture_is_a_png(tmp_path: Path) -> None:
    numbers = torch.Generator().manual_seed(1)
    points = {
        name: torch.randn(9, generator=numbers, dtype=torch.complex64)
        for name in ("queries", "keys", "turned_queries", "turned_keys")
    }
    heads = {f"head {i}": (torch.arange(3.0), torch.arange(3.0) * i) for i in range(4)}
    drawn = [
        plot.histogram({"dominant": torch.rand(20), "plain": torch.rand(20)}, tmp_path / "new" / "a.png"),
        plot.heatmap(torch.rand(6, 4), tmp_path / "b.png"),
        plot.curves(torch.tensor([1, 2, 4]), heads, tmp_path / "c.png"),
        plot.scatter(points, "layer 1", tmp_path / "d.png"),
    ]
    for path in drawn:
        assert path.read_bytes().startswith(PNG) and path.stat().st_size > 5000


def test_without_matplotlib_a_sentence_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match=r"pip install 'kvexp\[report\]'"):
        plot.heatmap(torch.rand(2, 2), tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
