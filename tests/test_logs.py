"""The log of a run, where there is a place for it."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from kvexp.logs import RunLog


@pytest.mark.parametrize("fixed", [".", "log.txt", None])
def test_a_read_only_folder_gets_no_log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fixed: str) -> None:
    path = tmp_path / "log.txt"
    path.write_text("of the first run\n")
    barred = fixed and tmp_path / fixed
    monkeypatch.setattr(os, "access", lambda asked, mode: Path(asked) != barred)
    handler = RunLog(str(path), "utf-8")
    handler.emit(logging.LogRecord("kvexp", logging.INFO, "", 0, "of the second", (), None))
    handler.close()
    assert path.read_text() == "of the first run\n" + ("" if fixed else "of the second\n")
