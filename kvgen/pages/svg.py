"""SVG by a few functions: elements whose contents are escaped, scales and ticks. Lengths are in user units, one pixel at full size."""

from __future__ import annotations

import math
from collections.abc import Callable

from markupsafe import Markup, escape

Scale = Callable[[float], float]
"""Maps a value to a coordinate."""


def element(tag: str, *children: str | Markup, **attributes: str | float | None) -> Markup:
    """An element. `stroke_width=2` is written `stroke-width="2"`, `class_` is `class`; attributes that are None are left out."""
    written = Markup("").join(
        Markup(' {}="{}"').format(name.rstrip("_").replace("_", "-"), _plain(value))
        for name, value in attributes.items()
        if value is not None
    )
    if not children:
        return Markup("<{}{}/>").format(tag, written)
    return Markup("<{}{}>{}</{}>").format(tag, written, Markup("").join(map(escape, children)), tag)


def _plain(value: str | float) -> str:
    return value if isinstance(value, str) else f"{value:.2f}".rstrip("0").rstrip(".")


def text(x: float, y: float, content: str, anchor: str = "start", class_: str | None = None, **attributes: str | float | None) -> Markup:
    """Text whose baseline is at y; `anchor` is start, middle or end."""
    return element("text", content, x=x, y=y, text_anchor=None if anchor == "start" else anchor, class_=class_, **attributes)


def rect(x: float, y: float, width: float, height: float, class_: str, *children: Markup, **attributes: str | float | None) -> Markup:
    """A rectangle; `children` may be a tooltip."""
    return element("rect", *children, x=x, y=y, width=max(0.0, width), height=height, class_=class_, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, class_: str) -> Markup:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, class_=class_)


def tooltip(content: str) -> Markup:
    """The text that a browser shows while the pointer is over the element that has it as a child."""
    return element("title", content)


def figure(width: float, height: float, label: str, *children: Markup) -> Markup:
    """A chart to embed in a page. `label` says in words what it shows, for those who do not see it."""
    box = f"0 0 {_plain(width)} {_plain(height)}"
    return element("svg", *children, viewBox=box, role="img", aria_label=label, class_="chart", style=f"--width:{_plain(width)}px")


def document(width: float, height: float, label: str, style: str, *children: Markup) -> str:
    """A chart as a file of its own, with its styles in it."""
    box = f"0 0 {_plain(width)} {_plain(height)}"
    css = element("style", Markup("\n{}").format(Markup(style)))
    return str(
        element(
            "svg", css, *children,
            xmlns="http://www.w3.org/2000/svg", width=width, height=height, viewBox=box, role="img", aria_label=label,
        )
    ) + "\n"  # fmt: skip


def linear(domain: tuple[float, float], span: tuple[float, float]) -> Scale:
    """Maps the domain to the span, in proportion."""
    (low, high), (start, end) = domain, span
    return lambda value: start + (end - start) * (value - low) / ((high - low) or 1.0)


def logarithmic(domain: tuple[float, float], span: tuple[float, float]) -> Scale:
    """Maps the domain, of positive numbers, to the span: equal ratios become equal distances."""
    place = linear((math.log(domain[0]), math.log(domain[1])), span)
    return lambda value: place(math.log(value))


def ticks(low: float, high: float, most: int = 5) -> list[float]:
    """At most so many round numbers (1, 2 or 5 times a power of ten apart) from low to high."""
    wanted = (high - low) / max(1, most - 1) or 1.0
    power = 10.0 ** math.floor(math.log10(wanted))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= wanted * (1 - 1e-9))
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low: float, high: float) -> list[float]:
    """Numbers 1, 2 and 5 times a power of ten, from low to high."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [value for power in powers for digit in (1, 2, 5) if low <= (value := digit * 10.0**power) <= high]
