"""Where the tokens of a batch of contexts stand, and which of them belong to units that are reused.

A *column* is a place in the batch: contexts are padded on the left to one width W, tokens of a question that
is asked about each stand in the T columns behind, and one more column takes what belongs nowhere. The rotary
*position* of a token counts real tokens only.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kvexp.prompt import Context

HEADER, NOWHERE = -1, -2


@dataclass(frozen=True)
class Unit:
    """A unit of text: chunk of context `sequence`, in the columns `start`, ..., `start + length - 1`.

    `number` counts units over the batch, `at` is the index of the chunk in its context.
    """

    number: int
    sequence: int
    at: int
    start: int
    length: int

    @property
    def columns(self) -> slice:
        """The columns of its tokens."""
        return slice(self.start, self.start + self.length)


@dataclass(frozen=True)
class Geometry:
    """The columns of a batch: ids, positions and units [B, C] int64, real [B, C] bool, C = W + T + 1.

    `units_of` holds the number of a column's unit, HEADER for the exact prefix, NOWHERE elsewhere.
    """

    contexts: tuple[Context, ...]
    queries: tuple[tuple[int, ...], ...]  # one for each context, or none
    units: tuple[Unit, ...]
    width: int
    ids: torch.Tensor
    positions: torch.Tensor
    real: torch.Tensor
    units_of: torch.Tensor

    @classmethod
    def of(
        cls, contexts: Sequence[Context], queries: Sequence[Sequence[int]], device: torch.device
    ) -> Geometry:
        """Lay out `contexts`, with one query for each, or with none."""
        width = max(map(len, contexts))
        columns = width + max(map(len, queries), default=0) + 1
        ids = torch.zeros(len(contexts), columns, dtype=torch.long)
        real = torch.zeros_like(ids, dtype=torch.bool)
        units_of = torch.full_like(ids, NOWHERE)
        units: list[Unit] = []
        for b, context in enumerate(contexts):
            start = width - len(context)
            query = queries[b] if queries else ()
            text = [*context.ids, *query]
            ids[b, start : start + len(text)] = torch.tensor(text, dtype=torch.long)
            real[b, start : start + len(text)] = True
            units_of[b, start : start + len(context.header)] = HEADER
            start += len(context.header)
            for at, chunk in enumerate(context.chunks):
                if chunk:
                    unit = Unit(len(units), b, at, start, len(chunk))
                    units_of[b, unit.columns] = unit.number
                    units.append(unit)
                    start += len(chunk)
        positions = (real.cumsum(1) - 1).clamp(min=0)
        ids, positions, real, units_of = (x.to(device) for x in (ids, positions, real, units_of))
        texts = tuple(tuple(query) for query in queries)
        return cls(tuple(contexts), texts, tuple(units), width, ids, positions, real, units_of)

    @property
    def batch(self) -> int:
        """B."""
        return len(self.contexts)

    @property
    def nowhere(self) -> int:
        """The column of what belongs nowhere."""
        return self.ids.shape[1] - 1

    @property
    def padded(self) -> bool:
        """Whether contexts differ in length."""
        return len({len(context) for context in self.contexts}) > 1

    def first(self, sequence: int) -> int:
        """Return the column of a context's first token."""
        return self.width - len(self.contexts[sequence])

    def in_units(self) -> torch.Tensor:
        """Return which columns hold tokens of units, [B, C] bool."""
        return self.units_of >= 0

    def in_context(self) -> torch.Tensor:
        """Return which columns hold tokens of contexts, [B, C] bool."""
        return self.units_of >= HEADER

    def in_query(self) -> torch.Tensor:
        """Return which columns hold tokens of the queries, [B, C] bool."""
        found = self.real.clone()
        found[:, : self.width] = False
        return found
