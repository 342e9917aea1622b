"""Log-log plots as SVG text, written by hand: panels side by side, readable on light and on dark paper."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, HEIGHT = 300, 250
"""Of one panel's frame, in pixels."""
LEFT, TOP, GAP, BOTTOM = 62, 66, 84, 52
STYLE = """\
text { font: 12px system-ui, sans-serif; fill: #3b3f45; }
.title { font-weight: 600; font-size: 13px; }
.small { font-size: 11px; }
.grid { stroke: #8a8f98; stroke-opacity: 0.25; }
.frame { fill: none; stroke: #8a8f98; stroke-opacity: 0.6; }
.line { fill: none; stroke-width: 2; }
.s0 { stroke: #1f6fd6; } .f0 { fill: #1f6fd6; }
.s1 { stroke: #c2570c; stroke-dasharray: 7 4; } .f1 { fill: #c2570c; }
.s2 { stroke: #6b7280; stroke-dasharray: 2 4; } .f2 { fill: #6b7280; }
@media (prefers-color-scheme: dark) {
  text { fill: #d5d9df; }
  .s0 { stroke: #6aa9ff; } .f0 { fill: #6aa9ff; }
  .s1 { stroke: #f29a4a; } .f1 { fill: #f29a4a; }
  .s2 { stroke: #a3aab5; } .f2 { fill: #a3aab5; }
}"""
"""Lines differ in colour and in dashes, so that neither alone has to tell them apart."""

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Panel:
    """One plot: seconds against something, both logarithmic."""

    title: str
    axis: str
    """What is along the x axis, with its unit."""
    series: Mapping[str, Points]


def _decades(values: Sequence[float]) -> tuple[int, int]:
    """Return the powers of ten that enclose the values."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return low, max(high, low + 1)


def _seconds(power: int) -> str:
    """Write a power of ten in seconds."""
    for unit, exponent in (("s", 0), ("ms", -3), ("us", -6)):
        if power >= exponent:
            return f"{10 ** (power - exponent):,} {unit}"
    return f"1e{power} s"


def _count(power: int) -> str:
    """Write a power of ten."""
    for unit, exponent in (("G", 9), ("M", 6), ("k", 3)):
        if power >= exponent:
            return f"{10 ** (power - exponent)}{unit}"
    return f"{10**power}"


def _text(x: float, y: float, text: str, kind: str = "", anchor: str = "middle") -> str:
    return f'<text x="{x:.1f}" y="{y:.1f}" class="{kind}" text-anchor="{anchor}">{escape(text)}</text>'


def _panel(panel: Panel, left: float, names: Sequence[str]) -> list[str]:
    """Draw one panel; names say which colour each series has."""
    points = [point for series in panel.series.values() for point in series]
    (x0, x1), (y0, y1) = _decades([x for x, _ in points]), _decades([y for _, y in points])

    def along(x: float) -> float:
        return left + (math.log10(x) - x0) / (x1 - x0) * WIDTH

    def up(y: float) -> float:
        return TOP + HEIGHT - (math.log10(y) - y0) / (y1 - y0) * HEIGHT

    out = [_text(left + WIDTH / 2, TOP - 12, panel.title, "title")]
    for power in range(x0, x1 + 1):
        x = along(10.0**power)
        out.append(f'<line class="grid" x1="{x:.1f}" y1="{TOP}" x2="{x:.1f}" y2="{TOP + HEIGHT}"/>')
        out.append(_text(x, TOP + HEIGHT + 17, _count(power), "small"))
    for power in range(y0, y1 + 1):
        y = up(10.0**power)
        out.append(f'<line class="grid" x1="{left:.1f}" y1="{y:.1f}" x2="{left + WIDTH:.1f}" y2="{y:.1f}"/>')
        out.append(_text(left - 7, y + 4, _seconds(power), "small", "end"))
    out.append(f'<rect class="frame" x="{left:.1f}" y="{TOP}" width="{WIDTH}" height="{HEIGHT}"/>')
    out.append(_text(left + WIDTH / 2, TOP + HEIGHT + 38, panel.axis))
    for name, series in panel.series.items():
        colour = names.index(name) % 3
        path = " ".join(f"{along(x):.1f},{up(y):.1f}" for x, y in series)
        out.append(f'<polyline class="line s{colour}" points="{path}"/>')
        out += [f'<circle class="f{colour}" cx="{along(x):.1f}" cy="{up(y):.1f}" r="3.5"/>' for x, y in series]
    return out


def render(panels: Sequence[Panel]) -> str:
    """Return an SVG document with all panels side by side and one legend; panels without points are left out."""
    drawn = [panel for panel in panels if any(panel.series.values())]
    names = list(dict.fromkeys(name for panel in drawn for name in panel.series))
    width = LEFT + len(drawn) * WIDTH + max(0, len(drawn) - 1) * GAP + 28
    height = TOP + HEIGHT + BOTTOM
    box = f'width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
    label = 'role="img" aria-label="time against size, both logarithmic"'
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box} {label}>',
        f"<style>\n{STYLE}\n</style>",
    ]
    at = float(LEFT)
    for number, name in enumerate(names):
        out.append(f'<line class="line s{number % 3}" x1="{at:.0f}" y1="20" x2="{at + 30:.0f}" y2="20"/>')
        out.append(f'<circle class="f{number % 3}" cx="{at + 15:.0f}" cy="20" r="3.5"/>')
        out.append(_text(at + 38, 24, name, "", "start"))
        at += 60 + 7.0 * len(name)
    for number, panel in enumerate(drawn):
        out += _panel(panel, LEFT + number * (WIDTH + GAP), names)
    return "\n".join([*out, "</svg>"]) + "\n"
