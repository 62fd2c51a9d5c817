"""What an evicting cache and its forks really held over time."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from kvexp.cache.kv_cache import KVCache


@dataclass
class Meter:
    """Rows and bytes over all forks of a cache: peaks, and means between forwards.

    Peaks are of rows that are held when there are most, before any leave: layers evict one after another, and
    the peak in bytes is of all of them at the fullest moment between two. Copies that a layer makes while it
    compacts itself are not counted.
    """

    entries_peak: int = 0  # rows per KV head of the fullest layer
    prompt_peak: int = 0  # the same while the prompt is read
    entries_sum: float = 0.0  # of the mean over layers, between forwards
    forwards: int = 0
    bytes_peak: int = 0  # of all layers together, for each sequence
    prompt_bytes: int = 0  # the same while the prompt is read
    scored: int = 0  # layers that were scored and compacted
    storages: set[str] = field(default_factory=set)

    def hold(self, rows: int, prompt: bool) -> None:
        """Note how many rows per KV head a layer holds; `prompt`: while the prompt is read."""
        if prompt:
            self.prompt_peak = max(self.prompt_peak, rows)
        else:
            self.entries_peak = max(self.entries_peak, rows)

    def weigh(self, held: float, prompt: bool) -> None:
        """Note how many bytes a sequence holds."""
        if prompt:
            self.prompt_bytes = max(self.prompt_bytes, round(held))
        else:
            self.bytes_peak = max(self.bytes_peak, round(held))

    def measure(self, rows: list[int]) -> None:
        """Note what is held between two forwards, `rows` per KV head of each full-attention layer."""
        self.entries_peak = max(self.entries_peak, *rows)
        self.entries_sum += sum(rows) / len(rows)
        self.forwards += 1

    def note_storage(self, ragged: bool, masked: bool) -> None:
        """Remember how the kept rows are stored."""
        self.storages.add("ragged" if ragged else "masked" if masked else "rectangular")

    def note_packed(self, cache: KVCache) -> None:
        """Remember that rows are packed, and count the bytes anew: `cache` was measured before they were."""
        self.storages.add("packed")
        self.bytes_peak = cache.sequence_bytes() if self.forwards else 0

    def summary(self) -> dict[str, Any]:
        """Return the measured part of a record's `cache` section."""
        return {
            "entries_peak": self.entries_peak,
            "entries_peak_prompt": self.prompt_peak,
            "entries_mean": self.entries_sum / max(1, self.forwards),
            "bytes_peak": self.bytes_peak,
            "bytes_peak_prompt": self.prompt_bytes,
            "storage": "+".join(sorted(self.storages)) or "rectangular",
        }
