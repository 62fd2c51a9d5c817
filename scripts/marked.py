"""A table that stands between two marks of a page: printed, or written there."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Marked:
    """The place of a table: between the marks of `name` in `page`, a file of this checkout."""

    page: str
    name: str
    table: Callable[[], str]

    def main(self, arguments: Sequence[str]) -> int:
        """Print the table, or write it into the page with `--write`."""
        if list(arguments) == ["--write"]:
            path = Path(__file__).parents[1] / self.page
            path.write_text(self.placed(path.read_text(encoding="utf-8")), encoding="utf-8")
        else:
            print(self.table())
        return 0

    def placed(self, text: str) -> str:
        """Return a page's text with the table between its marks."""
        start, end = f"<!-- {self.name} -->", f"<!-- end of {self.name} -->"
        before, _, rest = text.partition(start)
        _, _, after = rest.partition(end)
        return f"{before}{start}\n{self.table()}\n{end}{after}"
