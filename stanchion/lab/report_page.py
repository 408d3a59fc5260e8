"""A report is a list of sections; HTML and Markdown are two ways to write the same list. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

STYLE = """\
body{font:15px/1.5 system-ui,sans-serif;max-width:60rem;margin:2rem auto;padding:0 1rem;color:#222}
table{border-collapse:collapse;margin:1rem 0}td,th{border:1px solid #ccc;padding:.25rem .6rem}
th{background:#f4f4f4;text-align:left}td{font-variant-numeric:tabular-nums}svg{width:100%;
max-width:44rem;font:11px system-ui,sans-serif}.bad{color:#b00020;font-weight:600}"""


@dataclass(frozen=True)
class Table:
    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class Section:
    """`plots` are (what it shows, SVG): the words stand in both forms, the picture in HTML. `bad`:
    the words are a warning."""

    title: str
    words: tuple[str, ...] = ()
    tables: tuple[Table, ...] = ()
    plots: tuple[tuple[str, str], ...] = ()
    bad: bool = False


def html(title: str, sections: Sequence[Section]) -> str:
    """One file, with everything in it."""
    body = "".join(map(_html, sections))
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><style>{STYLE}</style></head><body>'
        f"<h1>{escape(title)}</h1>{body}</body></html>\n"
    )


def _html(section: Section) -> str:
    marked = ' class="bad"' if section.bad else ""
    parts = [f"<h2>{escape(section.title)}</h2>"]
    parts += [f"<p{marked}>{escape(one)}</p>" for one in section.words]
    for shown, svg in section.plots:
        parts.append(f"<figure>{svg}<figcaption>{escape(shown)}</figcaption></figure>")
    for table in section.tables:
        head = "".join(f"<th>{escape(one)}</th>" for one in table.head)
        rows = "".join(
            "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>"
            for row in table.rows
        )
        parts.append(f"<table><tr>{head}</tr>{rows}</table>")
    return "".join(parts)


def markdown(title: str, sections: Sequence[Section]) -> str:
    parts = [f"# {title}"]
    for section in sections:
        parts.append(f"## {section.title}")
        parts += [f"**{one}**" if section.bad else one for one in section.words]
        parts += [f"*{shown}* (drawn in the HTML)" for shown, _ in section.plots]
        parts += [_markdown(table) for table in section.tables]
    return "\n\n".join(parts) + "\n"


def _markdown(table: Table) -> str:
    rows = [table.head, ("---",) * len(table.head), *table.rows]
    return "\n".join("| " + " | ".join(_cell(one) for one in row) + " |" for row in rows)


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
