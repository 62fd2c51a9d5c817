"""From contexts to a repaired cache: find or encode the units, place them, let the method repair them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from kvexp.cache.chunk_store import ChunkStore, Exact
from kvexp.cache.kv_cache import KVCache, empty_cache
from kvexp.errors import UserError
from kvexp.methods.base import several
from kvexp.methods.reuse.forward import Run
from kvexp.methods.reuse.geometry import Geometry
from kvexp.methods.reuse.units import Encoder
from kvexp.prompt import Context

if TYPE_CHECKING:
    from kvexp.methods.reuse.base import ReuseMethod

Query = Sequence[int] | Sequence[Sequence[int]]
"""Token ids of one query, or of several; tensors of one axis may stand for lists of ids."""


@torch.no_grad()
def encode(
    method: ReuseMethod,
    model: Any,
    context: Context | Sequence[int] | Sequence[Context],
    memory: Any,
    query: Query | None,
) -> KVCache:
    """Return the cache of one context, or of several as one batch; see `ReuseMethod.encode`."""
    contexts = [Context.of(one) for one in several(_ids(context, "a context"))]
    if not any(map(len, contexts)):
        return empty_cache(model)
    queries = _queries(method, query, len(contexts))
    store = _store(method, model, memory)
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


def _store(method: ReuseMethod, model: Any, memory: Any) -> ChunkStore:
    """Return the store that is given, or an empty one; UserError where rows in it are not the method's."""
    if memory is None:
        return method.opened(model)
    if not isinstance(memory, ChunkStore):
        raise UserError(
            f"memory={memory!r:.60} is no chunk store: open one with method.opened(model), or leave it out"
        )
    memory.check(model)
    codec = method.codec(model)
    wanted = Exact.name if codec is None else codec.name
    if memory.codec.name != wanted:
        raise UserError(
            f"this chunk store holds rows as {memory.codec.name}, and this {method.id} wants them as"
            f" {wanted}: open one with method.opened(model)"
        )
    return memory


def _ids(given: Any, what: str) -> Any:
    """Return ids as lists where tensors of one axis stand for them; UserError for other tensors."""
    if isinstance(given, torch.Tensor):
        if given.dim() != 1 or given.is_floating_point():
            raise UserError(
                f"{what} is a list of token ids, or a tensor of one axis, and not one of shape"
                f" {tuple(given.shape)} and {given.dtype}: give ids[0].tolist()"
            )
        return given.tolist()
    if isinstance(given, list | tuple) and any(isinstance(one, torch.Tensor) for one in given):
        return [_ids(one, what) for one in given]
    return given


def _queries(method: ReuseMethod, query: Query | None, contexts: int) -> list[Sequence[int]]:
    """Return one query for each context, or none where the method reads none."""
    if not method.needs_query:
        return []
    query = None if query is None else _ids(query, "a query")
    if not query:
        raise UserError(
            f"{method.id} chooses tokens by the question: give encode(..., query=ids), run a task of"
            " questions, or take a method that reads none, such as agentkvshift"
        )
    queries: list[Any] = [query] * contexts if isinstance(query[0], int) else list(query)
    if len(queries) != contexts or not all(map(len, queries)):
        raise ValueError(f"{contexts} contexts need one query with at least one token for each")
    return queries
