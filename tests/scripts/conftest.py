from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).parents[2] / "scripts"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Any]:
    """Import a script by its name, as Python finds it when it runs one."""
    monkeypatch.syspath_prepend(str(SCRIPTS))
    return importlib.import_module


@pytest.fixture(scope="session")
def words(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """What every cell of a test is: a tiny model, and statistics that are measured once for all of them."""
    folder = tmp_path_factory.mktemp("scripts")
    yield [
        "model=tiny-llama",
        "calibration.tokens=300",
        f"store_dir={folder / 'store'}",
        f"output_dir={folder / 'outputs'}",
    ]
