"""banking77: intents of the customers of a bank (Casanueva et al., 2020)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.tasks.published import PublishedTask


@dataclass(frozen=True)
class Banking77(PublishedTask):
    """77 fine-grained intents; models of 135M parameters learn 12 of them (`n_labels=12`) from a context."""

    id: ClassVar[str] = "banking77"
    header: ClassVar[str] = "Classify the query of a bank customer by its intent.\n"
