"""Rows grouped into pages of consecutive positions, and what a query may find in each."""

from __future__ import annotations

import torch

from kvexp.cache.rows import over_heads


class Pages:
    """The pages that a head holds rows of, numbered in their order from 0; N is the most that any head has.

    A page has `size` positions, counted from where the prompt ends in both directions, so that no page has
    rows of the prompt and decoded ones.

    numbers [B, H, S]: each row's page; rows that do not count have N, which is left out of every result.
    """

    def __init__(
        self, positions: torch.Tensor, prompt: torch.Tensor, size: int, valid: torch.Tensor | None
    ) -> None:
        """Group rows at ascending `positions` [B, H, S]; `prompt` [B or 1] tokens come before the decoded."""
        self.size = size
        self.ahead = positions.long() - prompt[:, None, None]
        blocks = self.ahead.div(size, rounding_mode="floor")
        none = int(torch.iinfo(blocks.dtype).min)
        there = blocks if valid is None else blocks.masked_fill(~valid, none)
        before = torch.cat([there.new_full((*there.shape[:2], 1), none), there], dim=2)[..., :-1]
        numbers = (there > before.cummax(2).values).cumsum(2) - 1
        self.count = int(numbers.amax()) + 1
        self.numbers = numbers if valid is None else numbers.masked_fill(~valid, self.count)

    def largest(self, rows: torch.Tensor) -> torch.Tensor:
        """Return for each page [B, H, N] the largest that its rows have [B, H, S]; -inf where it is empty."""
        start = rows.new_full((*rows.shape[:2], self.count + 1), -torch.inf)
        return start.scatter_reduce(2, self.numbers, rows, "amax")[..., : self.count]

    def spread(self, pages: torch.Tensor) -> torch.Tensor:
        """Return for each row [B, H, S] what its page has [B, H, N]; 0 for rows that do not count."""
        rest = pages.new_zeros(*pages.shape[:2], 1)
        return torch.cat([pages, rest], dim=2).gather(2, self.numbers)

    def exist(self, decoded: bool = False) -> torch.Tensor:
        """Return which pages have a row (a decoded one), [B, H, N] bool."""
        found = self.largest(self.ahead.float())
        return found >= 0 if decoded else found.isfinite()

    def bounds(self, queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
        """Return the largest q . k that the channels of a page's keys allow, [B, Hq, N]; -inf where empty.

        Of each channel a page knows the smallest and the largest value; a product takes whichever is larger.
        queries [B, Hq, D], keys [B, Hk, S, D], in float32 at least.
        """
        batch, heads, rows, width = keys.shape
        at = over_heads(self._table(rows), heads).expand(batch, heads, -1)
        of_pages = keys.gather(2, at[..., None].expand(-1, -1, -1, width)).unflatten(2, (-1, self.size))
        most, least = of_pages.amax(3), of_pages.amin(3)
        grouped = queries.reshape(batch, heads, -1, width)
        found = grouped.clamp(min=0) @ most.transpose(2, 3) + grouped.clamp(max=0) @ least.transpose(2, 3)
        empty = over_heads(~self.exist(), heads)[:, :, None]
        return found.masked_fill(empty, -torch.inf).flatten(1, 2)

    def _table(self, rows: int) -> torch.Tensor:
        """The rows of each page, [B, H, N * size]: where one is missing another of the page stands twice."""
        own = torch.arange(rows, device=self.numbers.device).expand(self.numbers.shape)
        one = own.new_zeros(*own.shape[:2], self.count + 1).scatter_reduce(2, self.numbers, own, "amax")
        table = one[..., None].repeat(1, 1, 1, self.size).flatten(2)
        table = table.scatter(2, self.numbers * self.size + self.ahead % self.size, own)
        return table[..., : self.count * self.size]
