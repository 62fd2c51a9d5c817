"""`python -m kvexp`."""

from __future__ import annotations

import sys

from kvexp.crew.children import end_with_parent

if __name__ == "__main__":
    end_with_parent()  # before all that takes time

    from kvexp.cli import main

    sys.exit(main())
