"""Prefix caching: reuse the longest beginning that an earlier prompt had in common, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

from kvexp.errors import UserError
from kvexp.methods.reuse.base import StoredMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.cache.chunk_store import ChunkStore
    from kvexp.methods.reuse.forward import Run
    from kvexp.methods.reuse.geometry import Geometry
    from kvexp.methods.reuse.sheet import Piece
    from kvexp.methods.reuse.units import Encoder


@dataclass(frozen=True)
class PrefixCache(StoredMethod):
    """Look prompts up in blocks of tokens, from the first on, and compute what follows the last known one.

    Source: Kwon et al., "Efficient Memory Management for Large Language Model Serving with PagedAttention"
    (2023, arXiv 2309.06180). A block is known when the whole text up to its end is, so that the reuse is
    lossless. The hit rate is reused / reusable in the record; all tokens of a context count, the header too.
    Within a batch contexts do not share: they become known together, after it.

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

    def reusable(self, geometry: Geometry) -> Tensor:
        """All tokens of a context."""
        return geometry.in_context()

    def pieces(self, encoder: Encoder, geometry: Geometry) -> list[Piece]:
        """Return the blocks of each context that are known, up to the first that is not."""
        from kvexp.methods.reuse.sheet import Piece

        found = []
        for b, context in enumerate(geometry.contexts):
            for at in range(0, len(context) - self.block + 1, self.block):
                chunk = encoder.store.get(context.ids[:at], context.ids[at : at + self.block])
                if chunk is None:
                    break
                found.append(Piece(chunk, b, geometry.first(b) + at))
        return found

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
        """Store the blocks that were computed."""
        from kvexp.cache.chunk_store import Chunk

        known = {(piece.sequence, piece.start) for piece in run.sheet.pieces}
        layers = [run.sheet.rotary.ordered(*run.sheet.layer(i)) for i in range(run.layers)]
        for b, context in enumerate(run.geometry.contexts):
            for at in range(0, len(context) - self.block + 1, self.block):
                start = run.geometry.first(b) + at
                if (b, start) not in known:
                    rows = [
                        (k[b, :, start:][:, : self.block], v[b, :, start:][:, : self.block])
                        for k, v in layers
                    ]
                    chunk = Chunk.of(at, rows, store.codec)
                    store.put(context.ids[:at], context.ids[at : at + self.block], chunk)
