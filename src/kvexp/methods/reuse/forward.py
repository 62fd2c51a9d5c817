"""The partial forward: chosen rows of a batch of contexts run through the model's own layers, one by one.

A row that is recomputed in a layer needs its hidden state from the layer before, so the set of rows can only
shrink with depth. Decoder layers are those of transformers; they get rotary tables for the rows' positions
and, in place of a cache, an object that repairs the layer's keys and values and attends with an explicit mask
(`kvexp.methods.reuse.patched`). In the last layer only keys and values are wanted, and nothing else is run.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from kvexp.attention.function import Padding
from kvexp.attention.options import options_of
from kvexp.attention.rerotate import Pair
from kvexp.cache.kv_cache import KVCache
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.patched import Patch, Patched, PeekedError, RowSet, Watcher, leave, overwrite
from kvexp.methods.reuse.report import Report
from kvexp.methods.reuse.sheet import Piece, Sheet


class Run:
    """One batch of contexts under repair; needs an attached model.

    `reusable` [B, C] bool: the tokens whose rows a method reuses or recomputes (those of units).
    """

    def __init__(
        self,
        model: Any,
        geometry: Geometry,
        pieces: Sequence[Piece],
        reusable: torch.Tensor | None = None,
    ) -> None:
        self.model, self.geometry = model, geometry
        self.sheet = Sheet(model, geometry, pieces)
        self.reusable = geometry.in_units() if reusable is None else reusable
        self.layers = int(model.config.get_text_config().num_hidden_layers)
        self.report = Report(self.layers, int(self.reusable.sum()))

    def start(self, chosen: torch.Tensor) -> Work:
        """Return the tokens where `chosen` [B, C] bool is true, ready for layer 0."""
        rows = RowSet.of(self.geometry, chosen)
        hidden = self.model.get_input_embeddings()(self.geometry.ids.gather(1, rows.columns))
        return Work(self, rows, hidden)

    def full(self) -> list[Pair]:
        """Return every layer under full recompute of the same batch: what repair is measured against."""
        everything = Run(self.model, self.geometry, [], self.geometry.in_context())
        work = everything.start(everything.reusable)
        for layer in range(self.layers):
            work.through(layer)
        return [everything.sheet.layer(layer) for layer in range(self.layers)]

    def cache(self) -> ReusedCache:
        """Return a cache of the rows as they are now, with what was done in its counters."""
        layers = self.sheet.dense_layers()
        self.report.moved_bytes = self.sheet.moved_bytes
        columns = self.geometry.real[:, : self.geometry.width] if self.geometry.padded else None
        return ReusedCache(layers, self.report, columns)


class ReusedCache(KVCache):
    """A cache of placed rows; `report` says what was done to them."""

    def __init__(self, layers: Sequence[Any], report: Report, columns: torch.Tensor | None) -> None:
        super().__init__(layers, report.counters(), columns=columns)
        self.report = report


class Work:
    """Rows on their way through the layers: `hidden` [B, R, d] is what comes into the next one."""

    def __init__(self, run: Run, rows: RowSet, hidden: torch.Tensor) -> None:
        self.run, self.rows, self.hidden = run, rows, hidden
        self._tables: dict[str | None, Any] = {}
        self._tell()

    def _tell(self) -> None:
        reusable = self.run.reusable.gather(1, self.rows.columns) & self.rows.valid
        self.count = int(reusable.sum())
        self._tables = {}

    def keep(self, chosen: torch.Tensor) -> None:
        """Go on with the rows at the columns where `chosen` [B, C] bool is true, all of them here already."""
        here = chosen.gather(1, self.rows.columns) & self.rows.valid
        rows = RowSet.of(self.run.geometry, chosen)
        if int(here.sum()) != int(rows.valid.sum()):
            raise ValueError("some of these rows are not among those that were computed so far")
        order = (~here).to(torch.uint8).argsort(dim=1, stable=True)[:, : int(here.sum(1).max())]
        self.hidden = self.hidden.gather(1, order[..., None].expand(-1, -1, self.hidden.shape[-1]))
        self.rows = rows
        self._tell()

    def peek(self, layer: int) -> Pair:
        """Return the rows' fresh pair in a layer, [B, H, R, D]; nothing attends."""
        self.run.report.computed[layer] = max(self.run.report.computed[layer], self.count)
        found: list[Pair] = []
        for part, rows in self.rows.parts(self._size):
            try:
                self._layer(layer, part, rows, None)
            except PeekedError as peeked:
                found.append(peeked.fresh)
        return torch.cat([one[0] for one in found], dim=2), torch.cat([one[1] for one in found], dim=2)

    def through(self, layer: int, patch: Patch = overwrite, watch: Watcher | None = None) -> None:
        """Take the rows through a layer: `patch` repairs it, then they attend over it.

        `watch` sees each attention call of the rows.
        """
        report, size = self.run.report, self._size
        report.computed[layer] = max(report.computed[layer], self.count)
        report.written[layer] = max(report.written[layer], self.count)
        if not self.rows.columns.shape[1]:
            return
        last = layer == self.run.layers - 1 and watch is None
        if last or (self.rows.columns.shape[1] > size and patch is not overwrite):
            fresh = self.peek(layer)  # a correction has to see all rows before the first of them attends
            patch(layer, self.rows, fresh, self.run.sheet.layer(layer, fresh))
            patch = leave
        if last:
            return
        parts = [self._layer(layer, part, rows, patch, watch) for part, rows in self.rows.parts(size)]
        self.hidden = torch.cat(parts, dim=1)

    @property
    def _size(self) -> int:
        return options_of(self.run.model).prefill_chunk

    def _layer(
        self, layer: int, part: slice, rows: RowSet, patch: Patch | None, watch: Watcher | None = None
    ) -> torch.Tensor:
        model = self.run.model.base_model
        cos, sin = self._table(layer)
        return model.layers[layer](
            self.hidden[:, part],
            attention_mask=Padding(None),
            position_ids=rows.positions,
            position_embeddings=(cos[:, part], sin[:, part]),
            cache=Patched(self.run.sheet, rows, patch, watch),
            use_cache=True,
        )

    def _table(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The model's rotary table at the rows' positions; one for each kind of layer where kinds differ."""
        rotary = self.run.sheet.rotary
        typed = (rotary.config.layer_types[layer],) if rotary.family.typed_rotary else ()
        kind = typed[0] if typed else None
        if kind not in self._tables:
            self._tables[kind] = self.run.model.base_model.rotary_emb(
                self.hidden, self.rows.positions, *typed
            )
        return self._tables[kind]
