"""A page from a template: Vega's scripts, styles and data are inside, and what was measured is escaped."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

from shardkit.pages.drawing import Figure

HERE = Path(__file__).parent
VEGA_LITE = "6.4"
SNIPPET = "window.vegaEmbed = vegaEmbed;"
NEEDS = ("vl_convert", "jinja2")


def can_draw() -> bool:
    """Whether what pages need is installed: pip install 'shardkit[reports]'."""
    return all(importlib.util.find_spec(name) is not None for name in NEEDS)


def page(
    template: str,
    *,
    brand: str,
    title: str,
    pick: str,
    sections: Sequence[tuple[str, str]],
    figures: Sequence[Figure],
    **more: Any,
) -> str:
    """The HTML text.

    Args:
        template: of jinja2, which extends frame.html.
        brand: the command that made it.
        title: what it is about.
        pick: the sentence that matters most.
        sections: (id, name) for the navigation.
        figures: drawn in the places that the template has for them.
        more: for the template.
    """
    import jinja2

    shared = {path.name: path.read_text(encoding="utf-8") for path in HERE.glob("*.html")}
    environment = jinja2.Environment(
        loader=jinja2.DictLoader(shared), autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True
    )
    return environment.from_string(template).render(
        brand=brand,
        title=title,
        pick=pick,
        sections=sections,
        figures=figures,
        style=_inline(_text("page.css")),
        vega=_inline(_vega()),
        script=_inline(_text("page.js")),
        specs=_json({figure.name: figure.spec for figure in figures}),
        **more,
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
