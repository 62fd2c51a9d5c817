"""What every method of storage is: a scheme for each layer, which the cache follows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.base import Method, several

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.cache.kv_cache import KVCache
    from kvexp.cache.quantised_unit import QuantisedUnit
    from kvexp.cache.scheme import Scheme
    from kvexp.prompt import Context


@dataclass(frozen=True)
class StorageMethod(Method):
    """Base of the family: all rows of full-attention layers stay, the older ones in few bits.

    The budget is ignored: what is saved is bytes, and stands in the record (`bytes_peak`). The counter
    `quantised` counts rows of sequences and layers that were packed. While everything fits into the newest
    rows, which stay in the model's dtype, the method equals full attention.

    `bits`: of a code: 2, 4 or 8.
    `group`: numbers that share a scale and a minimum, two float16: keys of a channel, values of a token.
    `residual`: newest rows that stay in the model's dtype.
    `prefill`: quantise when the context has been read, so that it is read in full (`end`, as the papers do),
        or after each of its chunks, so that it is never held in full (`chunks`).
    `decode`: rows of queries and answers are quantised too, when they are old enough.
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

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        if self.group < 1:
            raise UserError(f"method.group={self.group} is no number of values: use 1 or more, such as 32")
        if self.residual < 0:
            raise UserError(f"method.residual={self.residual} is no number of rows: use 0 or more")

    def scheme(self, layer: int) -> Scheme:
        """Return how layer `layer` (from 0) stores its rows."""
        raise NotImplementedError

    def packed(self, keys: Tensor, values: Tensor, layer: int) -> QuantisedUnit:
        """Pack all rows of a unit of text, [B, H, n, D], for a store; `layer` is the one they belong to."""
        from kvexp.cache.quantised_unit import quantised

        return quantised(keys, values, self.scheme(layer))

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
    ) -> KVCache:
        """Return a cache that has read `context`, quantised; several contexts are padded on the left."""
        from kvexp.attention.families import require_full_layer
        from kvexp.cache.kv_cache import empty_cache, prefill
        from kvexp.cache.quantised import quantised_cache

        require_full_layer(model.config.get_text_config())
        ids = [self.select(one, budget) for one in several(context)]
        cache = empty_cache(model)
        schemes = [self.scheme(layer) for layer in range(len(cache.layers))]
        with self.attach(model, memory):
            if self.prefill == "end":
                return quantised_cache(prefill(model, ids, cache), schemes, self.decode)
            cache = prefill(model, ids, quantised_cache(cache, schemes))
        return finished(cache, self.decode)


def finished(cache: KVCache, decode: bool) -> KVCache:
    """Return a quantised cache whose context has been read: forks share what is packed."""
    from kvexp.cache.quantised import QuantisedLayer

    for layer in cache.layers:
        if isinstance(layer, QuantisedLayer):
            layer.release()
            layer.packs = decode
    return cache
