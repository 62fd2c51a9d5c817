"""LazyEviction: a row that comes back into attention now and then is kept for as long as it may come back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

from kvexp.errors import UserError
from kvexp.methods.eviction.base import EvictionMethod

if TYPE_CHECKING:
    from torch import Tensor

    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class LazyEviction(EvictionMethod):
    """Keep rows that were attended to lately, measured by the longest pause after which each came back.

    Source: Zhang et al., "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient
    Long Reasoning" (2025, arXiv 2506.15969). Decoded tokens are steps 1, 2, ...; at step t a row is active
    when its attention probability is at least `alpha`. TS is the last step at which it was active, MRI the
    longest time between two such steps. Rows of the prompt begin with TS = 0, the row of step t with t - 1,
    all with MRI = 0. Every `interval` steps the latest `recent` rows stay, and of the others the best by

        code:   2 s(-(1 + (t - TS) / (MRI + 1e-5)))  +  (2 s(-(MRI - 1)) where MRI > 0, else 0)
        paper:  2 s(-(t - TS) / MRI)  +  2 s(-1 / MRI)

    s is the logistic function. The two disagree on MRI: the second term of `paper` grows with it, while its
    text wants rows with short pauses, which is what `code` does (the default). A row that was never active
    again (MRI = 0) has score 0 in `paper`. Defaults: `alpha`, and 175 tokens for the window, which is both
    `interval` and `recent`, as in the paper's experiments. State is one for each KV head, with the largest
    probability in its group (`group`); the released code keeps one for each query head, on repeated rows.

    The source never compresses the prompt. Here, where the prompt alone exceeds the budget, the attention of
    its last token chooses. Rows that have not been active since the prompt all score 0 (to rounding), and the
    first of them stay. Of several tokens that arrive in one forward the last one is the step.
    """

    id: ClassVar[str] = "lazyeviction"
    paper: ClassVar[str] = (
        "LazyEviction: Lagged KV Eviction with Attention Pattern Observation for Efficient Long Reasoning"
    )
    year: ClassVar[str] = "2025"
    reads: ClassVar[tuple[str, ...]] = ("attention of every step",)
    observes: ClassVar[bool] = True
    stepwise: ClassVar[bool] = True

    interval: int | None = 175
    trigger: Literal["slack", "length"] = "length"
    recent: int = 175
    group: Literal["mean", "max"] = "max"
    alpha: float = 1e-4
    form: Literal["code", "paper"] = "code"

    def __post_init__(self) -> None:
        """Refuse a threshold that is no probability."""
        super().__post_init__()
        if not 0 < self.alpha < 1:
            raise UserError(f"method.alpha={self.alpha} is no probability between 0 and 1: use 0.0001")

    def observe(self, view: View) -> None:
        """Note which rows the latest decoded token attends to."""
        import torch

        if view.evictor.prompt is None:  # the prompt is being read: its rows begin with zeros
            return
        attention = self._latest(view)
        before, now = self._active_at(view), self._step(view)
        after = torch.where(attention >= self.alpha, now, before)
        view.note("pause", torch.maximum(view.track("pause"), after - before))
        view.note("active", after - self._birth(view))

    def score(self, view: View) -> Tensor:
        """Return H1 + H2 of each row, [B, H, S]; the last token's attention at the end of the prompt."""
        import torch

        if view.evictor.prompt is None:
            return self._latest(view)
        quiet = self._step(view) - self._active_at(view)
        pause = view.track("pause")
        again = pause > 0
        if self.form == "code":
            lately = 2 * torch.sigmoid(-(1 + quiet / (pause + 1e-5)))
            often = 2 * torch.sigmoid(1 - pause)
        else:
            lately = 2 * torch.sigmoid(-quiet / pause)
            often = 2 * torch.sigmoid(-1 / pause)
            lately = torch.where(again, lately, 0.0)
        return lately + torch.where(again, often, 0.0)

    def _latest(self, view: View) -> Tensor:
        """The latest token's attention probabilities, one for each KV head, [B, H, S]."""
        return self.combine(view.attention_sums(last=1), view)

    def _step(self, view: View) -> Tensor:
        """The number of tokens decoded so far, [B or 1, 1, 1] float32."""
        assert view.evictor.prompt is not None
        return (view.next_position - view.evictor.prompt)[:, None, None].float()

    def _birth(self, view: View) -> Tensor:
        """The step before each row's own, 0 for the prompt's, [B, H, S] float32: TS of a new row."""
        assert view.evictor.prompt is not None
        return (view.positions - view.evictor.prompt[:, None, None]).clamp(min=0).float()

    def _active_at(self, view: View) -> Tensor:
        """TS: noted as the distance from the row's birth, since notes of new rows are 0."""
        return self._birth(view) + view.track("active")
