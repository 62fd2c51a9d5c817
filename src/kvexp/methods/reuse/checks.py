"""The check layer: all tokens of units run up to it, and fresh rows are held against the reused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvexp.attention.rerotate import Pair
from kvexp.errors import UserError
from kvexp.methods.reuse.probes import deviations, joint, top_of_units

if TYPE_CHECKING:
    from kvexp.methods.reuse.forward import Run, Work


class Counting(Protocol):
    """A method that recomputes a share of each unit, or as many tokens as two probe sets would be."""

    @property
    def match(self) -> str:
        """`share` or `union`."""
        ...

    def count(self, tokens: int) -> int:
        """The share of a unit, in tokens."""
        ...


@dataclass(frozen=True)
class Checked:
    """All tokens of units before the check layer: `fresh` [B, H, R, D] there, and how far each is off.

    deviations: of keys and of values, [B, H, C].
    """

    work: Work
    fresh: Pair
    deviations: Pair


def checked(run: Run, check: int) -> Checked:
    """Run all tokens of units through the layers before `check`, and compute keys and values in it."""
    work = run.start(run.reusable)
    for layer in range(check):
        work.through(layer)
    fresh = work.peek(check)
    return Checked(work, fresh, deviations(run, work, check, fresh))


def counts_of(method: Counting, run: Run, seen: Checked | None) -> list[int]:
    """Return how many tokens of each unit are recomputed."""
    geometry = run.geometry
    counts = [method.count(unit.length) for unit in geometry.units]
    if method.match == "share":
        return counts
    assert seen is not None
    keys, values = (top_of_units(geometry, joint(x), counts) for x in seen.deviations)
    union = keys | values
    return [int(union[unit.sequence, unit.columns].sum()) for unit in geometry.units]


def require_layer(name: str, check: int, layers: int) -> None:
    """Raise UserError where a model has no such layer."""
    if check >= layers:
        raise UserError(
            f"method.check={check} of {name} is no layer of this model, which has 0 to {layers - 1}:"
            " use method.check=1"
        )
