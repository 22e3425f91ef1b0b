"""Run the algorithms on simulated ranks, in virtual time, to predict how long a call takes on clusters you do not have.

    python -m bench.model --ranks 2:4096 --rate 1gbit --plot scaling.png
    python -m bench.model --ranks 64 --ranks-per-node 8 --rate 25gbit --latency 20us

Every rank runs the shipped algorithm, all in this process. Messages and work take the time that the network and the
profile say. The ranks of a node share its link. Half of a rank's entries are selected by all ranks.

  exchange   the time of the messages alone
  step       also selecting, merging, packing and dense sums; not what goes back to residuals and the dense result,
             which have no costs in a profile
  formula    what "auto" predicts for the same

Times are those of the rank that finishes last. Bytes and messages are those of the rank that has most. Of `split`,
which keeps something from call to call, they are those of the second call.

A large problem is simulated with fewer entries at the same density. Work, and the bytes of messages except headers and
tables, are then scaled up. Some bytes per packed message, and the samples by which `split` balances its ranges, are
not scaled exactly.

Algorithms whose messages or entries grow with the square of the ranks are simulated up to 512 ranks, others up to 8192.
Beyond, ~ marks the formula's figure.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, fields, replace
from math import isclose
from operator import itemgetter
from pathlib import Path
from typing import Any

import sparsecomm as sc
from bench import simulate
from bench.labels import Label, label_points
from bench.simulate import Outcome, Problem
from sparsecomm.calls.arguments import count_of
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.primitives.costs import Costs
from sparsecomm.quantities import bytes_text, number_text, rate_text, time_text
from sparsecomm.tools import options
from sparsecomm.tools.outputs import Column, json_text, log_axis, panels, save, size_axis, style, table_head, table_line
from sparsecomm.tuning import choice

SCHEMA = 3  # of the JSON file: it rises when a field changes its meaning or is removed

_MAX_RANKS = 1 << 20
_NOT_SIMULATED = dict.fromkeys(field.name for field in fields(Outcome))

Row = dict[str, Any]  # of the table, with the names that it has in the JSON file


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_arguments(parser)
    arguments = parser.parse_args(argv)
    try:
        problem = problem_of(arguments)
        options.check_writable(arguments.json, arguments.plot)
    except InvalidInputError as error:
        sys.exit(str(error))
    if importlib.util.find_spec("greenlet") is None:
        sys.exit(f"simulated ranks need greenlet: {pip_install('simulated')}")
    print(table_head(_header(problem), _COLUMNS), flush=True)
    results = []
    for row in rows(problem, arguments):
        results.append(row)
        print(table_line(row, _COLUMNS), flush=True)
    if arguments.json is not None:
        arguments.json.write_text(json_text({"schema": SCHEMA, "header": _header(problem), "rows": results}))
    if arguments.plot is not None:
        save(draw(_header(problem), results), arguments.plot)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    network = parser.add_argument_group("the network")
    ranks = "how many: A:B doubles from A to B; or a list with commas (%(default)s)"
    network.add_argument("--ranks", type=_ranks, default="2:256", metavar="LIST", help=ranks)
    link = "of a node's link: 1gbit, 100mbit (that of the profile)"
    network.add_argument("--rate", type=options.rate, metavar="RATE", help=link)
    message = "per message: 100us (that of the profile)"
    network.add_argument("--latency", type=options.seconds, metavar="TIME", help=message)
    per_node = "ranks per node (%(default)s)"
    network.add_argument("--ranks-per-node", type=options.count, default=1, metavar="M", help=per_node)
    costs = "costs as `sparsecomm tune` writes them (1 Gb/s and 100 us, a core of 2024)"
    network.add_argument("--profile", type=Path, metavar="FILE", help=costs)
    problem = parser.add_argument_group("the problem")
    n = "elements: K, M and G are decimal, Ki, Mi and Gi binary (%(default)s)"
    problem.add_argument("--n", type=options.count, default="25.6M", metavar="N", help=n)
    problem.add_argument("--density", type=options.density, default="0.001", help="k/n (%(default)s)")
    names = f"some of {', '.join(options.ALGORITHM_NAMES)}; or all (%(default)s)"
    usual = "dense,allgather,tree,butterfly,split,auto"
    problem.add_argument("--algorithms", type=options.algorithms, default=usual, metavar="LIST", help=names)
    problem.add_argument("--wire", default="auto", choices=options.WIRE_NAMES, help="the wire format (%(default)s)")
    options.add_files(parser, "time, bytes, messages against ranks")


def _ranks(text: str) -> tuple[int, ...]:
    number = options.number(1, _MAX_RANKS, f"A:B, or a list such as 2,3,8, from 1 to {_MAX_RANKS}")
    first, colon, last = text.partition(":")
    if not colon:
        return tuple(sorted(map(int, options.listed(number)(text))))
    low, high = int(number(first)), int(number(last))
    if low > high:
        raise argparse.ArgumentTypeError(f"{text}: no number is in this range")
    return tuple(low << j for j in range((high // low).bit_length()))


def problem_of(asked: argparse.Namespace) -> Problem:
    """Return the problem that options ask for, at the costs of their profile or the assumed ones."""
    costs = options.costs(asked.profile)
    alpha = costs.link.alpha if asked.latency is None else asked.latency
    beta = costs.link.beta if asked.rate is None else 8 / asked.rate
    costs = replace(costs, link=replace(costs.link, alpha=alpha, beta=beta), node=costs.node or costs.link)
    return Problem(asked.n, count_of(asked.density, asked.n), costs, asked.ranks_per_node)


def rows(problem: Problem, asked: argparse.Namespace) -> Iterator[Row]:
    """Yield all rows that were asked for, by number of ranks."""
    costs = problem.costs
    for P in asked.ranks:
        done: dict[tuple[str, str], dict[str, float]] = {}
        num_nodes = problem.node_of_rank(P)[-1] + 1
        for name in asked.algorithms:
            query = choice.CostQuery(P, num_nodes, problem.n, problem.k, 4, name, asked.wire)
            chosen = choice.decide(query, costs)
            algorithm, wire = chosen.algorithm, chosen.wire
            key = algorithm.name, wire.name
            if key not in done and simulate.in_seconds(algorithm.name, P):
                done[key] = asdict(simulate.simulate(problem, P, algorithm, wire))
            messages = algorithm.predicted_time(query.problem(wire), Costs(costs.link, costs.node))
            yield {
                "ranks": P,
                "machines": num_nodes,
                "algorithm": name,
                "runs": algorithm.name,
                "wire": wire.name,
                "simulated": key in done,
                "formula_exchange_seconds": messages,
                "formula_step_seconds": chosen.seconds,
                **done.get(key, _NOT_SIMULATED),
            }


def _ms(row: Row, name: str) -> str:
    seconds, formula = row[f"{name}_seconds"], row[f"formula_{name}_seconds"]
    return f"~{1e3 * formula:.3f}" if seconds is None else f"{1e3 * seconds:.3f}"


def _amount(name: str) -> Callable[[Row], str]:
    return lambda row: "-" if row[f"{name}_per_rank"] is None else str(row[f"{name}_per_rank"])


_COLUMNS = [
    Column("ranks", "", 7, itemgetter("ranks")),
    Column("algorithm", "", 22, lambda row: ": ".join(dict.fromkeys((row["algorithm"], row["runs"])))),
    Column("wire", "", 16, itemgetter("wire")),
    Column("exchange", "ms", 12, lambda row: _ms(row, "exchange")),
    Column("formula", "ms", 12, lambda row: f"{1e3 * row['formula_exchange_seconds']:.3f}"),
    Column("step", "ms", 12, lambda row: _ms(row, "step")),
    Column("formula", "ms", 12, lambda row: f"{1e3 * row['formula_step_seconds']:.3f}"),
    Column("sent", "B/rank", 13, _amount("sent_bytes")),
    Column("received", "B/rank", 13, _amount("received_bytes")),
    Column("messages", "/rank", 10, _amount("messages")),
]


def _header(problem: Problem) -> dict[str, Any]:
    return {
        "sparsecomm": sc.__version__,
        "ranks_per_node": problem.per_node,
        "costs": asdict(problem.costs),
        "dtype": "float32",
        "n": problem.n,
        "k": problem.k,
        "shared": problem.common,
    }


def draw(header: dict[str, Any], rows: Sequence[Row]) -> Any:
    """Return a figure of time, bytes and messages against ranks; rows that were not simulated are dotted."""
    from matplotlib.lines import Line2D

    figure, (times, amounts, counts) = panels(3, 4.6, 4.3)
    handles = []
    for name in dict.fromkeys(row["algorithm"] for row in rows):
        own, look = [row for row in rows if row["algorithm"] == name], style(name)
        look["label"] = name
        done, beyond = ([row for row in own if row["simulated"] == simulated] for simulated in (True, False))
        P = [row["ranks"] for row in done]
        times.plot(P, [row["step_seconds"] for row in done], **look)
        amounts.plot(P, [max(row["sent_bytes_per_rank"], row["received_bytes_per_rank"]) for row in done], **look)
        counts.plot(P, [row["messages_per_rank"] for row in done], **look)
        if beyond:
            line = [(row["ranks"], row["step_seconds"] or row["formula_step_seconds"]) for row in done[-1:] + beyond]
            times.plot(*zip(*line, strict=True), **{**look, "linestyle": ":", "marker": "", "label": ""})
        handles.append(Line2D([], [], **look))
    if not all(row["simulated"] for row in rows):
        handles.append(Line2D([], [], color="black", linestyle=":", label="formula, not simulated"))

    for axes, text, label in (
        (times, time_text, "time of a step, slowest rank"),
        (amounts, bytes_text, "bytes sent or received by the busiest rank"),
        (counts, number_text, "messages sent or received by the busiest rank"),
    ):
        size_axis(axes, sorted({float(row["ranks"]) for row in rows}), number_text)
        log_axis(axes.yaxis, text)
        per_node = header["ranks_per_node"]
        axes.set_xlabel("ranks" + (f", {per_node} per node" if per_node > 1 else ""))
        axes.set_ylabel(label)
    figure.legend(handles=handles, frameon=False, loc="outside right upper")
    link = header["costs"]["link"]
    network = (
        f"{rate_text(8 / link['beta']) if link['beta'] else 'any rate'} and {time_text(link['alpha'])} between nodes"
    )
    figure.suptitle(f"{header['n']:,} elements, {header['k']:,} entries per rank; simulated links: {network}")
    for axes in (times, amounts, counts):
        _show_hidden(axes)
    return figure


def _show_hidden(axes: Any) -> None:
    """Where lines coincide, dash them so that all colours show, and write their names."""
    groups: list[list[Any]] = []
    for line in sorted(
        (line for line in axes.lines if line.get_linestyle() == "-"), key=lambda line: -len(line.get_xdata())
    ):
        points = line.get_xydata().tolist()
        under = [dict(group[0].get_xydata().tolist()) for group in groups]
        on = [i for i, values in enumerate(under) if all(isclose(values.get(x, 0), y, rel_tol=0.02) for x, y in points)]
        if on:
            groups[on[0]].append(line)
        else:
            groups.append([line])
    labels = []
    for group in filter(lambda group: len(group) > 1, groups):
        for number, line in enumerate(group):
            line.set_linestyle((4 * number, (4, 4 * (len(group) - 1))))
        x, y = group[0].get_xydata()[-3]
        labels.append(Label(x, y, ", ".join(line.get_label() for line in group)))
    label_points(axes, labels, 9)


if __name__ == "__main__":
    main()
