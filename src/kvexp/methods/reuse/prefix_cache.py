"""Prefix caching: reuse the longest beginning that an earlier prompt had in common, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from kvexp.errors import UserError
from kvexp.methods.reuse.base import StoredMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.cache.chunk_store import ChunkStore
    from kvexp.cache.kv_cache import KVCache
    from kvexp.methods.reuse.forward import Run
    from kvexp.methods.reuse.geometry import Geometry
    from kvexp.methods.reuse.sheet import Piece
    from kvexp.methods.reuse.units import Encoder
    from kvexp.prompt import Context


@dataclass(frozen=True)
class PrefixCache(StoredMethod):
    """Look prompts up in blocks of tokens, from the first on, and compute what follows the last known one.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
    (2023, arXiv 2309.06180). A block is known when the whole text up to its end is, so that the reuse is
    lossless. `hit_rate` in the record is over all tokens of a context, the header too. The contexts of a
    batch are encoded one after the other, so that each finds what those before it left, whatever the batch.
    A store that is too small keeps the beginnings of texts, since a block is found behind them alone; of a
    text that is larger than the store it keeps the first blocks.

    `block`: tokens in a block.
    """

    id: ClassVar[str] = "prefix_cache"
    paper: ClassVar[str] = "Efficient Memory Management for Large Language Model Serving with PagedAttention"

    block: int = 16

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        if self.block < 1:
            raise UserError(f"method.block={self.block} is not possible: use 1 or more tokens")

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
        query: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> KVCache:
        """Return a cache of `context`; several contexts are encoded in turn and become one batch.

        `memory` is a store from `opened`; without one, nothing outlives the call. `query` is not read.
        """
        from kvexp.methods.reuse.joined import joined
        from kvexp.prompt import Context

        encoded = super().encode
        batch = context if isinstance(context, list | tuple) else ()
        contexts = [one for one in batch if isinstance(one, Context)]
        if len(contexts) < 2 or not any(map(len, contexts)):
            return encoded(model, context, memory, budget)
        store = self.opened(model) if memory is None else memory
        return joined(model, contexts, [encoded(model, one, store, budget) for one in contexts])

    def reusable(self, geometry: Geometry) -> Tensor:
        """All tokens of a context."""
        return geometry.in_context()

    def pieces(self, encoder: Encoder, geometry: Geometry) -> list[Piece]:
        """Return the blocks of each context that are known, up to the first that is not."""
        from kvexp.methods.reuse.sheet import Piece

        found = []
        for b, context in enumerate(geometry.contexts):
            known = True
            for at in self._starts(context):
                chunk = encoder.store.get(context.ids[:at], self._block(context, at)) if known else None
                known = chunk is not None
                encoder.count(self.block, known)
                if chunk is not None:
                    found.append(Piece(chunk, b, geometry.first(b) + at))
        return found

    def _starts(self, context: Context) -> range:
        return range(0, len(context) - self.block + 1, self.block)

    def _block(self, context: Context, at: int) -> Sequence[int]:
        return context.ids[at : at + self.block]

    def repair(self, run: Run) -> None:
        """Compute all tokens that no block holds."""
        missing = run.geometry.in_context()
        for piece in run.sheet.pieces:
            missing[piece.sequence, piece.start : piece.start + piece.chunk.length] = False
        work = run.start(missing)
        run.report.union = work.count
        for layer in range(run.layers):
            work.through(layer)

    def finish(self, run: Run, store: ChunkStore) -> None:
        """Store the blocks that were computed, the first one last: the end of a text leaves before it."""
        from kvexp.cache.chunk_store import Chunk

        known = {(piece.sequence, piece.start) for piece in run.sheet.pieces}
        layers = [run.sheet.rotary.ordered(*run.sheet.layer(i)) for i in range(run.layers)]

        def chunk(b: int, at: int) -> Chunk:
            start = run.geometry.first(b) + at
            span = slice(start, start + self.block)
            return Chunk.of(at, [(k[b, :, span], v[b, :, span]) for k, v in layers], store.codec)

        for b, context in enumerate(run.geometry.contexts):
            starts = self._starts(context)
            if not starts:
                continue
            room = store.capacity // store.size(chunk(b, starts[-1]))  # more would drive the first ones out
            for at in reversed(starts[:room]):
                if (b, run.geometry.first(b) + at) in known:
                    store.touch(context.ids[:at], self._block(context, at))
                else:
                    store.put(context.ids[:at], self._block(context, at), chunk(b, at))
