"""Heavy hitters: rows that have received most attention so far stay, beside the most recent ones."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class H2O(EvictionMethod):
    """Keep the latest rows, and of the others those with the largest sum of attention, per KV head.

    Source: Zhang et al., "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language
    Models" (2023, arXiv 2306.14048). A row's score is the sum of its attention probabilities over all queries
    since it came, those of the prompt and of every decoded token, summed over the query heads that share the
    KV head; it is lost when the row leaves. The budget is split evenly into recent and heavy rows, as in the
    paper, and rows leave at each decoded token. The paper compresses models without shared KV heads; the sum
    over the group is ours.

    `recent_percent`: how much of the budget goes to the latest rows (rounded down); null: `recent` says it.
    `normalise`: `age` divides by the number of queries that could see the row: a sum favours early rows.
    `window`: score by the latest `window` queries alone, over the rows that are held when rows leave, instead
        of by all queries. `window=400 recent_percent=null recent=10` is the Scissorhands-like importance that
        "Attention Score is not All You Need for Token Importance Indicator in KV Cache Reduction: Value Also
        Matters" (2024, arXiv 2406.12335) weighs.
    """

    id: ClassVar[str] = "h2o"
    by_head: ClassVar[bool] = True
    paper: ClassVar[str] = (
        "H2O: Heavy-Hitter Oracle for Efficient Generative Inference of Large Language Models"
    )
    year: ClassVar[str] = "2023"
    reads: ClassVar[tuple[str, ...]] = ("attention of every step",)
    keeps: ClassVar[str] = "latest half of the budget"

    interval: int | None = 1
    recent_percent: int | None = 50
    normalise: Literal["none", "age"] = "none"
    window: int | None = None

    def __post_init__(self) -> None:
        """Refuse knobs that make no sense, before anything loads."""
        super().__post_init__()
        if self.recent_percent is not None and not 0 <= self.recent_percent < 100:
            raise UserError(
                f"method.recent_percent={self.recent_percent} leaves no row to choose: use 0 to 99, or null"
            )
        if self.recent_percent is not None and self.recent:
            raise UserError(
                f"recent={self.recent} has no effect beside recent_percent={self.recent_percent}: set h2o's"
                " recent_percent to null"
            )
        if self.window is not None and self.window < 1:
            raise UserError(f"method.window={self.window} is no number of queries: use 1 or more, or null")
        if self.group != "mean":
            raise UserError("method.group=max is not possible: h2o adds attention up over a group, use mean")

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Whether every step's attention is added up."""
        return self.window is None

    @property
    def window_size(self) -> int:
        """How many of the latest queries `score` reads."""
        return self.window or 0

    def recent_rows(self, budget: int) -> int:
        """Return how many of the latest rows always stay at a budget."""
        return self.recent if self.recent_percent is None else budget * self.recent_percent // 100

    def smallest_budget(self) -> int:
        """Return the fewest rows with which a row beside the recent ones and the sinks can be chosen."""
        if self.recent_percent is None:
            return self.sinks + self.recent + 1
        return 100 * self.sinks // (100 - self.recent_percent) + 1

    def always(self, view: View) -> Tensor | None:
        """Return the sinks and the latest rows, [B, H, S]."""
        recent = self.recent_rows(view.evictor.rows or 0)
        return EvictionMethod.always(replace(self, recent=recent, recent_percent=None), view)

    def observe(self, view: View) -> None:
        """Add the attention of this forward to what each row has received."""
        received = view.attention_sums().unflatten(1, (view.heads, -1)).sum(2)
        view.note("received", view.track("received") + received)

    def score(self, view: View) -> Tensor:
        """Return the attention that each row received, [B, H, S]."""
        if self.window is None:
            received = view.track("received")
            seen_by = view.next_position[:, None, None] - view.positions
        else:
            received = view.window_probabilities().sum(2).unflatten(1, (view.heads, -1)).sum(2)
            window = view.window
            later = view.layer.held().slots[:, :, None, :] <= window.slots[:, None, :, None]
            seen_by = (later & window.real[:, None, :, None]).sum(2)
        return received if self.normalise == "none" else received / seen_by.clamp(min=1)
