"""clinc150: requests to an assistant (Larson et al., 2019); those outside its scope are left out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kvexp.tasks.published import PublishedTask


@dataclass(frozen=True)
class Clinc150(PublishedTask):
    """150 intents of ten domains."""

    id: ClassVar[str] = "clinc150"
    header: ClassVar[str] = "Classify the query to an assistant by its intent.\n"
