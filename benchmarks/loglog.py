"""Charts with two logarithmic axes in one SVG file: small panels, one line per name."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

WIDTH, HEIGHT = 460, 270  # of a panel
LEFT, RIGHT, TOP, BOTTOM = 52, 150, 34, 30
COLOURS = ("#1f5fa8", "#c2571a", "#3d7a45", "#aa4499", "#9a958b")
LABEL_GAP = 14
MOST_TICKS = 6


@dataclass(frozen=True)
class Panel:
    """A chart: `lines` maps names to y values above 0, at the same `x`."""

    title: str
    x: Sequence[float]
    lines: Mapping[str, Sequence[float]]


def drawn(panels: Sequence[Panel], columns: int) -> str:
    """Return the panels as SVG, `columns` in a row."""
    rows = -(-len(panels) // columns)
    size = f'width="{columns * WIDTH}" height="{rows * HEIGHT}"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="11" fill="#1d1c1a">',
        '<rect width="100%" height="100%" fill="#fff"/>',
    ]
    for number, panel in enumerate(panels):
        place = f"translate({number % columns * WIDTH} {number // columns * HEIGHT})"
        parts += [f'<g transform="{place}">', *_panel(panel), "</g>"]
    return "\n".join([*parts, "</svg>"]) + "\n"


def _panel(panel: Panel) -> list[str]:
    values = [value for line in panel.lines.values() for value in line]
    low, high = math.log2(min(values)), math.log2(max(values))
    low, high = low - 0.1, max(high, low + 1) + 0.1
    first, last = math.log2(panel.x[0]), math.log2(panel.x[-1])

    def x(value: float) -> float:
        return LEFT + (math.log2(value) - first) / (last - first) * (WIDTH - LEFT - RIGHT)

    def y(value: float) -> float:
        return HEIGHT - BOTTOM - (math.log2(value) - low) / (high - low) * (HEIGHT - TOP - BOTTOM)

    parts = [f'<text x="{LEFT}" y="18" font-size="13" font-weight="600">{escape(panel.title)}</text>']
    for tick in ticks(low, high):
        parts.append(f'<path d="M{LEFT} {y(tick):.1f}H{WIDTH - RIGHT}" stroke="#e5e1d8"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{tick:g}</text>')
    parts += [f'<text x="{x(v):.1f}" y="{HEIGHT - 10}" text-anchor="middle">x {v:g}</text>' for v in panel.x]
    free = float("inf")
    for number, (name, line) in sorted(enumerate(panel.lines.items()), key=lambda item: item[1][1][-1]):
        colour = COLOURS[number % len(COLOURS)]
        points = [(x(at), y(value)) for at, value in zip(panel.x, line, strict=True)]
        path = "L".join(f"{a:.1f} {b:.1f}" for a, b in points)
        parts.append(f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="2.5" fill="{colour}"/>' for a, b in points]
        # from the lowest line to the highest, so that labels do not overlap
        free = min(points[-1][1] + 4, free - LABEL_GAP)
        parts.append(f'<text x="{WIDTH - RIGHT + 8}" y="{free:.1f}" fill="{colour}">{escape(name)}</text>')
    return parts


def ticks(low: float, high: float) -> list[float]:
    """Return powers of two from 2^low to 2^high, at most `MOST_TICKS`."""
    whole = range(math.ceil(low), math.floor(high) + 1)
    return [2.0**power for power in whole[:: -(-len(whole) // MOST_TICKS) or 1]]
