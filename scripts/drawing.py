"""Boxes, arrows and sheets in SVG, for `make_figures.py`. No dependency."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

INK, PAPER, HOST, DEVICE = "#1f2933", "#ffffff", "#e8eef6", "#e9f3ea"


@dataclass(frozen=True)
class Box:
    x: int
    y: int
    w: int
    h: int
    title: str
    lines: tuple[str, ...] = ()
    fill: str = HOST

    def svg(self) -> str:
        middle = self.x + self.w / 2
        parts = [
            f'<rect x="{self.x}" y="{self.y}" width="{self.w}" height="{self.h}" rx="6" fill="{self.fill}"'
            f' stroke="{INK}"/>',
            f'<text x="{middle}" y="{self.y + 21}" text-anchor="middle" font-weight="bold">{escape(self.title)}</text>',
        ]
        for i, line in enumerate(self.lines):
            parts.append(text(middle, self.y + 40 + 16 * i, line, "middle"))
        return "\n".join(parts)


@dataclass(frozen=True)
class Frame:
    """Around boxes that belong together."""

    x: int
    y: int
    w: int
    h: int
    label: str
    indent: int = 8

    def svg(self) -> str:
        rect = (
            f'<rect x="{self.x}" y="{self.y}" width="{self.w}" height="{self.h}" rx="6" fill="none" stroke="{INK}"'
            ' stroke-dasharray="5 4"/>'
        )
        return rect + "\n" + text(self.x + self.indent, self.y + 16, self.label)


def text(x: float, y: float, words: str, anchor: str = "start") -> str:
    return f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="12">{escape(words)}</text>'


def arrow(*points: tuple[int, int], label: str = "") -> str:
    """Through `points`; the label stands above the first part."""
    path = " ".join(f"{x},{y}" for x, y in points)
    line = f'<polyline points="{path}" fill="none" stroke="{INK}" marker-end="url(#head)"/>'
    (x1, y1), (x2, y2) = points[:2]
    return line + (text((x1 + x2) / 2, (y1 + y2) / 2 - 5, label, "middle") if label else "")


def sheet(width: int, height: int, parts: Sequence[str | Box | Frame], legend: str) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-family="sans-serif" font-size="14" fill="{INK}">\n'
        f'<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>\n'
    )
    drawn = [part if isinstance(part, str) else part.svg() for part in [*parts, text(20, height - 12, legend)]]
    return head + "\n".join(drawn) + "\n</svg>\n"
