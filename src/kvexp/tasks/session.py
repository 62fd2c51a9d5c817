"""A method at work on a model: contexts encoded once, queries run on forks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from kvexp.budget import Budget
from kvexp.cache.kv_cache import KVCache
from kvexp.prompt import Context, bos_ids
from kvexp.tasks.batch import QueryBatch

Watch = Callable[[str], AbstractContextManager[None]]  # times a named span


class Session:
    """One method, memory and budget on one loaded model; holds the cache of the latest context."""

    def __init__(
        self, loaded: Any, method: Any, memory: Any, budget: Budget, watch: Watch | None = None
    ) -> None:
        self.loaded, self.model = loaded, loaded.model
        self.method = method.tokenized(loaded.tokenizer)
        self.memory, self.budget = memory, budget
        self.watch: Watch = watch or (lambda name: nullcontext())
        self.counters: dict[str, int] = {}
        self.decoded = 0  # tokens made by decode steps, for the rate
        self._context: tuple[str, KVCache] | None = None

    def context(
        self, context: Context | Sequence[Context], asked: Sequence[Sequence[int]] | None = None
    ) -> KVCache:
        """Return the encoded context, or several as one batch, encoding them when they are not the latest.

        `asked` is the query of each context, for methods that encode for it.
        """
        key = context.key if isinstance(context, Context) else "+".join(one.key for one in context)
        more = {} if asked is None else {"query": asked}
        key += str(asked or "")
        if self._context is None or self._context[0] != key:
            self._context = None  # the rows of two contexts are never held at once
            with self.watch("encode"):
                cache = self.method.encode(self.model, context, self.memory, self.budget, **more)
            for name, value in self.counters.items():  # counters go on over contexts
                cache.counters[name] = cache.counters.get(name, 0) + value
            self.counters = cache.counters
            self._context = (key, cache)
        return self._context[1]

    def run(
        self,
        context: Context | Sequence[Context],
        queries: Sequence[Sequence[int]],
        rows: Sequence[int] | None = None,
        asked: Sequence[Sequence[int]] | None = None,
    ) -> QueryBatch:
        """Run queries on one context, or each on that of `rows` among several; inside `attach`."""
        cache = self.context(context, asked)
        if getattr(self.method, "bos_in_query", False):
            bos = bos_ids(self.loaded.tokenizer)
            queries = [[*bos, *query] for query in queries]
        with self.watch("query"):
            return QueryBatch(self.model, cache, queries, rows)
