"""Small pieces of HTML for notebooks: a table, and a text whose tokens are coloured. They read well on light and dark pages."""

import html
from collections.abc import Iterable, Sequence


def table(head: Sequence[str], rows: Iterable[Sequence[object]], caption: str) -> str:
    def row(cells: Iterable[object], tag: str) -> str:
        return "<tr>" + "".join(f"<{tag}>{html.escape(str(cell))}</{tag}>" for cell in cells) + "</tr>"

    body = "".join(row(cells, "td") for cells in rows)
    return f"<table><caption>{html.escape(caption)}</caption>{row(head, 'th')}{body}</table>"


def coloured(pieces: Sequence[str], values: Sequence[float], label: str) -> str:
    """The text with a background behind each token, the redder the larger its value; pointing at a token shows the value."""
    top = max(values, default=0.0)
    spans = []
    for piece, value in zip(pieces, values, strict=True):
        alpha = 0.6 * value / top if top > 0 else 0.0
        title = html.escape(f"{label} {value:.4g}", quote=True)
        shown = html.escape(piece).replace("\n", "\u21b5<br>")
        spans.append(f'<span title="{title}" style="background:rgba(220,60,40,{max(alpha, 0):.3f})">{shown}</span>')
    return f'<div style="white-space:pre-wrap">{"".join(spans)}</div>'
