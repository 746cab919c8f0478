"""A comparison as one HTML file that fetches nothing: Vega's scripts, styles and data are inside."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from shardkit.compare.figures import figures
from shardkit.compare.markdown import sections
from shardkit.compare.results import Comparison
from shardkit.compare.tables import verdict_table, without_empty_columns
from shardkit.compare.terminal import NOTE
from shardkit.compare.verdict import Verdict, recommendation

HERE = Path(__file__).parent
VEGA_LITE = "6.4"
SNIPPET = "window.vegaEmbed = vegaEmbed;"


def page(comparison: Comparison, found: Mapping[str, Verdict], title: str) -> str:
    """The HTML text; what was measured is escaped, whatever it holds."""
    import jinja2

    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    drawn = figures(found)
    return environment.from_string(_text("page.html")).render(
        title=title,
        note=NOTE,
        recommendation=recommendation(found),
        overview=without_empty_columns(verdict_table(found), keep=(0, 1)),
        verdicts=list(found.values()),
        figures=drawn,
        tables=sections(comparison, found),
        arms=comparison.arms,
        style=_inline(_text("page.css")),
        vega=_inline(_vega()),
        script=_inline(_text("page.js")),
        specs=_json({figure.name: figure.spec for figure in drawn}),
    )


def _inline(text: str) -> Any:
    """Text for a script or style element, which nothing in it can end."""
    import markupsafe

    return markupsafe.Markup(re.sub(r"<(?=/script|/style|!--)", r"\\x3c", text, flags=re.IGNORECASE))


def _json(value: Any) -> Any:
    import markupsafe

    return markupsafe.Markup(json.dumps(value, allow_nan=False).replace("<", "\\u003c"))


@cache
def _vega() -> str:
    """Vega, Vega-Lite and Vega-Embed, as vl-convert packs them."""
    import vl_convert

    return vl_convert.javascript_bundle(SNIPPET, VEGA_LITE)


def _text(name: str) -> str:
    return (HERE / name).read_text(encoding="utf-8")
