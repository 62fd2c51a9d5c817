"""Hydra's sweeper for the grids of `kvexp.grids`; Hydra finds it here by itself.

Hydra runs this file without naming it a module, where a dataclass cannot have annotations as text.
"""

from dataclasses import dataclass, field
from typing import Any

from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override

from kvexp import grids


@dataclass
class GridConf:
    """What `hydra/sweeper: grid` takes: as Hydra's own sweeper, and the lines of the grid."""

    _target_: str = "hydra_plugins.kvexp_grid.GridSweeper"
    max_batch_size: int | None = None
    params: dict[str, str] | None = None
    grid: list[str] = field(default_factory=list)


class GridSweeper(BasicSweeper):
    """Runs the lines of a grid as one batch, so that a launcher gets all cells at once."""

    def __init__(
        self, max_batch_size: int | None, params: dict[str, str] | None = None, grid: Any = ()
    ) -> None:
        super().__init__(max_batch_size, {})
        self.shared, self.lines, self.written = dict(params or {}), list(grid), list[str]()

    def sweep(self, arguments: list[str]) -> Any:
        """Run every cell; `arguments` are the overrides of the command line."""
        self.written = list(arguments)
        return super().sweep(arguments)

    def split_arguments(  # type: ignore[override]  # Hydra calls it on the sweeper, with what it has parsed
        self, overrides: list[Override], max_batch_size: int | None
    ) -> list[list[list[str]]]:
        """Return batches of cells, each the words of its overrides."""
        assert self.hydra_context is not None
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        cells = grids.cells(parser.parse_overrides, self.shared, self.lines, self.written)
        return [list(part) for part in self.split_overrides_to_chunks(cells, max_batch_size)]


ConfigStore.instance().store(group="hydra/sweeper", name="grid", node=GridConf, provider="kvexp")
