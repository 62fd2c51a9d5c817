"""The picture of a grid: a point for each row, at its storage and its mean over seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvexp.report import plot


def test_points_stand_where_the_records_say(
    make_record: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("matplotlib")
    drawn: list[Any] = []
    write = plot.saved

    def kept(figure: Any, *args: Any, **kwargs: Any) -> Path:
        drawn.append(figure)
        return write(figure, *args, **kwargs)

    monkeypatch.setattr(plot, "saved", kept)
    records = []
    for seed, accuracy, stored in ((0, 0.5, 100.0), (1, 0.7, 300.0)):
        record = make_record("asm", seed=seed)
        both = {"value": accuracy, "stderr": 0.1, "n": 4, "higher_is_better": True}
        record["metrics"] = {"accuracy": both, "accuracy_calibrated": both}
        record["cache"]["kv_token_equivalents"] = stored
        records.append(record)
    path = plot.storage_plot(records, tmp_path / "deep" / "picture.png")
    assert path.read_bytes().startswith(b"\x89PNG")
    (figure,) = drawn
    for axis in figure.axes:
        (x,), (y,) = axis.containers[0].lines[0].get_data()
        assert (float(x), float(y)) == pytest.approx((200.0, 0.6))
