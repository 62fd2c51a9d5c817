"""StreamingLLM: the first tokens and the latest ones, and nothing between."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class StreamingLLM(EvictionMethod):
    """Keep the first `sinks` tokens, on which models park attention, and fill the budget with the latest.

    Source: Xiao et al., "Efficient Streaming Language Models with Attention Sinks" (2023, arXiv 2309.17453):
    4 sinks, and a window that moves at each step. All heads and layers hold the same tokens.

    `rope`: where a row stands for the rotary embedding.
        `in_cache`, the paper's: at its place in the cache, and a query behind the last row, so that no
            distance exceeds the budget however long the text is. Only distances matter, and the recent rows
            stand in one piece: they and the queries keep their true positions, and the keys of the sinks are
            moved up by the number of tokens that left. Each time this starts from the keys as they were
            first cached, in float32 at least, so that no rounding adds up.
        `original`: at its true position, as in most comparisons (kvpress, KVCache-Factory, R-KV).

    Departure: a prompt that is read in one piece sees all of itself before its rows leave.
    """

    id: ClassVar[str] = "streaming_llm"
    by_head: ClassVar[bool] = True
    paper: ClassVar[str] = "Efficient Streaming Language Models with Attention Sinks"
    year: ClassVar[str] = "2023"
    reads: ClassVar[tuple[str, ...]] = ("positions",)
    keeps: ClassVar[str] = "first 4, then the latest"
    unit: ClassVar[str] = "layer"

    interval: int | None = 1
    sinks: int = 4
    rope: Literal["original", "in_cache"] = "original"

    def __post_init__(self) -> None:
        """Refuse a prompt that would stand between the sinks and the window."""
        super().__post_init__()
        if self.rope == "in_cache" and self.protect_prompt:
            raise UserError(
                "method.rope=in_cache needs rows in one piece behind the sinks, not a protected prompt:"
                " use method.rope=original, or method.protect_prompt=false"
            )

    def bound(self, model: Any, memory: Any) -> EvictionMethod:
        """Refuse places in the cache where layers do not all hold the same rows, or do not all rotate."""
        from kvexp.attention.families import layer_windows, of

        if self.rope == "original":
            return self
        config = model.config.get_text_config()
        lacking = None
        if any(window is not None for window in layer_windows(config)):
            lacking = "hold the whole cache, and some have a sliding window"
        elif not all(of(config).rotated(config)):
            lacking = "rotate, and some have no positions"
        if lacking:
            raise UserError(
                f"method.rope=in_cache needs layers that all {lacking} in this '{config.model_type}' model:"
                " use method.rope=original"
            )
        return self

    @property
    def endless(self) -> bool:  # type: ignore[override]
        """Yes, with places in the cache and a prompt that is read in chunks."""
        return self.rope == "in_cache" and self.prefill == "chunks"

    @property
    def oldest_first(self) -> bool:
        """Yes, where no prompt is protected; keys of sinks that move are gathered anew."""
        return self.rope == "original" and not self.protect_prompt

    def score(self, view: View) -> Tensor:
        """Return the positions, [B, H, S]: the latest rows are worth most."""
        return view.positions.float()  # exact up to 2^24

    def evicted(self, view: View) -> None:
        """Move the keys of the sinks up to the recent rows."""
        if self.rope == "original" or not self.sinks:
            return
        import torch

        from kvexp.attention.bands import bands

        layer, valid = view.layer, view.valid
        latent = hasattr(view.call.module, "expand_kv")  # there the rotated part is held beside the latents
        rows = layer.values if latent else layer.keys
        length = rows.shape[2]
        count = view.next_position.new_full((rows.shape[0],), length)
        if valid is not None:
            count = valid[:, 0].sum(-1)  # rows that do not count stand in front
        gone = view.next_position - count  # tokens that have left, [B]
        place = (length - count)[:, None] + torch.arange(self.sinks, device=rows.device)
        place = place.clamp(max=length - 1)[:, None, :, None].expand(-1, rows.shape[1], -1, rows.shape[3])
        first, kept, before = rows.gather(2, place), view.recall("sinks"), view.recall("gone")
        if kept is not None and before is not None:  # sinks of sequences that have lost rows stand moved
            first = torch.where((before > 0)[:, None, None, None], kept, first)
        spectrum = bands(view.model, view.call.layer_index)
        turning, still = spectrum.rotated(first)
        turn = spectrum.phases(gone).to(turning.device, turning.dtype)
        moved = spectrum.joined(turning * turn[:, None, None], still)
        rows = rows.scatter(2, place, moved.to(rows.dtype))
        layer.rewrite(**{"values" if latent else "keys": rows})
        view.remember("sinks", first)
        view.remember("gone", gone)
