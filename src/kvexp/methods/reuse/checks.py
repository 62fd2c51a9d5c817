"""The check layer: all tokens of units run up to it, and fresh rows are held against the reused ones."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from kvexp.attention.rerotate import Pair
from kvexp.errors import UserError
from kvexp.methods.reuse.forward import Run
from kvexp.methods.reuse.probes import deviations, joint, top_of_units

if TYPE_CHECKING:
    from kvexp.methods.reuse.forward import Work


class Counting(Protocol):
    """A method that recomputes a share of each unit, or as many tokens as two probe sets would be."""

    @property
    def match(self) -> str:
        """`share` or `union`."""
        ...

    @property
    def check(self) -> int:
        """The check layer of the two probe sets."""
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
    """Return how many tokens of each unit are recomputed.

    To match a union takes a check layer: that of the method (`seen`) where it has one, else one of its own,
    which leaves the method's rows as they are.
    """
    geometry = run.geometry
    counts = [method.count(unit.length) for unit in geometry.units]
    if method.match == "share":
        return counts
    found = _aside(run, method.check) if seen is None else seen.deviations
    keys, values = (top_of_units(geometry, joint(x), counts) for x in found)
    union = keys | values
    return [int(union[unit.sequence, unit.columns].sum()) for unit in geometry.units]


def _aside(run: Run, check: int) -> Pair:
    """Return the deviations at a check layer of the same batch, found on rows apart from those of `run`."""
    aside = Run(run.model, run.geometry, run.sheet.pieces, run.reusable)
    found = checked(aside, check).deviations
    run.report.computed = list(map(max, run.report.computed, aside.report.computed))
    return found


def require_layer(name: str, check: int, layers: int) -> None:
    """Raise UserError where a model has no such layer."""
    if check >= layers:
        raise UserError(
            f"method.check={check} of {name} is no layer of this model, which has 0 to {layers - 1}:"
            " use method.check=1"
        )
