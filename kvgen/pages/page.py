"""Renders a page: jinja2 templates under templates/pages and beside it, one file with its styles and charts in it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from kvgen import _resources
from kvgen.pages import numbers

if TYPE_CHECKING:
    import jinja2

REPORT, ACCURACY = "kvgen-report.html", "kvgen-accuracy.html"
"""File names of pages by default; pages in one folder link each other."""

FILTERS = {"us": numbers.microseconds, "fraction": numbers.fraction, "factor": numbers.factor, "measure": numbers.measure}
"""Filters of templates that write a number with its unit; the space between the two does not break."""


def environment() -> jinja2.Environment:
    """Templates extend `pages/base.html.jinja`, which has the styles; what they are given is escaped, unless it is `Markup`."""
    import jinja2

    loader = jinja2.FileSystemLoader(_resources.templates())
    made = jinja2.Environment(loader=loader, undefined=jinja2.StrictUndefined, autoescape=True, trim_blocks=True, lstrip_blocks=True)
    for name, written in FILTERS.items():
        made.filters[name] = lambda *given, written=written: written(*given).replace(" ", "\N{NO-BREAK SPACE}")
    return made


def render(template: str, **values: Any) -> str:
    """The page of a template, given by its path below templates/."""
    from kvgen import __version__

    return environment().get_template(template).render(version=__version__, **values)


def colors() -> str:
    """The styles of charts: colours in light and dark mode, and the classes of marks. An SVG file embeds them as a page does."""
    return (_resources.templates() / "pages" / "colors.css").read_text(encoding="utf-8")
