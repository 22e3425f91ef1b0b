"""A page of results, with tables and plots, as a site of mkdocs.

    python -m bench.page                            bench/results, to build/report/index.html
    python -m bench.page curves.json --out folder

Each result file has a section with its command, its plots, and the tables that the command wrote beside it, or the
rows of the file. Plots are the pictures beside the file, and those of `bench.page.pictures` for files of
``sparsecomm bench --json``, ``python -m bench.model --json`` and the commands of ``bench`` with ``--write``.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

from bench import report
from bench.page import results
from bench.page.pictures import PICTURES
from bench.page.results import Result
from sparsecomm.cli.outputs import pyplot
from sparsecomm.quantities import number_text

MAX_ROWS = 60
STYLE = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sparsecomm"}
CONFIG = """\
site_name: "sparsecomm: results"
docs_dir: {pages}
site_dir: {site}
use_directory_urls: false
theme: {{name: material, font: false, features: [navigation.top, toc.follow]}}
plugins: []
markdown_extensions: [tables, attr_list, pymdownx.details, pymdownx.superfences]
"""


def write_pages(found: Sequence[Result], folder: Path) -> None:
    """Write index.md and its pictures into a folder."""
    lines = ["# sparsecomm: results", "", "Measured and simulated figures, by result file.", ""]
    for result in found:
        lines += section(result, folder)
    folder.joinpath("index.md").write_text("\n".join(lines))


def section(result: Result, folder: Path) -> list[str]:
    """Return the lines of a section, and write its pictures into a folder."""
    about, stem = result.about, result.path.stem
    lines = [f"## {escape(stem)}", ""]
    if about.get("command"):
        lines += ["```console", str(about["command"]), "```", ""]
    facts = [str(about[name]) for name in ("machine", "device", "date") if about.get(name)]
    lines += [f"`{result.path.name}`" + escape("".join(f"; {fact}" for fact in facts)), ""]
    for picture in result.pictures:
        shutil.copy(picture, folder)
        lines += [f"![{picture.stem}]({picture.name})", ""]
    for caption, draw in PICTURES.get(result.kind, {}).items():
        if (figure := draw(result)) is not None:
            name = f"{stem}-{caption.replace(' ', '-').replace(',', '')}.svg"
            figure.savefig(folder / name, metadata={"Date": None})
            pyplot().close(figure)
            lines += [f"![{caption}: {escape(stem)}]({name})", ""]
    if result.text is not None:
        return [*lines, '??? note "Tables"', "", "    ```text", *_indented(result.text), "    ```", ""]
    for name, rows in result.tables.items():
        lines += table(name, rows)
    return lines


def _indented(text: str) -> list[str]:
    return [f"    {line}" for line in text.splitlines()]


def table(name: str, rows: Sequence[dict[str, Any]]) -> list[str]:
    """Return a table in Markdown; values that all rows share are in its caption."""
    columns = list(dict.fromkeys(column for row in rows for column in row))
    common = [column for column in columns if len(rows) > 1 and len({str(row.get(column)) for row in rows}) == 1]
    shared = "; ".join(f"{column} {_cell(rows[0][column])}" for column in common if rows[0][column] is not None)
    columns = [column for column in columns if column not in common]
    caption = f"**{escape(name)}**" + (f", the first {MAX_ROWS} of {len(rows)}" if len(rows) > MAX_ROWS else "")
    lines = [caption + (f" ({shared})" if shared else ""), ""]
    lines += ["| " + " | ".join(map(escape, columns)) + " |", "|" + " --- |" * len(columns)]
    lines += ["| " + " | ".join(_cell(row.get(column)) for column in columns) + " |" for row in rows[:MAX_ROWS]]
    return [*lines, ""]


def _cell(value: Any) -> str:
    if value is None:
        return ""
    text = number_text(value, 4) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)
    return escape(text).replace("|", "&#124;").replace("\n", " ")


def build(pages: Path, site: Path) -> None:
    """Build the site of the pages by mkdocs."""
    from mkdocs.commands.build import build as build_site
    from mkdocs.config import load_config

    config = pages.parent / "mkdocs.yml"
    config.write_text(CONFIG.format(pages=pages, site=site.absolute()))
    build_site(load_config(str(config)))


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.page")
    parser.add_argument("results", type=Path, nargs="*", default=[Path("bench/results")], help="files or folders")
    parser.add_argument("--out", type=Path, default=Path("build/report"), metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args()
    try:
        found = results.read(options.results)
    except (OSError, ValueError) as error:
        print(f"bench.page: {error}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory(prefix="bench-page.") as temporary, matplotlib.rc_context(STYLE):
        pages = Path(temporary, "pages")
        pages.mkdir()
        write_pages(found, pages)
        build(pages, options.out)
    print(f"{options.out / 'index.html'}: {len(found)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
