"""Plots as SVG, written out: one axis pair, lines, dots, bars with whiskers. Pure.

Nothing is loaded from anywhere, so a page with them shows the same offline and in ten years.
Colours tell series apart for colour-blind readers too (Okabe and Ito's), and a legend names them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from html import escape
from math import ceil, floor, isfinite, log10

WIDTH, HEIGHT = 640, 300
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 46
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
GREY = "#999999"
TICKS = 5
POINTS_MAX = 400  # of a line: more than that nobody can see

XY = tuple[float, float]


def ticks(low: float, high: float, wanted: int = TICKS) -> list[float]:
    """Round values that span the range: steps of 1, 2 or 5 times a power of ten."""
    if not (isfinite(low) and isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / wanted
    power = 10.0 ** floor(log10(rough))
    step = next(power * times for times in (1, 2, 5, 10) if power * times >= rough * (1 - 1e-9))
    first = ceil(low / step - 1e-9)
    return [at * step for at in range(first, floor(high / step + 1e-9) + 1)]


def number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 10_000 else f"{value:.6g}"


@dataclass
class Plot:
    """`x` and `y` are the ranges, `labels` what they measure. Add to it, then ask for `svg`."""

    x: XY
    y: XY
    labels: tuple[str, str]
    names: Sequence[str] = ()  # of places on the x axis, instead of numbers
    _parts: list[str] = field(default_factory=list)
    _legend: list[tuple[str, str]] = field(default_factory=list)

    def _at(self, point: XY) -> XY:
        spans = [max(high - low, 1e-12) for low, high in (self.x, self.y)]
        across = min(max((point[0] - self.x[0]) / spans[0], 0.0), 1.0)
        up = min(max((point[1] - self.y[0]) / spans[1], 0.0), 1.0)
        return (
            round(LEFT + across * (WIDTH - LEFT - RIGHT), 1),
            round(HEIGHT - BOTTOM - up * (HEIGHT - TOP - BOTTOM), 1),
        )

    def line(self, points: Sequence[XY], colour: str, width: float = 1.5, name: str = "") -> None:
        every = max(1, len(points) // POINTS_MAX)
        shown = [*points[:-1:every], *points[-1:]]
        path = " ".join(f"{x},{y}" for x, y in map(self._at, shown))
        title = f"<title>{escape(name)}</title>" if name else ""
        self._parts.append(
            f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}" '
            f'stroke-opacity="0.8">{title}</polyline>'
        )

    def dot(self, point: XY, colour: str, name: str = "") -> None:
        x, y = self._at(point)
        title = f"<title>{escape(name)}</title>"
        self._parts.append(f'<circle cx="{x}" cy="{y}" r="4" fill="{colour}">{title}</circle>')

    def whisker(self, x: float, low: float, high: float, colour: str) -> None:
        across, bottom = self._at((x, low))
        _, top = self._at((x, high))
        path = f"M{across - 4},{bottom}h8M{across},{bottom}V{top}M{across - 4},{top}h8"
        self._parts.append(f'<path d="{path}" stroke="{colour}" stroke-width="1.5" fill="none"/>')

    def level(self, y: float, name: str) -> None:
        """A bound, drawn across."""
        left, up = self._at((self.x[0], y))
        self._parts.append(
            f'<line x1="{left}" x2="{WIDTH - RIGHT}" y1="{up}" y2="{up}" stroke="#000" '
            f'stroke-dasharray="5 4"/><text x="{WIDTH - RIGHT}" y="{up - 4}" '
            f'text-anchor="end">{escape(name)}</text>'
        )

    def legend(self, name: str, colour: str) -> None:
        self._legend.append((name, colour))

    def svg(self) -> str:
        parts = [*self._grid(), *self._parts, *self._keys()]
        return (
            f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" '
            f'xmlns="http://www.w3.org/2000/svg">{"".join(parts)}</svg>'
        )

    def _grid(self) -> list[str]:
        parts = []
        for value in ticks(*self.y):
            left, up = self._at((self.x[0], value))
            parts.append(
                f'<line x1="{left}" x2="{WIDTH - RIGHT}" y1="{up}" y2="{up}" stroke="#ddd"/>'
                f'<text x="{left - 6}" y="{up + 4}" text-anchor="end">{number(value)}</text>'
            )
        shown: list[tuple[float, str]] = list(enumerate(self.names))
        shown = shown or [(value, number(value)) for value in ticks(*self.x)]
        for place, name in shown:
            across, _ = self._at((place, self.y[0]))
            parts.append(
                f'<text x="{across}" y="{HEIGHT - BOTTOM + 16}" text-anchor="middle">'
                f"{escape(name)}</text>"
            )
        middle = (HEIGHT - BOTTOM + TOP) / 2
        parts.append(
            f'<text x="{(WIDTH + LEFT) / 2}" y="{HEIGHT - 8}" text-anchor="middle">'
            f'{escape(self.labels[0])}</text><text transform="translate(14 {middle}) rotate(-90)" '
            f'text-anchor="middle">{escape(self.labels[1])}</text>'
        )
        return parts

    def _keys(self) -> list[str]:
        parts = []
        for row, (name, colour) in enumerate(self._legend):
            y = TOP + 6 + 16 * row
            parts.append(
                f'<rect x="{LEFT + 10}" y="{y - 6}" width="12" height="6" fill="{colour}"/>'
                f'<text x="{LEFT + 28}" y="{y + 1}">{escape(name)}</text>'
            )
        return parts
