"""KVzip: keep what a model reads when it has to repeat its own context, whatever the question will be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.bare import Bare

if TYPE_CHECKING:
    from pathlib import Path

    from kvexp.budget import Budget
    from kvexp.cache.kv_cache import KVCache
    from kvexp.prompt import Context


@dataclass(frozen=True)
class KVzip(Bare):
    """Let the model repeat its context chunk by chunk, and keep the rows that the repetition attends to.

    Source: Kim et al., "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction" (2025, arXiv
    2505.23416). Behind the whole cache the model is fed an instruction, the last 8 tokens of the chunk before
    and the chunk once more. The score of row j of the chunk is, for a KV head, the largest softmax weight
    that any of these tokens in any query head of the group gives it, over the `sinks`, the chunk and the
    repetition alone. The repetition is then dropped, and rows leave once and for all queries. The header of
    the context (BOS, system prompt, description), the sinks and the `recent` rows always stay; they count.
    Nothing leaves while decoding.

    `level`: rows compete over all layers and heads (`pair`, the paper's main setting: heads and layers differ
        in length, and together they hold n_layers * H * budget rows exactly), over the heads of a layer
        (`layer`), or within a head (`head`, as many rows in every head).
    `plus`: KVzip+ of Jégou and Jeblick, "KVzap: Fast, Adaptive, and Faithful KV Cache Pruning" (2026, arXiv
        2601.07891): before the largest is taken, the weight that token t gives row j in a query head becomes

            weight * |W_O v_j| / |h_t|

        with the head's part W_O of the output projection, the row's value v_j, L2 norms, and as h_t what
        enters the layer's attention at t: as in their code, and behind the layer's norm in most models.
    `chunk`: tokens that are repeated at a time (the paper's code: 2,000; kvpress: 2,048).
    `repeat`: the instruction, a text or its token ids. A text needs the tokenizer (`tokenized`, which a run
        calls); without one the header stands in its place.

    Departures: one instruction serves all chunks (the paper words the first in another way), no turn of a
    chat template is opened after it (write one into `repeat`), and layers with a sliding window take no
    part. A forward reads at most the model's `prefill_chunk` tokens of a repetition.
    """

    id: ClassVar[str] = "kvzip"
    paper: ClassVar[str] = "KVzip: Query-Agnostic KV Cache Compression with Context Reconstruction"
    year: ClassVar[str] = "2025"
    reads: ClassVar[tuple[str, ...]] = ("attention of a repetition",)
    unit: ClassVar[str] = "(layer, KV head)"

    sinks: int = 4  # type: ignore[misc]
    recent: int = 0  # type: ignore[misc]
    group: Literal["mean", "max"] = "max"  # type: ignore[misc]
    level: Literal["pair", "layer", "head"] = "pair"
    plus: bool = False
    chunk: int = 2048
    repeat: str | tuple[int, ...] = "\n\nNow write the text above once more, word for word.\n"

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        if self.chunk < 1:
            raise UserError(f"method.chunk={self.chunk} is no number of tokens: use 1 or more")

    def tokenized(self, tokenizer: Any) -> KVzip:
        """Return the method with its instruction as token ids."""
        if not isinstance(self.repeat, str):
            return self
        from kvexp.prompt import encode

        return replace(self, repeat=tuple(encode(tokenizer, self.repeat)))

    def opened(self, model: Any, folder: Path | None = None, sha256: str | None = None) -> Any:
        """Return a store of scores in `folder`, which the budgets of a grid share; None without one."""
        from kvexp.methods.eviction.score_store import ScoreStore

        return None if folder is None or sha256 is None else ScoreStore(folder / "kvzip", sha256)

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
    ) -> KVCache:
        """Return a cache that has read `context`, compressed to the budget.

        Several contexts are encoded and repeated as one batch, padded on the left. Raises UserError where a
        context is empty, since there is nothing to repeat, or the budget cannot hold what always stays.
        """
        from kvexp.methods.eviction.repetition import encode

        return encode(self, model, context, memory, budget)
