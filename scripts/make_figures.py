"""Draws docs/figures/*.svg: `python scripts/make_figures.py`. Plain boxes and arrows, no dependency."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from xml.sax.saxutils import escape

FIGURES = Path(__file__).resolve().parent.parent / "docs" / "figures"
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
            y = self.y + 40 + 16 * i
            parts.append(f'<text x="{middle}" y="{y}" text-anchor="middle" font-size="12">{escape(line)}</text>')
        return "\n".join(parts)


def arrow(x1: int, y1: int, x2: int, y2: int, label: str = "") -> str:
    line = f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}" stroke="{INK}" marker-end="url(#head)"/>'
    text = (
        f'<text x="{(x1 + x2) / 2}" y="{(y1 + y2) / 2 - 5}" text-anchor="middle" font-size="12">{escape(label)}</text>'
    )
    return line + (text if label else "")


def sheet(width: int, height: int, parts: list[str]) -> str:
    head = (
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}"'
        f' font-family="sans-serif" font-size="14" fill="{INK}">\n'
        f'<defs><marker id="head" markerWidth="9" markerHeight="9" refX="8" refY="4" orient="auto">'
        f'<path d="M0,0 L8,4 L0,8 z" fill="{INK}"/></marker></defs>\n'
        f'<rect width="{width}" height="{height}" fill="{PAPER}"/>\n'
    )
    return head + "\n".join(parts) + "\n</svg>\n"


def request_path() -> str:
    boxes = [
        Box(20, 20, 150, 62, "LLM", ("text, detokenising",)),
        Box(230, 20, 170, 62, "EngineCore", ("launch, collect",)),
        Box(460, 20, 190, 62, "Scheduler", ("budget, rows, preemption",)),
        Box(710, 20, 170, 62, "CacheManager", ("blocks, prefix hashes",)),
        Box(230, 150, 170, 62, "Executor", ("in this process",)),
        Box(460, 150, 190, 62, "ModelRunner", ("entry in the ring",), DEVICE),
        Box(710, 150, 170, 62, "DeviceRows", ("tokens, lengths, blocks",), DEVICE),
        Box(350, 280, 190, 62, "forward", ("model: hidden [S, hidden]",), DEVICE),
        Box(600, 280, 210, 62, "sample", ("head, sampling, advance",), DEVICE),
    ]
    arrows = [
        arrow(170, 51, 228, 51, "Request"),
        arrow(400, 51, 458, 51),
        arrow(650, 51, 708, 51),
        arrow(315, 82, 315, 148, ""),
        arrow(400, 181, 458, 181),
        arrow(650, 181, 708, 181),
        arrow(520, 212, 460, 278),
        arrow(540, 311, 598, 311),
        arrow(705, 280, 780, 214),
    ]
    labels = [
        '<text x="325" y="120" font-size="12">StepPlan down, StepResult up</text>',
        '<text x="20" y="380" font-size="12">blue: host, no torch; green: device, waited for only in collect</text>',
    ]
    return sheet(900, 400, [*arrows, *(box.svg() for box in boxes), *labels])


def main() -> None:
    FIGURES.mkdir(parents=True, exist_ok=True)
    (FIGURES / "request-path.svg").write_text(request_path(), encoding="utf-8")


if __name__ == "__main__":
    main()
