"""Boxes, arrows and bars as SVG, in colours that follow the reader's; the same input gives the same bytes."""

from __future__ import annotations

from html import escape
from typing import Final

WIDTH: Final = 360
"""Units of every drawing's width: on a phone a unit is a pixel."""
STYLE: Final = """\
text{font:12px system-ui,sans-serif;fill:#1b2a30}
.title{font-weight:600;font-size:13px}.small{font-size:11px;fill:#4c5f66}
.page{fill:#fbfcfc}.box{fill:#fff;stroke:#9fb3ba}.room{fill:#eef3f4;stroke:#c9d6da}
.hot{fill:#ffe3d3;stroke:#e07b45}.warm{fill:#fff3cf;stroke:#d3a72c}.cool{fill:#d9f0ea;stroke:#3c9c86}
.cold{fill:#dce8f7;stroke:#5b86bd}.line{stroke:#52707a;stroke-width:1.6;fill:none}.head{fill:#52707a}
@media (prefers-color-scheme:dark){
text{fill:#e6eef0}.small{fill:#a9bcc3}.page{fill:#1e2529}.box{fill:#2a3439;stroke:#56707a}
.room{fill:#242d31;stroke:#3d4f56}.hot{fill:#54301d;stroke:#e08d5e}.warm{fill:#4b3f17;stroke:#d9b44a}
.cool{fill:#173f37;stroke:#4bb39b}.cold{fill:#203650;stroke:#7aa3d6}.line{stroke:#9db7c0}.head{fill:#9db7c0}}"""


class Drawing:
    """A drawing of a given height, described by `said` for those who cannot see it."""

    def __init__(self, height: int, said: str) -> None:
        self._height = height
        self._said = said
        self._parts: list[str] = []

    def text(self, x: float, y: float, words: str, kind: str = "", anchor: str = "start") -> None:
        """Write a line that begins at, ends at or is around `x`."""
        self._parts.append(
            f'<text x="{x:g}" y="{y:g}" class="{kind}" text-anchor="{anchor}">{escape(words)}</text>'
        )

    def rect(self, x: float, y: float, width: float, height: float, kind: str) -> None:
        """Draw an empty box."""
        self._parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" class="{kind}"/>'
        )

    def box(self, x: float, y: float, width: float, kind: str, title: str, *lines: str) -> float:
        """Draw a box around a title and lines; return the y of its lower edge."""
        height = 26 + 15 * len(lines)
        self.rect(x, y, width, height, kind)
        self.text(x + 10, y + 18, title, "title")
        for n, line in enumerate(lines):
            self.text(x + 10, y + 34 + 15 * n, line, "small")
        return y + height

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        """Draw an arrow that goes straight up, down, left or right."""
        dx, dy = (to_x > x) - (to_x < x), (to_y > y) - (to_y < y)
        self._parts.append(f'<path d="M{x:g} {y:g}L{to_x - 6 * dx:g} {to_y - 6 * dy:g}" class="line"/>')
        tip = f"M{to_x:g} {to_y:g}l{-7 * dx - 4 * dy:g} {-7 * dy - 4 * dx:g}l{8 * dy:g} {8 * dx:g}z"
        self._parts.append(f'<path d="{tip}" class="head"/>')

    def svg(self) -> str:
        """Return the file."""
        body = "\n".join(self._parts)
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {self._height}" role="img">\n'
            f"<title>{escape(self._said)}</title>\n<style>{STYLE}</style>\n"
            f'<rect width="{WIDTH}" height="{self._height}" rx="8" class="page"/>\n{body}\n</svg>\n'
        )
