"""The HTML page: verdict, overview, folded sections. A new study adds a `Section` to the list; the template does the rest."""

from collections.abc import Sequence
from typing import NamedTuple

from vmoer.report.figures import Figure
from vmoer.report.tables import Table


class Section(NamedTuple):
    """A part of the page; `id` is its anchor."""

    id: str
    title: str
    text: Sequence[str] = ()
    tables: Sequence[Table] = ()
    figures: Sequence[Figure] = ()


def render(
    title: str,
    verdict: str | None,
    overview: Sequence[Figure],
    sections: Sequence[Section],
    legend: Sequence[tuple[str, str]],
    sources: Sequence[str],
) -> str:
    """The page as one HTML text without a reference to anything outside it."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("vmoer.report", "."),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    template = environment.get_template("page.html.j2")
    return template.render(
        title=title, verdict=verdict, overview=overview, sections=sections, legend=legend, sources=sources
    )
