"""One method for the prompt, another for what is generated."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, ClassVar

from kvexp.errors import UserError
from kvexp.methods.eviction.bare import Bare
from kvexp.methods.eviction.base import EvictionMethod
from kvexp.methods.eviction.rkv import RKV
from kvexp.methods.eviction.snapkv import SnapKV
from kvexp.methods.over import Over

if TYPE_CHECKING:
    from kvexp.budget import Budget
    from kvexp.methods.eviction.view import View


@dataclass(frozen=True)
class TwoPhase(Over, Bare):
    """Let `at_prefill` compress the prompt and `at_decode` what a model holds while it generates.

    A part is the name of an eviction method, or {name: NAME, knob: value}. Both work with the same budget.
    Knobs belong to the parts: those of `at_prefill` say when and how a prompt is compressed (`prefill`,
    `query_aware`), those of `at_decode` when and how rows leave later (`interval`, `trigger`, `smooth`). Both
    see every query from the first one on, so that the second starts with what it would know on its own.
    """

    id: ClassVar[str] = "two_phase"
    reads: ClassVar[tuple[str, ...]] = ("what its parts read",)
    unit: ClassVar[str] = "that of its parts"

    at_prefill: EvictionMethod = field(default_factory=SnapKV)
    at_decode: EvictionMethod = field(default_factory=RKV)

    def __post_init__(self) -> None:
        """Refuse parts that never act, or cannot share a cache."""
        super().__post_init__()
        for name, part in (("at_prefill", self.at_prefill), ("at_decode", self.at_decode)):
            if isinstance(part, Bare) or type(part).encode is not EvictionMethod.encode:
                raise UserError(f"method.{name}={part.id} cannot be a part: name snapkv, rkv or the like")
            if getattr(part, "rope", "original") == "in_cache":
                raise UserError(
                    f"method.{name} needs the whole cache for rope=in_cache: use rope=original, or"
                    " method=streaming_llm"
                )
        if self.at_prefill.prefill == "off":
            raise UserError(
                "method.at_prefill never acts with prefill=off: leave it out, or take at_decode as the method"
            )
        if self.at_decode.interval is None:
            name = self.at_decode.id
            raise UserError(
                f"method.at_decode={name} never acts with interval=null: write"
                f" 'method.at_decode={{name: {name}, interval: 128}}'"
            )
        listening = [part for part in self._parts if part.observes or part.follows]
        if len({part.id for part in listening}) < len(listening):
            raise UserError(
                f"both parts are {listening[0].id}, whose notes would mix: take method={listening[0].id}"
            )
        if all(part.needs_calibration for part in self._parts):
            raise UserError("both parts need calibration, and a run prepares one memory: change one of them")
        self.follow()

    @property
    def _parts(self) -> tuple[EvictionMethod, EvictionMethod]:
        return self.at_prefill, self.at_decode

    @property
    def learner(self) -> EvictionMethod:
        """The part that calibration is for."""
        return self.at_prefill if self.at_prefill.needs_calibration else self.at_decode

    @property
    def observes(self) -> bool:  # type: ignore[override]
        """Whether a part reads every step's attention probabilities."""
        return any(part.observes for part in self._parts)

    @property
    def follows(self) -> bool:  # type: ignore[override]
        """Whether a part is told of each forward."""
        return any(part.follows for part in self._parts)

    @property
    def taps(self) -> bool:  # type: ignore[override]
        """Whether a part reads queries before RoPE."""
        return any(part.taps for part in self._parts)

    @property
    def window_size(self) -> int:
        """How many of the latest queries the part with the larger window reads."""
        return max(part.window_size for part in self._parts)

    def bound(self, model: Any, memory: Any) -> EvictionMethod:
        """Return the method with parts that serve this model and memory."""
        prefill, decode = (part.bound(model, memory) for part in self._parts)
        return replace(self, at_prefill=prefill, at_decode=decode)

    def check_budget(self, budget: Budget) -> None:
        """Raise UserError when the budget is too small for a part."""
        for part in self._parts:
            part.check_budget(budget)

    def observe(self, view: View) -> None:
        """Let the parts see a forward, the first one as long as the prompt is being read."""
        for part in self._parts if view.evictor.phase != "decode" else (self.at_decode,):
            if part.observes or part.follows:
                part.observe(view)

    def during(self, phase: str) -> EvictionMethod:
        """Return the part that decides in a phase."""
        return self.at_decode if phase == "decode" else self.at_prefill
