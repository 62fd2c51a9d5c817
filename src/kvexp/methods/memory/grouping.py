"""Which query heads make one lookup sample, and what an entry then costs (methods: layouts of ASM).

With Hq query heads, Hkv KV heads and G = Hq / Hkv, an entry serves `m` heads of a group (m divides G):
`pooled` m = 1, `pairs` m = 2, `group` m = G, each with one codebook per KV head; `shared` has one codebook
per layer whose samples join the i-th m heads of every group (m = G unless set). A token gives G / m samples
to each codebook.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from kvexp.errors import UserError

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Grouping:
    """How [n, Hq, D] tensors of a layer split into samples of its codebooks."""

    q_heads: int
    kv_heads: int
    per_entry: int  # m
    shared: bool

    @classmethod
    def of(cls, layout: str, q_heads: int, kv_heads: int, per_entry: int | None = None) -> Grouping:
        """Resolve a layout's name for a model; `per_entry` overrides how many heads of a group join."""
        group = q_heads // kv_heads
        if layout == "auto":
            layout = "pairs" if group % 2 == 0 else "pooled"
        width = per_entry or {"pooled": 1, "pairs": 2, "group": group, "shared": group}[layout]
        if group % width:
            sizes = ", ".join(str(m) for m in range(1, group + 1) if group % m == 0)
            what = f"method.heads_per_entry={width}" if per_entry else f"method.layout={layout}"
            raise UserError(
                f"{what} joins {width} heads, which does not divide this model's group of {group}:"
                f" use method.heads_per_entry with one of {sizes}"
            )
        return cls(q_heads, kv_heads, width, layout == "shared")

    @property
    def codebooks(self) -> int:
        """Codebooks in a layer."""
        return 1 if self.shared else self.kv_heads

    @property
    def heads(self) -> int:
        """Query heads that one entry serves."""
        return self.per_entry * (self.kv_heads if self.shared else 1)

    @property
    def samples(self) -> int:
        """Samples that one token gives to each codebook."""
        return self.q_heads // self.kv_heads // self.per_entry

    def split(self, x: Tensor) -> Tensor:
        """[n, Hq, ...] -> [codebooks, n * samples, heads, ...], token-major."""
        n, rest = x.shape[0], x.shape[2:]
        x = x.reshape(n, self.kv_heads, self.samples, self.per_entry, *rest)
        if self.shared:
            return x.transpose(1, 2).reshape(1, n * self.samples, self.heads, *rest)
        return x.transpose(0, 1).reshape(self.kv_heads, n * self.samples, self.per_entry, *rest)

    def join(self, x: Tensor) -> Tensor:
        """[codebooks, n * samples, heads, ...] -> [n, Hq, ...], the inverse of `split`."""
        n, rest = x.shape[1] // self.samples, x.shape[3:]
        if self.shared:
            x = x.reshape(n, self.samples, self.kv_heads, self.per_entry, *rest).transpose(1, 2)
        else:
            x = x.reshape(self.kv_heads, n, self.samples, self.per_entry, *rest).transpose(0, 1)
        return x.reshape(n, self.q_heads, *rest)

    def entries(self, budget: int, match: str, key_dim: int, value_dim: int, row: int) -> int:
        """Return K for a budget in KV rows: equal entries, equal key traffic or equal storage.

        `row` is the numbers that the model caches for a token in this layer: Hkv (D + Dv), or with MLA one
        latent, all read at each step.
        """
        traffic, storage = self.entry_numbers(key_dim, value_dim)
        return max(1, budget * row // {"entries": row, "traffic": traffic, "storage": storage}[match])

    def entry_numbers(self, key_dim: int, value_dim: int) -> tuple[int, int]:
        """Numbers of one entry in all codebooks of a layer: those read at each step (its keys), and all.

        For each KV head an entry has m D key numbers, and m Dv output numbers and m log Z, of which only the
        chosen entry's are read.
        """
        per_entry = self.kv_heads * self.per_entry
        return per_entry * key_dim, per_entry * (key_dim + value_dim + 1)
