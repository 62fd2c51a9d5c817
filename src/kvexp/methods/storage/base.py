"""What every method of storage is: a scheme for each layer, and the method whose rows are stored so."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.base import Method, several
from kvexp.methods.baseline.full import Full
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.over import Over

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.cache.kv_cache import KVCache
    from kvexp.cache.quantised_unit import QuantisedUnit
    from kvexp.cache.scheme import Scheme
    from kvexp.prompt import Context

# What a class says of itself, and says for `of` here.
FOLLOWED = ("needs_shared_context", "needs_query", "needs_units", "uses_budget", "exact", "taps")


@dataclass(frozen=True)
class StorageMethod(Over):
    """Base of the family: the rows that `of` keeps stay, the older ones in few bits.

    What is saved is bytes, and stands in the record (`bytes_peak`); the budget is that of `of`. The counter
    `quantised` counts rows of sequences and layers that were packed. While everything fits into the newest
    rows, which stay in the model's dtype, the method equals `of`, and over `full` full attention.

    `bits`: of a code: 2, 4 or 8.
    `group`: numbers that share a scale and a minimum, two float16: keys of a channel, values of a token.
    `residual`: newest rows that stay in the model's dtype.
    `prefill`: quantise when the context has been read, so that it is read in full (`end`, as the papers do),
        or after each of its chunks, so that it is never held in full (`chunks`; over full or truncate).
    `decode`: rows of queries and answers are quantised too, when they are old enough.
    `of`: the method whose rows are stored: a name, or {name: snapkv, window: 8}.

    Over an eviction method nothing of a sequence is packed in a layer until rows of it leave. Then all rows
    that stay are, keys and values alike, but the `residual` newest of each KV head; a head's groups are
    counted from its first row, and its last one may be shorter. Rows that come later stay in full until rows
    leave again, and for good where none do while decoding. Each time the packed rows are unpacked, chosen
    from and packed again, in other groups than before: they are scored as they came back, and errors add up.
    While rows are chosen a layer (where layers choose together, every layer) stands in full, a copy that
    `bytes_peak` does not count. Methods that read all rows at every step are refused.
    """

    family: ClassVar[str] = "storage"
    uses_budget: ClassVar[bool] = False
    needs_full_layer: ClassVar[bool] = True
    expects: ClassVar[tuple[str, ...]] = ("quantised",)
    year: ClassVar[str] = ""

    bits: Literal[2, 4, 8] = 2
    group: int = 32
    residual: int = 128
    prefill: Literal["end", "chunks"] = "end"
    decode: bool = True
    of: Method = field(default_factory=Full)

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        if self.group < 1:
            raise UserError(f"method.group={self.group} is no number of values: use 1 or more, such as 32")
        if self.residual < 0:
            raise UserError(f"method.residual={self.residual} is no number of rows: use 0 or more")
        name = self.of.id
        if isinstance(self.of, StorageMethod):
            raise UserError(
                f"method.of={name} packs rows itself: name the method that keeps them, such as full"
            )
        if self.of.family == "memory":
            raise UserError(f"method.of={name} holds no rows that could be packed: use full, or snapkv")
        if self.prefill == "chunks" and type(self.of).encode is not Method.encode:
            raise UserError(
                f"method.prefill=chunks packs a context while it is read, and {name} reads it in its own way:"
                " use method.prefill=end"
            )
        if isinstance(self.of, EvictionMethod):
            self._refuse_eviction(self.of)
        self.follow(*FOLLOWED)
        object.__setattr__(self, "expects", (*self.of.expects, "quantised"))

    def _refuse_eviction(self, of: EvictionMethod) -> None:
        """Refuse what would unpack all rows at every step, or never pack any."""
        deciding, why = of.during("decode"), ""
        if of.observes:
            why = "it reads all rows at every step: take one that reads them when some leave, such as rkv"
        elif deciding.interval == 1:
            why = (
                "rows leave at every step, and all others would be unpacked each time: give it an interval,"
                f" such as {{name: {deciding.id}, interval: 64}}"
            )
        elif deciding.interval is None and of.during("prefill").prefill == "off":
            why = "no row ever leaves, and others are packed when some do: use full"
        elif getattr(of, "rope", "original") == "in_cache":
            why = "rope=in_cache moves keys that are packed: use rope=original"
        elif deciding.interval is not None and not self.decode:
            why = "rows leave while decoding too, and others are packed then: use method.decode=true"
        if why:
            raise UserError(f"method.of={of.id} is not possible: {why}")

    @property
    def learner(self) -> Method:
        """The method whose rows are stored."""
        return self.of

    def scheme(self, layer: int) -> Scheme:
        """Return how layer `layer` (from 0) stores its rows."""
        raise NotImplementedError

    def packed(self, keys: Tensor, values: Tensor, layer: int) -> QuantisedUnit:
        """Pack all rows of a unit of text, [B, H, n, D], for a store; `layer` is the one they belong to."""
        from kvexp.cache.quantised_unit import quantised

        return quantised(keys, values, self.scheme(layer))

    def opened(self, model: Any, folder: Path | None = None, sha256: str | None = None) -> Any:
        """Return what contexts share though nothing is learnt: what `of` opens."""
        return self.of.opened(model, folder, sha256)

    def tokenized(self, tokenizer: Any) -> StorageMethod:
        """Return the method with texts among the knobs of `of` turned into token ids."""
        return replace(self, of=self.of.tokenized(tokenizer))

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError where `of` can do nothing with so few rows, or none of them would be packed."""
        self.of.check_budget(budget)
        if isinstance(self.of, EvictionMethod) and budget.rows is not None and budget.rows <= self.residual:
            raise UserError(
                f"budget={budget} leaves nothing to pack beside method.residual={self.residual} rows in full:"
                f" use budget={self.residual + 1} or more, or a smaller residual"
            )

    def select(self, context: Context | Sequence[int], budget: Budget | int | str | None) -> Sequence[int]:
        """Return the token ids that `of` really encodes."""
        return self.of.select(context, budget)

    @contextmanager
    def attach(self, model: Any, memory: Any = None) -> Iterator[None]:
        """Switch `model` over as `of` does."""
        with self.of.attach(model, memory):
            yield

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
        query: Sequence[int] | Sequence[Sequence[int]] | None = None,
    ) -> KVCache:
        """Return the cache that `of` makes of `context`, quantised; several contexts are one batch.

        `query` is what will be asked, for methods that read it.
        """
        from kvexp.attention.families import require_full_layer
        from kvexp.cache.quantised import quantised_cache

        require_full_layer(model.config.get_text_config())
        schemes = [self.scheme(layer) for layer in range(model.config.get_text_config().num_hidden_layers)]
        if self.prefill == "chunks":
            return self._in_chunks(model, context, memory, budget, schemes)
        asked = {} if query is None else {"query": query}
        cache = self.of.encode(model, context, memory, budget, **asked)
        if cache.evictor is None:
            return quantised_cache(cache, schemes, self.decode)
        from kvexp.cache.packing_layer import packing_cache

        cache = packing_cache(cache, schemes)
        cache.evictor.meter.note_packed(cache)
        return cache

    def _in_chunks(
        self, model: Any, context: Any, memory: Any, budget: Any, schemes: Sequence[Scheme]
    ) -> KVCache:
        """Return the cache of a context that was never held in full."""
        from kvexp.budget import Budget
        from kvexp.cache.kv_cache import empty_cache, prefill
        from kvexp.cache.quantised import quantised_cache

        contexts = several(context)
        budget = None if budget is None else Budget.parse(budget, max(map(len, contexts)))
        ids = [self.select(one, budget) for one in contexts]
        with self.attach(model, memory):
            cache = prefill(model, ids, quantised_cache(empty_cache(model), schemes))
        return finished(cache, self.decode)


def finished(cache: KVCache, decode: bool) -> KVCache:
    """Return a quantised cache whose context has been read: forks share what is packed."""
    from kvexp.cache.quantised import QuantisedLayer

    for layer in cache.layers:
        if isinstance(layer, QuantisedLayer):
            layer.release()
            layer.packs = decode
    return cache
