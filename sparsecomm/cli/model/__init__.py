"""Run the algorithms on simulated ranks, in virtual time, to predict how long a call takes on clusters you do not have.

  sparsecomm model --ranks 2:4096 --rate 1gbit --plot scaling.png
  sparsecomm model --ranks 64 --ranks-per-node 8 --rate 25gbit --latency 20us --straggler 5ms

Every rank runs the shipped algorithm, all in this process. Messages and work take the time that the network and the
profile say. The ranks of a node share its link.

  exchange   the time of the messages alone
  step       also selecting, merging, packing and dense sums; not what goes back to residuals and the dense result,
             which have no costs in a profile
  formula    what "auto" predicts for the same

Times are those of the rank that finishes last. Bytes and messages are those of the rank that has most.

A large problem is simulated with fewer entries at the same density. Work, and the bytes of messages except headers and
tables, are then scaled up. Some bytes per packed message, and the samples by which `split` balances its ranges, are
not scaled exactly.

Algorithms whose messages or entries grow with the square of the ranks are simulated up to 512 ranks, others up to 8192.
Beyond, ~ marks the formula's figure. --all simulates everything.
"""

from __future__ import annotations

import argparse

from sparsecomm.cli.model import options, plot, report, simulate
from sparsecomm.cli.model.options import add_arguments
from sparsecomm.cli.outputs import check_writable
from sparsecomm.cli.terminal import progress
from sparsecomm.errors import InvalidInputError
from sparsecomm.hints import pip_install

__all__ = ["HELP", "add_arguments", "run"]

HELP = "time and bytes of the algorithms on simulated ranks and networks, up to thousands of ranks"


def run(arguments: argparse.Namespace) -> int:
    """Simulate what was asked for, print the table and write the files; return 0."""
    asked = options.parse(arguments)
    check_writable(asked.json, asked.plot)
    try:
        import greenlet  # noqa: F401
    except ImportError as error:
        raise InvalidInputError(f"simulated ranks need greenlet: {pip_install('simulated')}") from error
    print(report.table_head(asked), flush=True)
    rows = []
    with progress(len(asked.ranks) * len(asked.algorithms), ticking=True) as show_progress:
        for row in simulate.rows(asked, show_progress):
            rows.append(row)
            print(report.table_line(row), flush=True)
    if asked.json is not None:
        asked.json.write_text(report.as_json(asked, rows))
    if asked.plot is not None:
        plot.write(asked.plot, asked, rows)
    return 0
