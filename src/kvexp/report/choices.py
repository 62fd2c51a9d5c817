"""Which choices tell runs apart, and the short names under which they are shown."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

Settings = Mapping[str, Any]


def differing(keys: Iterable[str], peers: Sequence[Settings]) -> list[str]:
    """Return those of the flat keys that tell peers apart.

    Where parts of other names are chosen (`task.notes.name`), their knobs (`task.notes.k`) follow from the
    name, and only those are returned that differ between peers of one name.
    """
    found = [key for key in keys if _varies(key, peers)]
    return [key for key in found if not _follows(key, found, peers)]


def short_names(keys: Sequence[str]) -> dict[str, str]:
    """Return the last part of each key, of `task.notes.name` "notes"; the whole key where two agree."""
    short = {key: _last(key) for key in keys}
    counts = Counter(short.values())
    return {key: name if counts[name] == 1 else key for key, name in short.items()}


def _varies(key: str, peers: Sequence[Settings]) -> bool:
    return len({json.dumps(peer.get(key), default=str) for peer in peers}) > 1


def _follows(key: str, found: Sequence[str], peers: Sequence[Settings]) -> bool:
    name = f"{key.rpartition('.')[0]}.name"
    if key == name or name not in found:
        return False
    chosen = {str(peer.get(name)) for peer in peers}
    return not any(_varies(key, [peer for peer in peers if str(peer.get(name)) == one]) for one in chosen)


def _last(key: str) -> str:
    return key.removesuffix(".name").rpartition(".")[2]
