"""What every eviction method is: a score for each row, and knobs that the mechanism understands.

A method implements `score`; when rows leave, which are always kept, how many each layer and head may hold and
how the kept ones are stored is done for all of them by `MethodEvictor`, `selection` and the layer.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.base import Method, several

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.budget import Budget
    from kvexp.cache.kv_cache import KVCache
    from kvexp.methods.eviction.view import View
    from kvexp.prompt import Context

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class EvictionMethod(Method):
    """Base of the family; its knobs say when rows leave and which never do.

    The budget counts everything that a layer holds per KV head: sinks, recent rows and prompt too.

    `prefill`: compress when the prompt has been read (`end`), after each of its chunks as well, so that a
        long prompt is never held whole (`chunks`), or not at all (`off`).
    `query_aware`: the compression at the end of the prompt waits until the query has been read as well; every
        query then works on rows of its own.
    `interval`: tokens between compressions while decoding: 1 is each step, null never. A cache holds at most
        budget + interval - 1 rows between steps.
    `trigger`: evict when a cache holds budget + interval rows (`slack`), or whenever the number of tokens
        seen is a multiple of the interval (`length`).
    `smooth`: layers take turns within the interval, so that no step pays for all of them.
    `sinks`, `recent`: the first and the latest tokens, always kept.
    `protect_prompt`: rows of the prompt are always kept, where the budget holds the whole prompt.
    `group`: how scores of the query heads that share a KV head become one.
    """

    family: ClassVar[str] = "eviction"
    needs_full_layer: ClassVar[bool] = True
    expects: ClassVar[tuple[str, ...]] = ("evicted",)
    observes: ClassVar[bool] = False  # whether `observe` reads every step's attention probabilities
    follows: ClassVar[bool] = False  # whether `observe` is called after each forward though it reads none
    stepwise: ClassVar[bool] = False  # whether `observe` takes each forward for one decoded token
    divides: ClassVar[bool] = False  # whether `allot` has a rule of its own
    reads: ClassVar[tuple[str, ...]] = ()  # what a score is made of, for the table of methods
    unit: ClassVar[str] = "KV head"  # what has a kept set of its own, for the table of methods
    keeps: ClassVar[str] = ""  # what never leaves, where no knob says it
    year: ClassVar[str] = ""

    prefill: Literal["end", "chunks", "off"] = "end"
    query_aware: bool = False
    interval: int | None = None
    trigger: Literal["slack", "length"] = "slack"
    smooth: bool = False
    sinks: int = 0
    recent: int = 0
    protect_prompt: bool = False
    group: Literal["mean", "max"] = "mean"

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        for name in ("sinks", "recent"):
            if getattr(self, name) < 0:
                raise UserError(f"method.{name}={getattr(self, name)} is no number of rows: use 0 or more")
        if self.interval is not None and self.interval < 1:
            raise UserError(
                f"method.interval={self.interval} is not possible: use 1 (each step) or more, or null (never)"
            )
        if self.smooth and self.scope == "model":
            raise UserError("method.smooth=true needs layers that choose on their own: set another mode")

    def score(self, view: View) -> Tensor:
        """Return how much each row is worth keeping, [B, Hq or Hk or H or 1, S], float32 at least."""
        raise NotImplementedError

    @property
    def scope(self) -> Literal["layer", "model"]:
        """Whether a layer chooses on its own, or `across` has to see the scores of all layers first."""
        return "layer"

    @property
    def oldest_first(self) -> bool:
        """Whether rows behind the sinks leave in their order, the same in all heads, as scores say."""
        return False

    @property
    def window_size(self) -> int:
        """How many of the latest queries `score` reads."""
        return 0

    def observe(self, view: View) -> None:
        """See a layer after each forward; called where the method `observes` or `follows`."""

    def combine(self, scores: Tensor, view: View) -> Tensor:
        """Return scores of the stored heads, [B, H, S]."""
        from kvexp.methods.eviction.selection import over_group

        scores = over_group(scores, view.heads, self.group) if scores.shape[1] >= view.heads else scores
        return scores.expand(view.layer.keys.shape[:3])

    def across(self, scores: list[Tensor], views: list[View]) -> list[Tensor]:
        """Return the scores [B, H, S] of all layers, made comparable or equal (`scope` "model" only)."""
        return scores

    def layer_rows(self, layer: int, n_layers: int, rows: int, length: int) -> int:
        """Return how many rows per KV head a layer may keep of a sequence of `length` tokens so far.

        `rows` is the budget; the mean over layers must not be larger.
        """
        return rows

    def allot(
        self, scores: Tensor, targets: Sequence[int], view: View, always: Tensor | None
    ) -> list[list[int]]:
        """Return how many rows each head of each sequence keeps; they sum to H times the target."""
        return [[target] * view.heads for target in targets]

    def always(self, view: View) -> Tensor | None:
        """Return the rows that are kept before any other, [B, H, S], or None."""
        positions, upcoming = view.positions, view.next_position[:, None, None]
        kept = positions < self.sinks if self.sinks else None
        if self.recent:
            recent = positions >= upcoming - self.recent
            kept = recent if kept is None else kept | recent
        prompt = view.evictor.prompt
        if self.protect_prompt and prompt is not None:
            beside = self.smallest_budget() - self.sinks  # the latest rows, and one to choose
            fits = prompt + beside <= prompt.new_tensor(self._limits(view))
            mine = (positions < prompt[:, None, None]) & fits[:, None, None]
            kept = mine if kept is None else kept | mine
        return kept

    def _limits(self, view: View) -> list[int]:
        """Return how many rows per KV head this layer may keep of each sequence."""
        rows = view.evictor.rows or 0
        seen = view.evictor.tally.tokens[view.index]
        return [self.layer_rows(view.index, view.n_layers, rows, tokens) for tokens in seen]

    def evicted(self, view: View) -> None:
        """Do what remains when a layer has been compacted."""

    def during(self, phase: str) -> EvictionMethod:
        """Return the method that decides in a phase: `prefill`, `pending` or `decode`."""
        return self

    def smallest_budget(self) -> int:
        """Return the fewest rows with which the method has a choice to make."""
        return max(self.sinks + self.recent, self.window_size) + 1

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError when rows never leave, or the budget is less than what the method always keeps."""
        if self.prefill == "off" and self.interval is None and budget.rows is not None:
            raise UserError(
                f"{self.id} never evicts with prefill=off and interval=null: set one of the two, or take"
                " method=full"
            )
        least = self.smallest_budget()
        if budget.rows is not None and budget.rows < least:
            raise UserError(
                f"budget={budget} leaves {self.id} nothing to choose beside the rows that it always keeps:"
                f" use budget={least} or more, or keep fewer (method.recent, method.sinks, method.window)"
            )

    def bound(self, model: Any, memory: Any) -> EvictionMethod:
        """Return the method as it serves this model and memory; UserError where it cannot serve them."""
        return self

    def encode(
        self,
        model: Any,
        context: Context | Sequence[int] | Sequence[Context],
        memory: Any = None,
        budget: Budget | int | str | None = None,
    ) -> KVCache:
        """Return a cache that has read `context`, compressed to the budget unless that waits for the query.

        Several contexts are encoded as one batch, padded on the left. An empty context leaves the compression
        to the first forward: `generate` then reads the whole prompt.
        """
        from kvexp.budget import Budget
        from kvexp.cache.kv_cache import prefill
        from kvexp.methods.eviction.caches import evicting_cache
        from kvexp.methods.eviction.evictor import MethodEvictor
        from kvexp.prompt import Context

        texts = [one.ids if isinstance(one, Context) else one for one in several(context)]
        budget = Budget(None) if budget is None else Budget.parse(budget, max(map(len, texts)))
        self.check_budget(budget)
        evictor = MethodEvictor(self.bound(model, memory), budget.rows, memory, model=model)
        cache = evicting_cache(model, evictor)
        if any(texts):
            with self.attach(model, memory):
                prefill(model, texts, cache, evictor.reading)
            evictor.read()
        return cache
