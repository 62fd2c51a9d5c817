"""The one attention function and mask function that kvexp registers with transformers, under one name.

The order inside attention is fixed: tap the pre-RoPE query, rotate, `update` appends, the layer attends,
a learned sink is applied once, and the layer may compact. A layer of ours reaches this function through the
keyword dict that `update` receives, so nothing is stored in the model and nothing is global.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface

from kvexp.attention.sinks import kept

NAME = "kvexp"


class Padding:
    """What transformers hands through as the attention mask: which columns are real tokens.

    `columns` [B, seen + T] bool, or None when nothing is padded. A column is a token's *slot*: its place in
    the whole sequence, pads counted.
    """

    def __init__(self, columns: torch.Tensor | None) -> None:
        self.columns = columns
        self._counted: tuple[tuple[int, int], list[int]] | None = None

    def at(self, slots: torch.Tensor) -> torch.Tensor | None:
        """Return [B, len(slots)] bool, true where the slot holds a real token; None when all do."""
        if self.columns is None:
            return None
        return self.columns.to(slots.device)[:, slots]

    def pads(self, start: int, end: int) -> int:
        """Return how many tokens at the slots start, ..., end - 1 are pads, over the whole batch."""
        if self.columns is None:
            return 0
        return int(self._pads_before[end] - self._pads_before[start])

    def real(self, start: int, end: int) -> list[int] | None:
        """Return how many tokens at the slots start, ..., end - 1 are real, for each sequence; None: all."""
        if not self.pads(start, end):
            return None
        if self._counted is None or self._counted[0] != (start, end):  # every layer asks for the same slots
            assert self.columns is not None
            self._counted = (start, end), self.columns[:, start:end].sum(1).tolist()
        return self._counted[1]

    def refuse_inside(self, start: int, end: int) -> None:
        """Refuse pads at slots that held real tokens when they were encoded: the mask is of other ids."""
        if start < end and self.pads(start, end):
            raise RuntimeError(
                "pads must stand between the context and the query, not in front of an encoded context: "
                "build ids and attention_mask as [*context, *pads, *query]"
            )

    @cached_property
    def _pads_before(self) -> torch.Tensor:
        """Pads before each slot, on the CPU: moved once for all layers, so that none waits for its device."""
        return F.pad((~self.columns).sum(0).cumsum(0), (1, 0)).cpu()  # type: ignore[operator]


@dataclass(frozen=True)
class Call:
    """Everything that one attention call knows: what a layer needs to attend.

    query [B, Hq, T, D] rotated, `query_pre` the same before rotary embedding (None unless tapped),
    key/value [B, H, S, D] as the module expanded them, `window` the sliding window or None, `sinks` [Hq] the
    learned logits that take their share of every softmax, or None.
    """

    module: nn.Module
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    scale: float
    window: int | None
    padding: Padding
    query_pre: torch.Tensor | None
    needs_lse: bool
    sinks: torch.Tensor | None = None

    @property
    def layer_index(self) -> int:
        """The decoder layer that this call belongs to."""
        return int(self.module.layer_idx)  # type: ignore[arg-type]


def attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: Any,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None,
    softcap: float | None = None,
    kvexp: Any = None,
    kvexp_tap: Callable[[], torch.Tensor] | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend through the cache layer that `update` put into the keywords; [B, T, Hq, Dv], and no weights."""
    if kvexp is None:
        raise RuntimeError(
            "a kvexp method is attached, but this forward has no kvexp cache: pass cache=method.encode(...), "
            "and leave use_cache on, so that the method is not bypassed"
        )
    if softcap is not None:
        raise RuntimeError("attention with soft-capped logits cannot be merged: this model is not supported")
    if not isinstance(attention_mask, Padding):
        raise RuntimeError("pass a 2-D attention_mask (or none): kvexp builds the masks of its layers itself")
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    later = getattr(kvexp, "later", None)
    if later is not None:  # a compiled step attends outside its graph
        return later(module, query, key, value, scale, sliding_window, s_aux), None
    call = Call(
        module=module,
        query=query,
        key=key,
        value=value,
        scale=scale,
        window=sliding_window,
        padding=attention_mask,
        query_pre=kvexp_tap() if kvexp_tap is not None else None,
        needs_lse=s_aux is not None,
        sinks=s_aux,
    )
    output, lse = kvexp.attend(call)
    if s_aux is not None:  # a sink is a state with output 0: it only takes its share of the mass
        output = output * kept(lse, s_aux)[..., None].to(output.dtype)
    kvexp.after(call)
    return output.transpose(1, 2).contiguous(), None


def mask(*, attention_mask: torch.Tensor | None = None, **_: Any) -> Padding:
    """Return the 2-D padding mask as it is: each layer builds its own mask from the rows that it stores."""
    if attention_mask is not None and attention_mask.dim() != 2:
        raise RuntimeError("pass a 2-D attention_mask (or none): kvexp builds the masks of its layers itself")
    return Padding(None if attention_mask is None else attention_mask.bool())


def register() -> None:
    """Make `attn_implementation="kvexp"` known to transformers; calling it again changes nothing."""
    AttentionInterface.register(NAME, attention)
    AttentionMaskInterface.register(NAME, mask)
