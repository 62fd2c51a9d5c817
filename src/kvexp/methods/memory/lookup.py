"""Find the entry of each query and return its attention state, corrected where the memory knows how."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvexp.attention.function import Call
from kvexp.attention.rope import rotate
from kvexp.errors import UserError
from kvexp.methods.memory.states import LayerMemory
from kvexp_kernels.lookup import CellLists, InvertedLists, JointLists, TwoLevelIndex, lookup_flat
from kvexp_kernels.lookup_attend import NativeStep, native_step
from kvexp_kernels.lookup_merge import Entries

TIE = 1e-6  # difference of cosines that float32 cannot tell
MAX_SHIFT = 3.0  # largest correction of log Z, in nats: beyond it a linear map extrapolates


def key_space(
    query_pre: torch.Tensor | None,
    query: torch.Tensor,
    key: str,
    model: Any,
    layer_index: int,
    unified_position: int,
) -> torch.Tensor:
    """Return the queries [B, Hq, T, D] that are compared with keys, for `method.key`."""
    if key == "rope_actual":
        return query
    if query_pre is None:
        raise RuntimeError(
            "this cache looks up queries before RoPE, which are not tapped here: "
            "use `with method.attach(model)` of the method that encoded it"
        )
    if key == "rope_unified":
        length = query_pre.shape[-2]
        positions = torch.full((length,), unified_position, device=query_pre.device)
        return rotate(model, query_pre, positions, layer_index)
    return query_pre


def log_z_shift(offset: torch.Tensor, slope: torch.Tensor) -> torch.Tensor:
    """First-order change [..., h] of log Z at `offset` [..., h*D] from a centroid, by slopes [..., h, D]."""
    shift = (offset.view(slope.shape) * slope).sum(-1)
    return shift.clamp(-MAX_SHIFT, MAX_SHIFT)


class LayerLookup:
    """Lookups in one layer's memory: flat, or two-level over contiguous cells of keys (`ivf`: by FAISS).

    `index`: one that was built before, in place of what `method.lookup` names.
    """

    def __init__(
        self,
        memory: LayerMemory,
        model: Any,
        layer_index: int,
        method: Any,
        counters: dict[str, int],
        index: Sequence[TwoLevelIndex] | JointLists | None = None,
    ):
        self.memory, self.model, self.layer_index, self.method = memory, model, layer_index, method
        self.counters = counters
        self.entries = memory.keys.shape[1]
        self.wide: list[torch.Tensor] = []  # float32 keys, where the memory's own are something else
        self.index = index
        if index is None and method.lookup != "flat":
            cells = method.cells or (64 if self.entries <= 4096 else 128)
            keys = memory.keys.float()
            if memory.key_scale is not None:
                keys = keys * memory.key_scale[..., None]
            self.index = built = [TwoLevelIndex.build(k, min(cells, len(k)), seed=0) for k in keys]
            if method.lookup == "ivf":
                if not InvertedLists.suits(keys):
                    raise UserError(
                        "method.lookup=ivf needs the package faiss-cpu and a model on the CPU: install it, or"
                        " use method.lookup=two_level"
                    )
                self.index = JointLists(built, keys)
                self.wide = [] if keys.data_ptr() == memory.keys.data_ptr() else [keys]
        self.native = self._native()
        plain = memory.residual is None and memory.slope is None and not method.recall
        self.steps = plain and self.native is not None
        grouping = memory.grouping  # a token's heads are its samples as they lie, but for `shared`
        shape = grouping.codebooks, grouping.samples, memory.keys.shape[2]
        self._in_order = None if grouping.shared or memory.whiten is not None else shape

    def _native(self) -> NativeStep | None:
        """Lookups of few queries, and whole steps of decoding, where they need not be torch's."""
        memory, index, lists = self.memory, self.index, None
        if index is not None:
            lists = index.cell_lists() if isinstance(index, JointLists) else CellLists.of(index)
        keys = self.wide[0] if self.wide else memory.keys
        entries = Entries(keys, memory.a, memory.log_z, a_scale=memory.a_scale, probe=self.method.probe)
        heads = torch.arange(memory.grouping.q_heads)[None]
        return native_step(entries, memory.grouping.split(heads).contiguous(), lists)

    def tensors(self) -> list[torch.Tensor]:
        """The tensors held for lookups; cells have a copy of the keys of their own (ivf: in float16)."""
        parts = [self.index] if isinstance(self.index, JointLists) else self.index or ()
        return self.memory.used() + self.wide + [t for part in parts for t in part.tensors()]

    def key_queries(self, call: Call, positions: torch.Tensor) -> torch.Tensor:
        """Return the queries in the space of the keys, before whitening."""
        m = self.method
        return key_space(call.query_pre, call.query, m.key, self.model, self.layer_index, m.unified_position)

    def nearest(self, x: torch.Tensor) -> torch.Tensor:
        """Return entry numbers [C, n] for samples x [C, n, h*D]."""
        memory, probe = self.memory, self.method.probe
        native = self.native if self.native is not None and self.native.takes_samples(x) else None
        if self.index is None:
            return native.lookup(x)[0] if native else lookup_flat(x, memory.keys, memory.key_scale)[0]
        if native:
            nearest, scored = native.lookup(x)
        elif isinstance(self.index, JointLists):
            nearest, scored = self.index.search(x, probe)
        else:
            parts = [index.search(part, probe) for index, part in zip(self.index, x, strict=True)]
            nearest, scored = torch.stack([found for found, _ in parts]), sum(cost for _, cost in parts)
        self._count_scored(x, scored)
        if self.method.recall:
            self._compare(x, nearest)
        return nearest

    def _count_scored(self, x: torch.Tensor, scored: int) -> None:
        self._count("keys_scored", scored)
        self._count("keys_held", x.shape[0] * x.shape[1] * self.entries)

    def _compare(self, x: torch.Tensor, nearest: torch.Tensor) -> None:
        """Count lookups that found what flat search finds, or an entry as near (equal keys are common)."""
        memory = self.memory
        flat, score = lookup_flat(x, memory.keys, memory.key_scale)
        book = torch.arange(x.shape[0], device=x.device)[:, None]
        keys = memory.keys[book, nearest].to(x.dtype)
        if memory.key_scale is not None:
            keys = keys * memory.key_scale[book, nearest][..., None].to(x.dtype)
        missed = (score - (x * keys).sum(-1)) / x.norm(dim=-1).clamp(min=1e-30)  # in cosine
        self._count("agreed_with_flat", int(((flat == nearest) | (missed <= TIE)).sum()))
        self._count("same_as_flat", int((flat == nearest).sum()))
        self._count("compared_with_flat", nearest.numel())

    def step(
        self, x: torch.Tensor, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return the states of one token each, merged with attention to local rows; None: do it in parts.

        Key-space queries x and query [B, Hq, D], local rows [B, Hkv, S, D] and [B, Hkv, S, Dv], all visible;
        (a [B, Hq, Dv], s [B, Hq]) as `find` and a merge give them.
        """
        if len(x) == 1 and self._in_order:
            samples = x.reshape(self._in_order)
        else:
            samples = self._samples(x).flatten(-2)
        if not self.steps or self.native is None or not self.native.takes(samples, query, key, value):
            return None
        a, s, scored = self.native.lookup_attend(samples, query, key, value, scale)
        if self.index is not None:
            self._count_scored(samples, scored)
        return a, s

    def _samples(self, query: torch.Tensor) -> torch.Tensor:
        """Key-space queries [n, Hq, D] -> samples [C, n', h, D], whitened where the memory is."""
        if self.memory.whiten is not None:
            query = torch.einsum("nhd,hde->nhe", query, self.memory.whiten)
        return self.memory.grouping.split(query)

    def find(self, query: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return (a [n, Hq, Dv], log Z [n, Hq]) for key-space queries [n, Hq, D]."""
        memory, grouping = self.memory, self.memory.grouping
        query = query.float() if query.dtype != torch.float64 else query
        x = self._samples(query).flatten(-2)
        chosen = self.nearest(x)
        book = torch.arange(x.shape[0], device=x.device)[:, None]
        a, s = memory.a[book, chosen], memory.log_z[book, chosen]
        if memory.a_scale is not None:
            a = a.float() * memory.a_scale[book, chosen][..., None]
        if memory.residual is not None or memory.slope is not None:
            a, s = self._corrected(x, chosen, book, a.to(s.dtype), s)
        return grouping.join(a), grouping.join(s)

    def _corrected(self, x, chosen, book, a, s):
        """First-order corrections from the offset of the query to its entry's centroid."""
        memory = self.memory
        centroid = memory.keys[book, chosen].to(x.dtype)
        if memory.key_scale is not None:
            centroid = centroid * memory.key_scale[book, chosen][..., None]
        offset = x - centroid * memory.norm[book, chosen][..., None]
        if memory.slope is not None:
            s = s + log_z_shift(offset, memory.slope[book, chosen].to(x.dtype))
        if memory.residual is not None:
            fix = torch.einsum("cni,cio->cno", offset, memory.residual.to(x.dtype))
            fix = fix.unflatten(-1, (s.shape[-1], -1))  # [C, n', h, Dv + 1]
            a = a + fix[..., :-1]
            s = s + fix[..., -1].clamp(-MAX_SHIFT, MAX_SHIFT)
        return a, s

    def _count(self, name: str, value: int) -> None:
        self.counters[name] = self.counters.get(name, 0) + value
