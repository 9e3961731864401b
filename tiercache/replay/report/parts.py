"""Building blocks of sections: figures, legends, tables, and blocks that unfold."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from tiercache.replay.report.markup import Html, Part, element, join
from tiercache.replay.report.words import finite

_LONG: Final = 20
"""Letters of a table heading up to which it needs no tooltip; longer ones may be cut off."""


@dataclass(frozen=True, slots=True)
class Cell:
    """One cell of a table.

    `value`: the number that the column is sorted by; `style`: CSS class; `hint`: text of its tooltip; `link`: id of an element in this
    document.
    """

    shown: str
    value: float | None = None
    style: str | None = None
    hint: str | None = None
    link: str | None = None


def figure(title: str, note: str, drawing: Html) -> Html:
    """Return a plot under its title, which says what is drawn, and a note, which says how."""
    caption = element("figcaption", element("b", title), " ", element("span", note, class_="note") if note else None)
    return element("figure", caption, drawing)


def row(*figures: Part) -> Html:
    """Return figures side by side, as many in a line as fit."""
    return element("div", *figures, class_="row")


def legend(entries: Iterable[tuple[str, str]]) -> Html:
    """Return a legend of colours, given as CSS classes and names, in the order of the segments."""
    return element("ul", *(element("li", element("i", class_=f"key {style}"), name) for style, name in entries), class_="legend")


def unfold(summary: Part, *parts: Part, is_open: bool = False, style: str = "") -> Html:
    """Return a block that opens on a click on `summary`; it works without a script."""
    return element("details", element("summary", summary), *parts, class_=style or None, open="" if is_open else None)


def table(caption: str, head: Sequence[str], rows: Iterable[Sequence[str | Cell]], texts: int = 1, style: str = "") -> Html:
    """Return a table in a box that scrolls sideways by itself.

    The first column names its row; the first `texts` columns are aligned left.
    """
    heads = [
        element("th", name, scope="col", title=name if len(name) > _LONG else None, class_="text" if index < texts else None)
        for index, name in enumerate(head)
    ]
    body = [element("tr", *(_cell(cell, index, texts) for index, cell in enumerate(cells))) for cells in rows]
    made = element(
        "table",
        element("caption", element("span", caption)),
        element("thead", element("tr", *heads)),
        element("tbody", *body),
        class_=style or None,
    )
    return element("div", made, class_="scroll", tabindex="0", role="region", aria_label=caption)


def figures_as_table(*tables: Html) -> Html:
    """Return a folded block with the tables of the plots above it."""
    return unfold("The figures as a table", *tables, style="figures")


def paragraphs(sentences: Sequence[str]) -> Html:
    """Return one paragraph per entry."""
    return join(*(element("p", one) for one in sentences))


def _cell(cell: str | Cell, index: int, texts: int) -> Html:
    one = cell if isinstance(cell, Cell) else Cell(cell)
    value = finite(one.value)
    css = " ".join(part for part in ("text" if index < texts else "", one.style or "") if part)
    sorted_by = None if value is None else f"{value:.10g}"
    shown = element("a", one.shown, href=f"#{one.link}") if one.link else one.shown
    if index == 0:
        return element("th", shown, scope="row", class_=css or None, data_v=sorted_by, title=one.hint)
    return element("td", shown, class_=css or None, data_v=sorted_by, title=one.hint)
