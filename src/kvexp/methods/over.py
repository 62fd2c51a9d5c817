"""What a method that stands on another one takes from it, said in one place."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from kvexp.methods.base import Calibration, Method

if TYPE_CHECKING:
    from kvexp.budget import Budget

LEARNING = ("needs_calibration", "learns_from")


@dataclass(frozen=True)
class Over(Method):
    """Base of methods that stand on another one: what that one learns they learn, in the same memories.

    A subclass names it in `learner`, and calls `follow` when its knobs have been checked.
    """

    @property
    def learner(self) -> Method:
        """The method that calibration is for."""
        raise NotImplementedError

    def follow(self, *names: str) -> None:
        """Say of oneself what the learner says of itself: of learning, and `names` of class variables."""
        of = self.learner
        for name in (*LEARNING, *names):
            object.__setattr__(self, name, getattr(of, name))
        object.__setattr__(self, "memory_id", of.memory_id or of.id)

    def memory_class(self) -> Any:
        """Return the class of the learner's memory."""
        return self.learner.memory_class()

    def memory_facts(self, budget: Budget, seed: int) -> dict[str, Any]:
        """Return what decides what the learner's memory holds."""
        return self.learner.memory_facts(budget, seed)

    def sample_knobs(self) -> dict[str, Any]:
        """Return the learner's knobs that decide what is collected."""
        return self.learner.sample_knobs()

    def prepare(self, model: Any, calibration: Calibration, budget: Budget) -> Any:
        """Let the learner learn."""
        return self.learner.prepare(model, calibration, budget)
