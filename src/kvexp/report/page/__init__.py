"""One HTML page that holds everything it needs: data, styles, scripts, and the library that draws.

Vega, Vega-Lite and Vega-Embed (BSD-3-Clause, University of Washington Interactive Data Lab) come out of the
wheel of vl-convert. What a run or a model wrote reaches the page as JSON alone, and the scripts put it there
as text, so that no sample can add markup; a content security policy keeps the page off the network.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from importlib import resources
from typing import Any

from kvexp.errors import UserError

SCRIPTS = ("base.js", "charts.js", "table.js", "compare.js", "cells.js", "detail.js", "main.js")
NOTICE = (
    "/* Vega, Vega-Lite, Vega-Embed: Copyright University of Washington Interactive Data Lab,"
    " BSD-3-Clause */\n"
)


def render(data: Mapping[str, Any], details: Sequence[Mapping[str, Any]], library: str) -> str:
    """Return the page; `details` is one object for each cell of `data`, which the page reads when opened."""
    blocks = "\n".join(
        f'<script type="application/json" id="detail-{place}">{embedded(detail)}</script>'
        for place, detail in enumerate(details)
    )
    parts = {
        "style": asset("style.css"),
        "data": embedded(data),
        "details": blocks,
        "library": "(() => {\n" + library.replace("</script", "<\\/script") + "\n})();",
        "script": '"use strict";\n' + "\n".join(asset(name) for name in SCRIPTS),
    }
    return re.sub("%([a-z]+)%", lambda found: parts[found[1]], asset("page.html"))


def embedded(value: Any) -> str:
    """Return JSON that is safe inside a script element: no `<` at all, so neither its end nor a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return text.replace("<", "\\u003c").encode("utf-8", "backslashreplace").decode("utf-8")


def asset(name: str) -> str:
    """Return the text of a file of this folder."""
    return resources.files(__package__).joinpath(name).read_text(encoding="utf-8")


def plot_library() -> str:
    """Return the JavaScript that draws. Raises UserError where vl-convert is not installed."""
    try:
        import vl_convert
    except ImportError as error:
        raise UserError(
            "the page's figures need vl-convert-python, which is not installed: pip install 'kvexp[report]',"
            " or add --tables for the tables alone"
        ) from error
    bundle: Any = vl_convert.javascript_bundle  # its stub knows no default
    return NOTICE + bundle()
