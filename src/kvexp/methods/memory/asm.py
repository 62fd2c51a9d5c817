"""Attention-State Memory: the prefix becomes a lookup table of attention outputs.

For a fixed prefix the pair (a, log Z), its attention output and log-sum-exp, is a function of the query
alone. ASM runs *traces* (prompts of the same distribution) behind the prefix, clusters their queries, and
keeps for each cluster the aggregated state. At inference the prefix is gone: each query takes the entry k of
the largest cosine to its key-space query and merges it with attention over its own few rows,

    w = sigmoid(log Z_k - s_local),    out = a_local + w (a_k - a_local).

Source: "Context Memorization for Efficient Long Context Generation" (attention-state memory, ASM).
`aggregate=eq5` is the paper's equation 5; the rest of its open points are knobs. Departures, all off by
default: plain means (`aggregate=mean`), a linear residual correction, a first-order term for log Z (`slope`),
int8 entries. Lookup is a cosine argmax as in the paper; k-means is L2, which the paper leaves open.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.base import Calibration, Method, several

if TYPE_CHECKING:
    from kvexp.budget import Budget
    from kvexp.cache.kv_cache import KVCache
    from kvexp.methods.memory.states import StateMemory
    from kvexp.prompt import Context

# The knobs that decide what is collected, and those that do not change what is stored.
SAMPLE_KNOBS = ("key", "unified_position", "chunks", "chunk_merge", "samples", "slope")
INFERENCE_KNOBS = ("lookup", "cells", "probe", "recall", "bos_in_query")


@dataclass(frozen=True)
class ASM(Method):
    """Replace the prefix by K entries per codebook; `budget` is K (`match=entries`).

    layout: which heads share an entry (see Grouping); `heads_per_entry` overrides how many of a group join.
    match: `entries` K = budget, `traffic` equal key bytes per step, `storage` equal bytes held.
    aggregate: `eq5` mass-weighted (paper), `mean` plain means of a and log Z.
    key: queries before RoPE, at one position (`rope_unified`, provably the same), or rotated (`rope_actual`).
    whiten: `full` (shrunk, per head) or `diagonal` before clustering and lookup.
    kmeans, iterations, metric, init, backend: clustering; iterations are Lloyd steps or mini-batch passes.
    final: which assignment the final pass aggregates over, `l2` or `cosine` (the lookup's).
    samples: precision of the collected samples that are spilled to disk (log Z is always float32).
    chunks: parts of the prefix that are encoded on their own, at least: more, each with a share of the
    traces, where the prefix exceeds what the model was made for; chunk_merge `mean` pools their samples
    (paper), `sum` adds the masses. residual, ridge: a linear correction of (a, log Z) by the query's offset
    from its centroid, and the penalty of its fit. slope: the first-order term of log Z in that offset, from
    the mean attended key of each entry. entries: numbers are kept in the model's dtype or as `int8` with a
    scale per vector. lookup: `flat`, or `two_level` with `cells` first-level cells (null: 64 up to K =
    4,096, then 128), of which `probe` are searched, or `ivf`, the same with FAISS's lists, which is the
    fastest for decoding on a CPU; recall=true also searches flat and reports agreement. bos_in_query: put
    BOS before a query.
    """

    id: ClassVar[str] = "asm"
    family: ClassVar[str] = "memory"
    paper: ClassVar[str] = "Context Memorization for Efficient Long Context Generation"
    needs_shared_context: ClassVar[bool] = True
    needs_calibration: ClassVar[bool] = True
    needs_full_layer: ClassVar[bool] = True
    expects: ClassVar[tuple[str, ...]] = ("looked_up",)
    taps: ClassVar[bool] = True

    layout: Literal["auto", "pooled", "pairs", "group", "shared"] = "auto"
    heads_per_entry: int | None = None
    match: Literal["entries", "traffic", "storage"] = "entries"
    aggregate: Literal["eq5", "mean"] = "eq5"
    key: Literal["pre", "rope_unified", "rope_actual"] = "pre"
    unified_position: int = 0
    whiten: Literal["none", "full", "diagonal"] = "none"
    kmeans: Literal["lloyd", "minibatch"] = "lloyd"
    iterations: int = 3
    metric: Literal["l2", "cosine"] = "l2"
    init: Literal["kmeans++", "random"] = "kmeans++"
    backend: Literal["auto", "torch", "faiss"] = "auto"
    final: Literal["l2", "cosine"] = "l2"
    samples: Literal["float16", "float32"] = "float16"
    chunks: int = 1
    chunk_merge: Literal["mean", "sum"] = "mean"
    residual: bool = False
    ridge: float = 0.1
    slope: bool = False
    entries: Literal["model", "int8"] = "model"
    lookup: Literal["flat", "two_level", "ivf"] = "flat"
    cells: int | None = None
    probe: int = 16
    recall: bool = False
    bos_in_query: bool = False

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        for name in ("iterations", "chunks", "probe", "cells", "heads_per_entry"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise UserError(
                    f"method.{name}={value} is not a positive number, use method.{name}=1 or more"
                )
        if self.unified_position < 0:
            raise UserError("method.unified_position is a position in tokens, use 0 or more")
        if not self.ridge > 0:
            raise UserError(f"method.ridge={self.ridge} must be above 0, use method.ridge=0.1")
        if self.slope and self.whiten != "none":
            raise UserError("method.slope=true works with method.whiten=none only: set one of them back")

    def prepare(self, model: Any, calibration: Calibration, budget: Budget) -> StateMemory:
        """Collect states of the traces over the prefix, cluster them, and return the memory."""
        from kvexp.methods.memory.prepare import prepare

        return prepare(self, model, calibration, budget)

    @contextmanager
    def attach(self, model: Any, memory: Any = None) -> Iterator[None]:
        """Switch `model` to this method inside a `with` block; what decodes is compiled before it is used."""
        from kvexp_kernels.lookup_attend import compiled

        if model.device.type == "cpu":
            compiled()
        with super().attach(model, memory):
            yield

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
    ) -> KVCache:
        """Return a cache that has seen the prefix and stores only the memory's entries."""
        from kvexp.methods.memory.prepare import virtual_cache

        if memory is None:
            raise UserError("asm needs a memory: call method.prepare(model, calibration, budget) first")
        contexts = several(context)
        if len(contexts) > 1:
            raise UserError("a memory stands for one context: encode one at a time")
        return virtual_cache(self, model, contexts[0], memory)

    def update(
        self, model: Any, memory: StateMemory, calibration: Calibration, context: Context
    ) -> StateMemory:
        """Return `memory` with one more chunk of prefix, in one pass of the traces over that chunk alone.

        `calibration.context` is the new chunk behind the header, `context` the whole prefix after the update.
        """
        from kvexp.methods.memory.update import update

        return update(self, model, memory, calibration, context)

    def memory_class(self) -> Any:
        """The class of its memories."""
        from kvexp.methods.memory.states import StateMemory

        return StateMemory

    def memory_facts(self, budget: Budget, seed: int) -> dict[str, Any]:
        """Budget, seed and the knobs of building (lookups may change without building a memory again)."""
        return {"knobs": self.stored_knobs(), **super().memory_facts(budget, seed)}

    def stored_knobs(self) -> dict[str, Any]:
        """The knobs that decide what a memory holds."""
        return {name: value for name, value in asdict(self).items() if name not in INFERENCE_KNOBS}

    def sample_knobs(self) -> dict[str, Any]:
        """The knobs that decide what is collected; memories that share them can share their samples."""
        return {name: getattr(self, name) for name in SAMPLE_KNOBS}
