"""From contexts to a repaired cache: find or encode the units, place them, let the method repair them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvexp.cache.kv_cache import KVCache, empty_cache
from kvexp.errors import UserError
from kvexp.methods.base import several
from kvexp.methods.reuse.forward import Run
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.units import Encoder
from kvexp.prompt import Context

if TYPE_CHECKING:
    from kvexp.cache.chunk_store import ChunkStore
    from kvexp.methods.reuse.base import ReuseMethod

Query = Sequence[int] | Sequence[Sequence[int]]


@torch.no_grad()
def encode(
    method: ReuseMethod,
    model: Any,
    context: Context | Sequence[int] | Sequence[Context],
    store: ChunkStore | None,
    query: Query | None,
) -> KVCache:
    """Return the cache of one context, or of several as one batch."""
    contexts = [Context.of(one) for one in several(context)]
    if not any(map(len, contexts)):
        return empty_cache(model)
    queries = _queries(method, query, len(contexts))
    store = method.opened(model) if store is None else store
    device = model.get_input_embeddings().weight.device
    with method.attach(model):
        since = time.perf_counter()
        encoder = Encoder(model, store)
        run = begun(method, encoder, Geometry.of(contexts, queries, device))
        method.repair(run)
        encoder.report(run.report)
        cache = run.cache()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        run.report.seconds = time.perf_counter() - since - encoder.seconds
        method.finish(run, store)
    return cache


def begun(method: ReuseMethod, encoder: Encoder, geometry: Geometry) -> Run:
    """Return a batch with its units placed and nothing repaired; needs an attached model."""
    return Run(encoder.model, geometry, method.pieces(encoder, geometry), method.reusable(geometry))


def _queries(method: ReuseMethod, query: Query | None, contexts: int) -> list[Sequence[int]]:
    """Return one query for each context, or none where the method reads none."""
    if not method.needs_query:
        return []
    if not query:
        raise UserError(
            f"{method.id} chooses tokens by the question: give encode(..., query=ids), run a task of"
            " questions, or take a method that reads none, such as agentkvshift"
        )
    queries: list[Any] = [query] * contexts if isinstance(query[0], int) else list(query)
    if len(queries) != contexts or not all(map(len, queries)):
        raise ValueError(f"{contexts} contexts need one query with at least one token for each")
    return queries
