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
        self.loaded, self.model, self.method = loaded, loaded.model, method
        self.memory, self.budget = memory, budget
        self.watch: Watch = watch or (lambda name: nullcontext())
        self.counters: dict[str, int] = {}
        self.decoded = 0  # tokens made by decode steps, for the rate
        self._context: tuple[str, KVCache] | None = None

    def context(self, context: Context) -> KVCache:
        """Return the encoded context, encoding it when it is not the latest one."""
        if self._context is None or self._context[0] != context.key:
            with self.watch("encode"):
                cache = self.method.encode(self.model, context, self.memory, self.budget)
            for name, value in self.counters.items():  # counters go on over contexts
                cache.counters[name] = cache.counters.get(name, 0) + value
            self.counters = cache.counters
            self._context = (context.key, cache)
        return self._context[1]

    def run(self, context: Context, queries: Sequence[Sequence[int]]) -> QueryBatch:
        """Run queries on one context, inside `attach`."""
        cache = self.context(context)
        if getattr(self.method, "bos_in_query", False):
            bos = bos_ids(self.loaded.tokenizer)
            queries = [[*bos, *query] for query in queries]
        with self.watch("query"):
            return QueryBatch(self.model, cache, queries)
