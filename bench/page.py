"""A page of results, with tables and plots, as a site of mkdocs.

    python -m bench.page                            bench/results, to build/report/index.html
    python -m bench.page curves.json --out folder

Each result file has a section with its command, the pictures and the tables that the command wrote beside it, or the
rows of the file. Files of ``sparsecomm bench --json``, `bench.model`, `bench.compare` and `bench.training` have plots.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

from bench import model, report
from sparsecomm.cli import bench
from sparsecomm.cli.outputs import panels, pyplot, style
from sparsecomm.quantities import bytes_text, number_text, time_text
from sparsecomm.tracing.observers import PARTS

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
Row = dict[str, Any]


# -- result files -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Result:
    """The contents of a result file; of a file of lines, their list as ``rows``."""

    path: Path
    data: dict[str, Any]

    @property
    def rows(self) -> list[Row]:
        """The rows of the main table; empty if there is none."""
        rows = self.data.get("rows", [])
        return [row for row in rows if isinstance(row, dict)] if isinstance(rows, list) else []

    @property
    def about(self) -> dict[str, Any]:
        """Command, machine and date of the run."""
        runs = self.data.get("runs")
        if isinstance(runs, list) and runs:
            return {**runs[0], "command": "\n".join(run["command"] for run in runs[:3])}
        run = self.data.get("run") or self.data.get("header") or self.data
        return run if isinstance(run, dict) else {}

    @property
    def tables(self) -> dict[str, list[Row]]:
        """All lists of rows in the file, by name; rows within rows are flattened."""
        lists = {name: rows for name, rows in self.data.items() if isinstance(rows, list) and rows and name != "runs"}
        found = {name: rows for name, rows in lists.items() if all(isinstance(row, dict) for row in rows)}
        return {name: [_flat(row) for row in rows] for name, rows in found.items()}


def _flat(row: Row) -> Row:
    flat: Row = {}
    for key, value in row.items():
        if isinstance(value, dict):
            flat |= {f"{key} {name}" if name in row else name: inner for name, inner in _flat(value).items()}
        elif not isinstance(value, list):
            flat[key] = value
    return flat


def read(paths: Iterable[Path]) -> list[Result]:
    """Return the results of files, and of all .json and .jsonl files in folders, by name."""
    found = []
    for path in paths:
        for file in sorted([*path.glob("*.json"), *path.glob("*.jsonl")]) if path.is_dir() else [path]:
            try:
                text = file.read_text()
                data = list(map(json.loads, text.splitlines())) if file.suffix == ".jsonl" else json.loads(text)
            except ValueError as error:
                raise ValueError(f"{file}: it is not JSON ({error})") from error
            found.append(Result(file, data if isinstance(data, dict) else {"rows": data}))
    if not found:
        raise ValueError("there is no .json or .jsonl file to report on")
    return found


# -- plots ------------------------------------------------------------------------------------------------------------

_PART_COLOURS = "#0072b2", "#e69f00", "#009e73", "#f0e442", "#cc79a7", "#d55e00", "#bbbbbb"
_PART_HATCHES = "", "//", "", "\\\\", "..", "xx", ""


def _bars(values: Mapping[str, float], text: Callable[[float], str], colours: Mapping[str, str], label: str) -> Any:
    """Return horizontal bars from zero with their values, in order of size; those without a colour are hatched."""
    from matplotlib.ticker import FuncFormatter

    figure, (axes,) = panels(1, 5.5, 0.4 * len(values) + 1)
    names = sorted(values, key=lambda name: -values[name])
    for i, name in enumerate(names):
        other = {"color": "#d9d9d9", "hatch": "///", "edgecolor": "#555"}
        axes.barh(i, values[name], height=0.68, **({"color": colours[name]} if name in colours else other))
        axes.annotate(f" {text(values[name])}", (values[name], i), va="center", fontsize="small")
    axes.set_yticks(range(len(names)), names)
    axes.set_xlim(0, 1.2 * max(values.values()))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: text(value) if value else "0"))
    axes.set_xlabel(label)
    axes.grid(True, axis="x", alpha=0.35)
    axes.set_axisbelow(True)
    return figure


def compared(key: str, text: Callable[[float], str], label: str, unit: float = 1) -> Callable[[Result], Any]:
    """Return a function that draws a column of the table of `bench.compare`."""

    def draw(result: Result) -> Any:
        rows = result.data["times"]
        colours = {row["name"]: style(row["name"])["color"] for row in rows if row["ours"]}
        return _bars({row["name"]: row[key] * unit for row in rows if row[key]}, text, colours, label)

    return draw


def steps(result: Result) -> Any:
    """Draw the times of `bench.training ddp`."""
    medians = {name: median / 1e3 for name, (_, median, _) in result.data["ddp"]["ms"].items()}
    colours = {name: style("split")["color"] for name in medians if name.startswith("sparse hook")}
    return _bars(medians, time_text, colours, "time of a training step on the slowest rank, median")


def breakdown(result: Result) -> Any:
    largest = max(row["size_bytes"] for row in result.rows)
    rows = [row for row in result.rows if row["size_bytes"] == largest and row["breakdown_us"]]
    if not rows:
        return None
    names = [f"{row['algorithm']}, {number_text(row['density'])}, {row['wire_taken']}" for row in rows]
    figure, (axes,) = panels(1, 7, 0.34 * len(rows) + 0.8)
    left = [0.0] * len(rows)
    for part, colour, hatch in zip((*PARTS, "other"), _PART_COLOURS, _PART_HATCHES, strict=True):
        widths = [row["breakdown_us"][part] / 1e3 for row in rows]
        axes.barh(names, widths, left=left, label=part, color=colour, hatch=hatch, edgecolor="white", linewidth=0.4)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("ms")
    figure.legend(frameon=False, loc="outside right upper")
    return figure


# By a key of the file or of its first row: captions, and functions that return a figure, or None.
PLOTS: dict[str, dict[str, Callable[[Result], Any]]] = {
    "times": {
        "Time of a whole step": compared("step_ms", time_text, "time of a whole step, median", 1e-3),
        "Bytes that the busiest rank sends": compared("sent", bytes_text, "bytes sent by the busiest rank"),
    },
    "ddp": {"Time of a training step": steps},
    "time_median_us": {
        "Time against size": lambda result: bench.draw(result.data["header"], result.rows),
        "Parts of a call": breakdown,
    },
    "formula_step_seconds": {
        "Time, bytes and messages against ranks": lambda result: model.draw(result.data["header"], result.rows)
    },
}


# -- the page ---------------------------------------------------------------------------------------------------------


def write_pages(found: Sequence[Result], folder: Path) -> None:
    """Write index.md and its pictures into a folder."""
    lines = ["# sparsecomm: results", "", "Measured and simulated figures, by result file.", ""]
    for result in found:
        lines += section(result, folder)
    folder.joinpath("index.md").write_text("\n".join(lines))


def section(result: Result, folder: Path) -> list[str]:
    """Return the lines of a section, and write its pictures into a folder."""
    about, path = result.about, result.path
    lines = [f"## {escape(path.stem)}", ""]
    if about.get("command"):
        lines += ["```console", str(about["command"]), "```", ""]
    facts = [str(about[name]) for name in ("machine", "device", "date") if about.get(name)]
    lines += [f"`{path.name}`" + escape("".join(f"; {fact}" for fact in facts)), ""]
    for picture in sorted([*path.parent.glob(f"{path.stem}.png"), *path.parent.glob(f"{path.stem}-*.png")]):
        shutil.copy(picture, folder)
        lines += [f"![{picture.stem}]({picture.name})", ""]
    keys = {*result.data, *next(iter(result.rows), {})}
    for caption, draw in next((plots for key, plots in PLOTS.items() if key in keys), {}).items():
        if (figure := draw(result)) is not None:
            name = f"{path.stem}-{caption.replace(' ', '-').replace(',', '')}.svg"
            figure.savefig(folder / name, metadata={"Date": None})
            pyplot().close(figure)
            lines += [f"![{caption}: {escape(path.stem)}]({name})", ""]
    if (text := path.with_suffix(".txt")).exists():
        indented = (f"    {line}" for line in text.read_text().splitlines())
        return [*lines, '??? note "Tables"', "", "    ```text", *indented, "    ```", ""]
    for name, rows in result.tables.items():
        lines += table(name, rows)
    return lines


def table(name: str, rows: Sequence[Row]) -> list[str]:
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
        found = read(options.results)
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
