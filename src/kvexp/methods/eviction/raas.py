"""RaaS: pages of decoded rows stay as long as queries keep coming back to them; the prompt always does."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.pages import Pages
    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class RaaS(EvictionMethod):
    """Keep the prompt, and the pages of decoded rows that were attended to last, per KV head.

    Source: Hu et al., "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning" (2025, arXiv
    2502.11147). Decoded rows form pages of `page` consecutive tokens. A page carries the time at which it was
    last of use: when its latest row came, or at a decoded token whose query attends to it enough. Above the
    budget the page with the oldest time leaves whole, of equal ones the earlier page; the page that is being
    filled never does. A cache therefore holds between budget - page + 1 and budget rows.

    `variant`: a page is of use when its attention is above `alpha` (`threshold`), or among the `top_percent`
        of the pages that may leave (`top`, rounded down, at least one).
    `estimate`: a page's attention is the largest probability of its rows (`exact`), or is computed from the
        `page` alone: the largest logit that the smallest and largest value of each key channel allow (as in
        Tang et al., "Quest: Query-Aware Sparsity for Efficient Long-Context LLM Inference", 2024, arXiv
        2406.10774), and a softmax over the pages, those of the prompt included. Sources do not agree on the
        softmax; ours is over pages since the method is meant to read one representative of each. A learned
        sink of the model takes its share of it, as of the probabilities that `exact` reads.

    The heads that share a KV head agree by `group`. The budget holds the prompt too. The source never
    compresses a prompt. Here a prompt that leaves no room for a page is made of pages like the rest, counted
    back from its end: when it has been read, those that its last token attends to most stay, and later their
    rows leave like others, as many at once as a page has.
    """

    id: ClassVar[str] = "raas"
    paper: ClassVar[str] = "RaaS: Reasoning-Aware Attention Sparsity for Efficient LLM Reasoning"
    year: ClassVar[str] = "2025"
    reads: ClassVar[tuple[str, ...]] = ("attention of every step", "keys")
    observes: ClassVar[bool] = True
    stepwise: ClassVar[bool] = True
    divides: ClassVar[bool] = True

    interval: int | None = 1
    protect_prompt: bool = True
    group: Literal["mean", "max"] = "max"
    page: int = 16
    variant: Literal["threshold", "top"] = "threshold"
    estimate: Literal["exact", "page"] = "page"
    alpha: float = 1e-4
    top_percent: int = 50

    def __post_init__(self) -> None:
        """Refuse pages without rows and thresholds that nothing or everything passes."""
        super().__post_init__()
        if self.page < 1:
            raise UserError(f"method.page={self.page} is no number of rows: use 1 (single tokens) or more")
        if not 0 < self.alpha < 1:
            raise UserError(f"method.alpha={self.alpha} is no probability between 0 and 1: use 0.0001")
        if not 0 < self.top_percent <= 100:
            raise UserError(f"method.top_percent={self.top_percent} is no share of the pages: use 1 to 100")

    @property
    def window_size(self) -> int:
        """The latest query is read where pages are judged without their rows."""
        return int(self.estimate == "page")

    def smallest_budget(self) -> int:
        """Return the fewest rows that hold one beside the sinks and the page that is being filled."""
        return self.sinks + max(self.recent, self.page) + 1

    def always(self, view: View) -> Tensor | None:
        """Return sinks, recent rows, the page that is being filled, and the prompt where it fits."""
        positions, last = view.positions, view.next_position - 1
        prompt = self._prompt(view)
        filling = last - (last - prompt) % self.page
        kept = positions >= filling[:, None, None]
        kept = kept | ((positions < prompt[:, None, None]) & self._protects(view)[:, None, None])
        others = EvictionMethod.always(replace(self, protect_prompt=False), view)
        return kept if others is None else kept | others

    def allot(
        self, scores: Tensor, targets: Sequence[int], view: View, always: Tensor | None
    ) -> list[list[int]]:
        """Return how many rows each head keeps: once the prompt is read, whole pages leave."""
        if view.evictor.prompt is None:
            return super().allot(scores, targets, view, always)
        assert always is not None
        kept = always if view.valid is None else always & view.valid
        protected = kept.sum(2).amax(1).tolist()
        rows = []
        for target, held, least in zip(targets, view.length, protected, strict=True):
            leaving = -(-max(0, held - target) // self.page) * self.page
            rows.append(max(held - leaving, min(target, least)))
        return [[count] * view.heads for count in rows]

    def observe(self, view: View) -> None:
        """Renew the time of the pages that the latest decoded token attends to."""
        import torch

        if view.evictor.prompt is None:
            return
        pages = self._pages(view)
        useful = pages.spread(self._useful(view, pages).float()) > 0
        step = (view.next_position - view.evictor.prompt)[:, None, None].float()
        view.note("used", torch.where(useful, step, self._used(view)) - self._birth(view))

    def score(self, view: View) -> Tensor:
        """Return how many pages are older than each row's, [B, H, S] float32; the earlier of two equals is.

        At the end of the prompt: the attention of the page.
        """
        pages = self._pages(view)
        if view.evictor.prompt is None:
            return pages.spread(self._attention(view, pages))
        used = pages.largest(self._used(view)).clamp(min=0).long()
        return pages.spread(used.argsort(dim=2, stable=True).argsort(dim=2).float())

    def _prompt(self, view: View) -> Tensor:
        """The length of the prompt, [B or 1]: all that was read so far, while it is being read."""
        prompt = view.evictor.prompt
        return view.next_position if prompt is None else prompt

    def _protects(self, view: View) -> Tensor:
        """Whether each sequence's prompt stays, [B or 1] bool: it was read and leaves room for a page."""
        prompt, room = self._prompt(view), (view.evictor.rows or 0) - max(self.recent, self.page)
        return (prompt <= room) & (self.protect_prompt and view.evictor.prompt is not None)

    def _pages(self, view: View) -> Pages:
        from kvexp.methods.eviction.pages import Pages

        return Pages(view.positions, self._prompt(view), self.page, view.valid)

    def _birth(self, view: View) -> Tensor:
        """The step of each row's own token, 0 for the prompt's, [B, H, S] float32."""
        assert view.evictor.prompt is not None
        return (view.positions - view.evictor.prompt[:, None, None] + 1).clamp(min=0).float()

    def _used(self, view: View) -> Tensor:
        """When each row was last of use: noted from its birth on, since notes of new rows are 0."""
        return self._birth(view) + view.track("used")

    def _attention(self, view: View, pages: Pages) -> Tensor:
        """The latest token's attention to each page, [B, H, N] float32 at least; 0 for empty pages."""
        from kvexp.methods.eviction.selection import over_group

        if self.estimate == "exact":
            return pages.largest(self.combine(view.attention_sums(last=1), view)).clamp(min=0)
        import torch

        query = view.window.queries[:, :, -1]
        dtype = torch.promote_types(query.dtype, torch.float32)
        logits = pages.bounds(query.to(dtype), view.keys.to(dtype)) * view.scale
        return over_group(view.softmax(logits[:, :, None])[:, :, 0], view.heads, self.group)

    def _useful(self, view: View, pages: Pages) -> Tensor:
        """Which pages the latest token attends to enough, [B, H, N] bool."""
        attention = self._attention(view, pages)
        if self.variant == "threshold":
            return attention > self.alpha
        protects = self._protects(view)[:, None, None]
        among = pages.exist() & (pages.exist(decoded=True) | ~protects)  # pages that may leave
        order = attention.masked_fill(~among, -1.0).argsort(dim=2, descending=True, stable=True)
        rank = order.argsort(dim=2)
        wanted = (among.sum(2, keepdim=True) * self.top_percent // 100).clamp(min=1)
        return among & (rank < wanted)
