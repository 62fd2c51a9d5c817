"""How much attention each row received, added up slowly from what a run's events hold."""

from __future__ import annotations

from collections import defaultdict

from evict import Event


class Received:
    """Attention that each position got, by (layer, KV head), from every query while the row was held."""

    def __init__(self) -> None:
        self.mass: dict[tuple[int, int], dict[int, float]] = defaultdict(lambda: defaultdict(float))
        self.read = 0

    def follow(self, events: list[Event]) -> None:
        """Add up the events that came since the last call."""
        for event in events[self.read :]:
            for head in range(event.queries.shape[0]):
                kv = head // event.group
                summed = event.probabilities(head).sum(0).tolist()
                for position, more in zip(event.positions[kv], summed, strict=True):
                    self.mass[event.place, kv][position] += more
        self.read = len(events)
