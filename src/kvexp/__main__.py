"""`python -m kvexp`."""

from __future__ import annotations

import sys

from kvexp.cli import main

if __name__ == "__main__":
    sys.exit(main())
