"""`python -m kvexp.bench prefill` under its old name."""

from __future__ import annotations

import sys

from kvexp.bench.__main__ import main

if __name__ == "__main__":
    sys.exit(main(["prefill", *sys.argv[1:]]))
