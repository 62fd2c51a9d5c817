"""Where the rows of a cache layer stand in the sequence, and what transformers asks of it.

Two coordinates, never mixed: a row's *slot* is its column in the whole sequence, pads counted (causality,
padding); its *position* is the rotary one (sliding windows). `seen` counts tokens, `rows` counts rows.
"""

from __future__ import annotations

import torch
from transformers.cache_utils import CacheLayerMixin

MOST = 64  # notes that wait to be joined


class PlacedLayer(CacheLayerMixin):
    """Knows the slots [S] and positions [1 or B, S] of its rows.

    Both are joined only when somebody asks: a step of decoding, which does not, only notes what came.
    """

    is_sliding = False
    keys: torch.Tensor
    values: torch.Tensor
    new: range  # the slots of the newest rows
    q_positions: torch.Tensor  # their positions [1 or B, T]

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen, self.rows = seen, 0
        self._slots = torch.empty(0, dtype=torch.long)
        self._positions = torch.empty(1, 0, dtype=torch.long)
        self._unplaced: list[tuple[range, torch.Tensor]] = []  # slots and positions of rows that came since
        self._left = 0, 0  # where rows have left since, and how many

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        """Take device and dtype from the first rows."""
        self.device, self.dtype = key_states.device, key_states.dtype
        self._slots, self._positions = self._slots.to(self.device), self._positions.to(self.device)
        self.keys, self.values = key_states[..., :0, :], value_states[..., :0, :]
        self.is_initialized = True

    @property
    def q_slots(self) -> torch.Tensor:
        """The slots [T] of the new rows."""
        return torch.arange(self.new.start, self.new.stop, device=self.device)

    @property
    def slots(self) -> torch.Tensor:
        """The slots of the own rows."""
        self._settle()
        return self._slots

    @slots.setter
    def slots(self, slots: torch.Tensor) -> None:
        self._settle()
        self._slots = slots

    @property
    def positions(self) -> torch.Tensor:
        """The positions of the own rows."""
        self._settle()
        return self._positions

    @positions.setter
    def positions(self, positions: torch.Tensor) -> None:
        self._settle()
        self._positions = positions

    def _place(self) -> None:
        """Remember where the new rows stand."""
        if len(self._unplaced) == MOST:
            self._settle()
        self._unplaced.append((self.new, self.q_positions))

    def _leave(self, first: int, count: int) -> None:
        """Remember that `count` rows behind the first `first` have left."""
        if self._left[0] != first:
            self._settle()
        self._left = first, self._left[1] + count

    def _settle(self) -> None:
        """Put down where rows stand that came since the last time, and that others left."""
        if self._unplaced:
            came, self._unplaced = self._unplaced, []
            slots = torch.tensor([slot for new, _ in came for slot in new], device=self.device)
            batch = max(positions.shape[0] for _, positions in came)
            positions = torch.cat([positions.expand(batch, -1) for _, positions in came], dim=-1)
            self._join(slots, positions)
        (first, count), self._left = self._left, (0, 0)
        if count:  # new rows came behind all of these, so that it does not matter which was earlier
            self._slots, self._positions = (
                torch.cat([x[..., :first], x[..., first + count :]], dim=-1)
                for x in (self._slots, self._positions)
            )

    def _join(self, slots: torch.Tensor, positions: torch.Tensor) -> None:
        """Put slots [n] and positions [1 or B, n] behind those of the rows before."""
        self._slots = torch.cat([self._slots, slots])
        batch = max(self._positions.shape[0], positions.shape[0])
        old, new = (x.expand(batch, -1) for x in (self._positions, positions))
        self._positions = torch.cat([old, new], dim=-1)

    def get_seq_length(self) -> int:
        """Tokens seen (not rows stored): transformers takes positions and the uncached rest from it."""
        return self.seen

    def get_max_length(self) -> int:
        """No limit."""
        return -1

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        """(columns, offset) that make transformers ask for a mask of the whole sequence."""
        return self.seen + query_length, 0

    def reset(self) -> None:
        """Refuse: encode the context again instead."""
        raise RuntimeError("a kvexp cache cannot be reset in place: encode the context again")
