from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import pytest


@pytest.fixture
def part() -> Callable[[str], Any]:
    """Import a module of the bench by its name."""
    return lambda name: importlib.import_module(f"kvexp.bench.{name}")


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
