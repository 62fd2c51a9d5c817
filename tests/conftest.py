"""What holds for every test: Triton's interpreter where there is no GPU, and logging as it was found."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator

import pytest
import torch

# Triton has to know before anything imports it.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


@pytest.fixture(autouse=True)
def logging_as_found() -> Iterator[None]:
    """Take away the handlers that a run in this process leaves: their streams end with its test."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = [handler for handler in root.handlers if handler in handlers]
    root.setLevel(level)
