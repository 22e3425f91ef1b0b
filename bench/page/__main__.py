"""One page of results, with tables and plots, in one file: for the screen and for print.

    python -m bench.page                            bench/results, to build/report/index.html
    python -m bench.page curves.json --out page.html

It takes what ``sparsecomm bench --json``, ``python -m bench.model --json``, the other commands of ``bench`` with
``--write``, ``examples/convergence.py`` and pytest-benchmark have written, and shows every other JSON file as tables.
"""

from __future__ import annotations

import sys
from pathlib import Path

import matplotlib

from bench import report
from bench.page import html, results
from bench.page.sections import SECTIONS

_LOOK = {"font.size": 10.5, "axes.spines.top": False, "axes.spines.right": False, "svg.hashsalt": "sparsecomm"}


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.page")
    parser.add_argument("results", type=Path, nargs="*", default=[Path("bench/results")], help="files or folders")
    parser.add_argument(
        "--out", type=Path, default=Path("build/report/index.html"), metavar="FILE", help="(%(default)s)"
    )
    options = parser.parse_args()
    try:
        found = results.read(options.results)
    except (OSError, ValueError) as error:
        print(f"bench.page: {error}", file=sys.stderr)
        return 2
    with matplotlib.rc_context(_LOOK):
        sections = [section for make in SECTIONS if (section := make(found)) is not None]
    lead = (
        "Measured and simulated figures of sparsecomm. Every table and picture names the file or the command that it "
        "comes from; the last section lists commands, machines and dates."
    )
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(html.page("sparsecomm: results", lead, sections))
    print(f"{options.out}: {len(sections)} sections from {len(found)} files")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
