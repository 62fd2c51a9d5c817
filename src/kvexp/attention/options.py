"""How kvexp's attention runs on one model: settings that a run hands to a loaded model, or defaults."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

ATTRIBUTE = "kvexp_options"


@dataclass(frozen=True)
class Options:
    """`backend` of attention that returns its log-sum-exp; `prefill_chunk` tokens of a context a forward.

    `compiled`: decode in compiled steps, see `kvexp.decode`.
    """

    backend: str = "auto"
    prefill_chunk: int = 1024
    compiled: bool = False


def set_options(model: Any, options: Options) -> None:
    """Attach options to a model."""
    setattr(model, ATTRIBUTE, options)


def options_of(model: Any) -> Options:
    """Return a model's options, or the defaults."""
    return getattr(model, ATTRIBUTE, Options())
