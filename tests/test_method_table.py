from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def script() -> Any:
    spec = importlib.util.spec_from_file_location("method_table", ROOT / "scripts" / "method_table.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_readme_has_the_table_of_the_code() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert script().placed(text) == text, "run: python scripts/method_table.py --write"


def test_rows_say_when_and_what() -> None:
    rows = {line.split("|")[1].strip(): line for line in script().table().splitlines()}
    assert "prompt end, every 128 tokens" in rows["`rkv`"] and "latest 8" in rows["`rkv`"]
    assert "| never |" in rows["`keep_all`"]
