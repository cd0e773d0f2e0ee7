"""Draws with matplotlib, which is an optional dependency: what every chart of the project shares.

A chart is a function that returns a matplotlib figure; `save_png` writes it to a file and `inline_svg` makes
it a part of an HTML page. matplotlib's global state (pyplot) is not used.
"""

from __future__ import annotations

import re
from importlib import import_module
from io import StringIO
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

from soothsay.errors import SoothsayError
from soothsay.files import replacing

INK, DIM, RULE = "#1d1f23", "#666c75", "#e2e3e6"
"""Colours of text, of numbers beside it, and of grid lines, on white."""

COLOURS = (
    *("#7d838c", "#3b6fb6", "#d1702a", "#2f9158", "#b8478a"),
    *("#8a63c7", "#1794a3", "#a67c1b", "#c0453e", "#5c8a1f"),
)
"""Colours of series; see `series_style`."""

_TOOLTIP = "tooltip:"
_XLINK = "{http://www.w3.org/1999/xlink}href"
_NEEDLESS = re.compile(r"font-family:[^;]*;?\s*|(?<=\.\d\d)\d+")  # fonts, and digits after the second


def require_matplotlib() -> None:
    """Raise `SoothsayError` if matplotlib is not installed. Call it before a long run that draws.

    Charts have matplotlib's default style, whatever the settings of the user and of the current folder are.
    """
    try:
        import_module("matplotlib.figure")
        import_module("matplotlib").rcdefaults()  # a `matplotlibrc` of the current folder could run LaTeX
    except ImportError:
        raise SoothsayError(
            "drawing needs matplotlib: pip install matplotlib, or install soothsay[plot]"
        ) from None


def new_figure(**options: Any) -> Any:
    """Return an empty matplotlib figure. Raises `SoothsayError` if matplotlib is not installed."""
    require_matplotlib()
    return import_module("matplotlib.figure").Figure(**options)


def tidy(panel: Any) -> None:
    """Draw a light grid and no frame at the top and the right of a panel (matplotlib's `Axes`)."""
    panel.grid(alpha=0.25)
    panel.spines[["top", "right"]].set_visible(False)


def series_style(number: int) -> tuple[str, str]:
    """Colour and line style ("solid" or "dashed") of series `number`, so that 20 series differ."""
    return COLOURS[number % len(COLOURS)], "dashed" if number // len(COLOURS) % 2 else "solid"


def set_tooltip(artist: Any, text: str) -> None:
    """Give a part of a figure a tooltip, which `inline_svg` writes as its `<title>`."""
    artist.set_gid(_TOOLTIP + text)


def save_png(figure: Any, path: Path, dpi: int) -> None:
    """Write a figure to a file."""
    with replacing(path) as temporary:
        figure.savefig(temporary, format="png", dpi=dpi)


def inline_svg(figure: Any, label: str) -> str:
    """Return a figure as an `<svg>` element for an HTML page.

    Text stays text, in the page's font. The element refers to nothing outside of it: it has no metadata, no
    style sheet, no names of XML namespaces and no clip paths.

    Args:
        figure: a figure of matplotlib. Clipping is switched off in it.
        label: says what the chart shows, for readers who do not see it.
    """
    for artist in figure.findobj():
        artist.set_clip_on(False)
    drawn = StringIO()
    no_metadata = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with import_module("matplotlib").rc_context({"svg.fonttype": "none", "svg.hashsalt": "soothsay"}):
        figure.savefig(drawn, format="svg", metadata=no_metadata, transparent=True)
    root = ElementTree.fromstring(drawn.getvalue())
    shown = {use.attrib[_XLINK].removeprefix("#") for use in root.iter() if _XLINK in use.attrib}
    _clean(root, shown)
    root.attrib = {"viewBox": root.attrib["viewBox"], "role": "img", "aria-label": label}
    return ElementTree.tostring(root, encoding="unicode")


def _clean(element: ElementTree.Element, shown: set[str]) -> None:
    """Drop from an element what an HTML page does not need. `shown`: identifiers that others refer to."""
    element.tag = element.tag.rpartition("}")[2]
    element.text, element.tail = (element.text or "").strip(), None
    identifier = element.attrib.pop("id", "")
    if identifier in shown:
        element.attrib["id"] = identifier
    for name, value in [*element.attrib.items()]:
        element.attrib[name] = " ".join(_NEEDLESS.sub("", value).split())
    if element.attrib.get("transform", "").startswith("rotate(-0 "):
        del element.attrib["transform"]
    if _XLINK in element.attrib:
        element.attrib["xlink:href"] = element.attrib.pop(_XLINK)
    for child in [*element]:
        _clean(child, shown)
        if child.tag == "style" or (child.tag in ("g", "defs") and not len(child)):
            element.remove(child)
        elif child.tag == "g" and not child.attrib and child[0].tag != "title":  # says nothing: unwrap
            place = [*element].index(child)
            element[place : place + 1] = [*child]
    if identifier.startswith(_TOOLTIP):
        title = ElementTree.Element("title")
        title.text = identifier.removeprefix(_TOOLTIP)
        element.insert(0, title)
