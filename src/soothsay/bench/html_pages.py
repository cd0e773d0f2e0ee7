"""HTML pages of results, which need no other files. Their templates are in `pages/`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup

from soothsay.plotting import inline_svg, series_style


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart on a page."""

    name: str
    svg: Markup
    series: Sequence[str] = ()  # names for the legend, by number of the series; empty: no legend
    caption: str = ""


def drawn(figure: Any, label: str) -> Markup:
    """A matplotlib figure as a part of a page. `label`: see `inline_svg`."""
    return Markup(inline_svg(figure, label))


def html_page(template: str, **content: Any) -> str:
    """A page. What is not `Markup` in its content is text."""
    loader = PackageLoader("soothsay.bench", "pages")
    environment = Environment(
        loader=loader, autoescape=True, trim_blocks=True, lstrip_blocks=True, undefined=StrictUndefined
    )
    return environment.get_template(template, globals={"series_style": series_style}).render(content)
