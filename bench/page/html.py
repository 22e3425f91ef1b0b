"""The page as HTML: sections of text, tables and pictures, in one file that needs no other."""

from __future__ import annotations

import base64
import io
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape
from typing import Any

from sparsecomm.cli.plots import pyplot
from sparsecomm.quantities import number_text

__all__ = ["Section", "number", "page"]

Cell = Callable[[Any], object]

_TABLE = '<div class="scroll">'  # how a table begins

_STYLE = """
:root { color-scheme: light; }
body { font: 16px/1.5 system-ui, sans-serif; color: #1a1a1a; background: #fff; max-width: 76rem; margin: 2rem auto;
  padding: 0 1.2rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 3rem; border-bottom: 2px solid #1a1a1a; padding-bottom: .2rem; }
h3 { margin-top: 2rem; }
nav ul { columns: 2; }
a { color: #0b4f8a; }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; }
figcaption, .from { color: #444; font-size: .85em; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .85rem; font-variant-numeric: tabular-nums; margin: .6rem 0; }
caption { text-align: left; font-weight: 600; padding: .3rem 0; }
th, td { padding: .22rem .7rem; text-align: right; border-bottom: 1px solid #ccc; vertical-align: top; }
th { border-bottom: 2px solid #1a1a1a; vertical-align: bottom; } th.text, td.text { text-align: left; min-width: 5rem; }
code { font-size: .85em; overflow-wrap: anywhere; white-space: pre-wrap; }
@media print {
  body { font-size: 10pt; max-width: none; margin: 0; padding: 0; } nav { break-after: page; }
  a { color: inherit; text-decoration: none; } h2, h3, h2 + p, caption { break-after: avoid; }
  table.wide { font-size: 5pt; } .wide th, .wide td { padding: .1rem; overflow-wrap: anywhere; }
  figure, tr { break-inside: avoid; } .scroll { overflow: visible; } table { font-size: 7.5pt; }
  th, td { padding: .1rem .35rem; } th.text, td.text { min-width: 0; } @page { size: A4; margin: 14mm; }
}
"""


@dataclass
class Section:
    """A part of the page: a heading, and blocks of HTML in the order in which they are added."""

    title: str
    blocks: list[str] = field(default_factory=list)

    @property
    def anchor(self) -> str:
        """The name of the heading, for links."""
        return "".join(c if c.isalnum() else "-" for c in self.title.lower())

    @property
    def html(self) -> str:
        """The blocks; below each heading, pictures come before tables."""
        parts: list[list[str]] = [[]]
        for block in self.blocks:
            if block.startswith("<h3>"):
                parts.append([])
            parts[-1].append(block)
        return "\n".join(block for part in parts for block in sorted(part, key=lambda each: each.startswith(_TABLE)))

    def text(self, text: str) -> None:
        """Add a paragraph."""
        self.blocks.append(f"<p>{escape(text)}</p>")

    def heading(self, text: str) -> None:
        """Add a heading below the section's."""
        self.blocks.append(f"<h3>{escape(text)}</h3>")

    def figure(self, figure: Any, caption: str, source: str = "") -> None:
        """Add a picture of matplotlib, and close it. The caption stands for it where it cannot be seen."""
        file = io.BytesIO()
        figure.savefig(file, format="svg", metadata={"Date": None})
        pyplot().close(figure)
        self.image(file.getvalue(), "svg+xml", caption, source)

    def image(self, data: bytes, kind: str, caption: str, source: str = "") -> None:
        """Add a picture of a kind such as png."""
        inline = f"data:image/{kind};base64,{base64.b64encode(data).decode()}"
        under = escape(caption) + (f" <code>{escape(source)}</code>" if source else "")
        self.blocks.append(
            f'<figure><img src="{inline}" alt="{escape(caption, quote=True)}"><figcaption>{under}</figcaption></figure>'
        )

    def table(self, rows: Sequence[Any], columns: Sequence[tuple[str, Cell]], caption: str, source: str = "") -> None:
        """Add a table with a line for each row; a column is its heading and what a row has there, None for nothing.

        Columns of numbers are set to the right, and empty ones left out.
        """
        cells = [["" if (found := cell(row)) is None else str(found) for _, cell in columns] for row in rows]
        filled = [i for i in range(len(columns)) if any(row[i] for row in cells)]
        columns, cells = [columns[i] for i in filled], [[row[i] for i in filled] for row in cells]
        words = [any(row[i] and not _numeric(row[i]) for row in cells) for i in range(len(columns))]

        def line(texts: Sequence[str], tag: str) -> str:
            marked = (
                f"<{tag}{' class=text' * word}>{escape(text)}</{tag}>" for text, word in zip(texts, words, strict=True)
            )
            return f"<tr>{''.join(marked)}</tr>"

        head, body = line([name for name, _ in columns], "th"), "\n".join(line(row, "td") for row in cells)
        attribute = " class=wide" if len(columns) > 12 else ""
        said = f'<p class="from">From <code>{escape(source)}</code></p>' if source else ""
        self.blocks.append(
            f"{_TABLE}<table{attribute}><caption>{escape(caption)}</caption><thead>{head}</thead>"
            f"<tbody>{body}</tbody></table></div>{said}"
        )


def number(key: str, form: str = "", unit: float = 1) -> Cell:
    """Return what formats a row's value of that name, in three digits if there is no ``form``; nothing for None."""

    def text(row: Any) -> str | None:
        value = row.get(key)
        return None if value is None else format(value * unit, form) if form else number_text(value * unit)

    return text


def _numeric(text: str) -> bool:
    return re.fullmatch(r"[-+~\d.,e%/ ]*\d[-+~\d.,e%/ ]*|nan", text) is not None


def page(title: str, lead: str, sections: Sequence[Section]) -> str:
    """Return the whole page."""
    contents = "".join(f'<li><a href="#{s.anchor}">{escape(s.title)}</a></li>' for s in sections)
    parts = "\n".join(f'<section><h2 id="{s.anchor}">{escape(s.title)}</h2>\n{s.html}</section>' for s in sections)
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width">'
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>\n<h1>{escape(title)}</h1>\n<p>{escape(lead)}</p>\n"
        f"<nav><ul>{contents}</ul></nav>\n{parts}\n</body></html>\n"
    )
