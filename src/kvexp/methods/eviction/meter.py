"""What an evicting cache and its forks really held over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvexp.cache.kv_cache import KVCache


@dataclass
class Meter:
    """Rows and bytes between forwards, over all forks of a cache: peaks, and means over forwards."""

    entries_peak: int = 0  # rows per KV head of the fullest layer
    prompt_peak: int = 0  # the same while the prompt is read, before anything leaves
    rows_peak: int = 0  # of all layers together
    entries_sum: float = 0.0  # of the mean over layers
    forwards: int = 0
    bytes_peak: int = 0  # for each sequence
    scored: int = 0  # layers that were scored and compacted
    storages: set[str] = field(default_factory=set)

    def measure(self, cache: KVCache, rows: list[int]) -> None:
        """Note what the cache holds after a forward; `rows` per KV head of each full-attention layer."""
        full = sum(rows) >= self.rows_peak
        self.entries_peak, self.rows_peak = max(self.entries_peak, *rows), max(self.rows_peak, sum(rows))
        self.entries_sum += sum(rows) / len(rows)
        self.forwards += 1
        if full:  # counting bytes takes a moment, and a cache with fewer rows hardly holds more of them
            self.bytes_peak = max(self.bytes_peak, cache.sequence_bytes())

    def note_storage(self, ragged: bool, masked: bool) -> None:
        """Remember how the kept rows are stored."""
        self.storages.add("ragged" if ragged else "masked" if masked else "rectangular")

    def summary(self) -> dict[str, Any]:
        """Return the measured part of a record's `cache` section."""
        return {
            "entries_peak": self.entries_peak,
            "entries_peak_prompt": self.prompt_peak,
            "entries_mean": self.entries_sum / max(1, self.forwards),
            "bytes_peak": self.bytes_peak,
            "storage": "+".join(sorted(self.storages)) or "rectangular",
        }
