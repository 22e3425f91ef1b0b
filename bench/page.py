"""A page of results with tables and plots, as HTML.

    python -m bench.page                            bench/results, to build/report/index.html
    python -m bench.page curves.json --out folder

Each result file has a section with its command, the pictures and the tables that the command wrote beside it, or the
rows of the file. Files of ``sparsecomm bench --json``, `bench.model`, `bench.compare` and `bench.training` have plots.
"""

from __future__ import annotations

import io
import json
import shutil
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

import matplotlib

from bench import model, report
from sparsecomm.cli import bench
from sparsecomm.quantities import bytes_text, number_text, time_text
from sparsecomm.tools.outputs import panels, pyplot, style
from sparsecomm.tracing.observers import PARTS

MAX_ROWS = 60
STYLE = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sparsecomm"}
HEAD = """\
<!doctype html><meta charset="utf-8"><title>sparsecomm: results</title>
<style>body {max-width: 70em; margin: auto; font-family: sans-serif} pre {overflow-x: auto; font-size: smaller}
img {max-width: 100%}</style>
<h1>sparsecomm: results</h1>
<p>Measured and simulated figures, by result file.</p>
"""
Row = dict[str, Any]


@dataclass(frozen=True)
class Result:
    """The contents of a result file; of a file of lines, their list as ``rows``."""

    path: Path
    data: dict[str, Any]

    @property
    def rows(self) -> list[Row]:
        """The rows of the main table; empty if there is none."""
        return self.tables.get("rows", [])

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
        """All lists of rows in the file, by name."""
        lists = {name: rows for name, rows in self.data.items() if isinstance(rows, list) and rows and name != "runs"}
        return {name: rows for name, rows in lists.items() if all(isinstance(row, dict) for row in rows)}


def read(paths: Iterable[Path]) -> list[Result]:
    """Return the results of files, and of all .json and .jsonl files in folders, by name."""
    results = []
    for path in paths:
        for file in sorted([*path.glob("*.json"), *path.glob("*.jsonl")]) if path.is_dir() else [path]:
            try:
                text = file.read_text()
                data = list(map(json.loads, text.splitlines())) if file.suffix == ".jsonl" else json.loads(text)
            except ValueError as error:
                raise ValueError(f"{file}: it is not JSON ({error})") from error
            results.append(Result(file, data if isinstance(data, dict) else {"rows": data}))
    if not results:
        raise ValueError("there is no .json or .jsonl file to report on")
    return results


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


def write(results: Sequence[Result], folder: Path) -> None:
    """Write index.html and its pictures into a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with matplotlib.rc_context(STYLE):
        sections = "".join(section(result, folder) for result in results)
    folder.joinpath("index.html").write_text(HEAD + sections)


def section(result: Result, folder: Path) -> str:
    """Return the HTML of a section, and write its pictures into a folder."""
    about, path = result.about, result.path
    facts = [path.name, *(str(about[name]) for name in ("machine", "device", "date") if about.get(name))]
    html = f"<h2>{escape(path.stem)}</h2>\n<p>{escape('; '.join(facts))}</p>\n"
    if about.get("command"):
        html += f"<pre>{escape(str(about['command']))}</pre>\n"
    pictures = []
    for picture in sorted([*path.parent.glob(f"{path.stem}.png"), *path.parent.glob(f"{path.stem}-*.png")]):
        shutil.copy(picture, folder)
        pictures.append((picture.stem, picture.name))
    keys = {*result.data, *next(iter(result.rows), {})}
    for caption, draw in next((plots for key, plots in PLOTS.items() if key in keys), {}).items():
        if (figure := draw(result)) is not None:
            name = f"{path.stem}-{caption.replace(' ', '-').replace(',', '')}.svg"
            figure.savefig(folder / name, metadata={"Date": None})
            pyplot().close(figure)
            pictures.append((f"{caption}: {path.stem}", name))
    html += "".join(f'<img alt="{escape(alt)}" src="{escape(name)}">\n' for alt, name in pictures)
    text = path.with_suffix(".txt")
    content = text.read_text() if text.exists() else tables_text(result)
    return html + f"<details><summary>Tables</summary><pre>{escape(content)}</pre></details>\n"


def tables_text(result: Result) -> str:
    """Return the rows of a file as tables of text."""
    tables = []
    for name, rows in result.tables.items():
        columns = [
            (key, lambda row, key=key: _cell(row.get(key))) for key in dict.fromkeys(k for row in rows for k in row)
        ]
        title = name + (f", the first {MAX_ROWS} of {len(rows)}" if len(rows) > MAX_ROWS else "")
        tables.append(report.table(rows[:MAX_ROWS], columns, title=title, title_justify="left"))
    report.show([], tables, file := io.StringIO())
    return file.getvalue()


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return number_text(value, 4) if isinstance(value, float) else f"{value:,}" if type(value) is int else str(value)


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.page")
    parser.add_argument("results", type=Path, nargs="*", default=[Path("bench/results")], help="files or folders")
    parser.add_argument("--out", type=Path, default=Path("build/report"), metavar="FOLDER", help="(%(default)s)")
    options = parser.parse_args()
    try:
        results = read(options.results)
    except (OSError, ValueError) as error:
        print(f"bench.page: {error}", file=sys.stderr)
        return 2
    write(results, options.out)
    print(f"{options.out / 'index.html'}: {len(results)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
