"""The batches of a task, divided among the processes that work on it, and none of them twice.

Batches are planned from the cell alone, so that each gives the same samples wherever it runs; they are whole
or not there. A context that several batches ask about is encoded on one rank, where there are enough.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import Any, TypeVar

from kvexp.crew.crew import Crew
from kvexp.progress import track
from kvexp.report.folder import RunFolder

Batch = TypeVar("Batch")


def score_batches(
    folder: RunFolder,
    crew: Crew,
    batches: Sequence[Batch],
    ids: Sequence[Sequence[str]],
    contexts: Sequence[Hashable],
    order: Sequence[str],
    score: Callable[[Batch], list[dict[str, Any]]],
    what: str,
) -> int:
    """Score this rank's share of the batches that are not on disk, and return how many are in it.

    `ids` and `contexts` are of each batch. Samples are on disk when a batch is done; when all are, rank 0
    puts them into `order`.
    """
    left = None
    if crew.first:
        left = [] if folder.settled(order) else folder.resume(ids)
    left = crew.broadcast(left)
    mine = divided([contexts[number] for number in left], crew.world)[crew.rank]
    if not crew.first:
        folder.help(crew.rank, [ids[left[place]] for place in mine])
    for place in track(mine, what, unit="batches"):
        folder.append(score(batches[left[place]]))
    crew.barrier()
    if crew.first:
        folder.settle(order)
    return len(mine)


def divided(contexts: Sequence[Hashable], ranks: int) -> list[list[int]]:
    """Return the places of each rank, in order, as even as whole contexts allow.

    The batches of a context go to one rank, the one that has fewest so far (ties to the lower rank), unless
    there are fewer contexts than ranks: then they are dealt out one by one.
    """
    groups: dict[Hashable, list[int]] = {}
    for place, context in enumerate(contexts):
        groups.setdefault(context, []).append(place)
    if len(groups) < ranks:
        groups = {place: [place] for place in range(len(contexts))}
    shares: list[list[int]] = [[] for _ in range(ranks)]
    for group in groups.values():
        min(shares, key=len).extend(group)
    return [sorted(share) for share in shares]
