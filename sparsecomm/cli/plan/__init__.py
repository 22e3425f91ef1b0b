"""Plan a training over a network: compare ways to exchange gradients or weights, and recommend one.

  sparsecomm plan --ranks 4 --rate 50mbit --rtt 80ms --loss 0.1% --parameters 30.8M --step-time 30ms --plot plan.png
  mpirun -n 4 python -m sparsecomm plan --measure --parameters 30.8M --step-time 30ms

Each line of the table is a way to train:

  H            local steps of a round; 1: an exchange in every step
  delay        local steps between the start of an exchange and its application (fragment_sync_delay)
  exchange     seconds of an exchange, including its work
  sent         megabytes that the link of a node sends in a round
  step         seconds per step, including the part of exchanges that delays it
  computing    the percentage of the time in which ranks compute: the utilisation
  loss         nats above dense for small models on 8 ranks (docs/reports); yours may differ. 0: not above dense
  equal loss   the time to the same loss, as a multiple of the smallest in the table
  nodes        yes: the ranks of a node sum densely and count as one. no: nodes=False. Only with --ranks-per-node

The dense rows use gloo: DistributedDataParallel in every step, and one all_reduce per round of local steps.
docs/guides/plan.md says what the times take into account.

With --measure, the ranks that run the command measure the links between them. First they check that they belong to one
job, that their versions agree, and which network interfaces they use.
"""

from __future__ import annotations

import argparse
import os
import socket
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import sparsecomm as sc
from sparsecomm.cli.launch import agreed
from sparsecomm.cli.plan import methods
from sparsecomm.cli.plan import network as measurement
from sparsecomm.errors import InvalidInputError
from sparsecomm.primitives.costs import Costs
from sparsecomm.quantities import number_text, percent_text, rate_text, time_text
from sparsecomm.tools import options
from sparsecomm.tools.outputs import Column, json_text, log_axis, pyplot, save, style, table_head, table_line
from sparsecomm.tools.world import World, transport_of, world
from sparsecomm.transport import Transport
from sparsecomm.tuning.equal_loss import PARTICIPANTS
from sparsecomm.tuning.utilisation import GLOO, Network, Training, nodes_count_as_one

HELP = "compare ways to train over a network, such as SparseAdamW and local steps, and recommend one"
_CORES = options.number(
    0.01, 1, "at most 1, because costs are those of one core. For several, run `sparsecomm tune` and pass --profile"
)
_LAN, _LAN_TRIP, _WAN_TRIP = 100e6, 0.2e-3, 30e-3  # bits per second, and seconds, that are assumed without --rtt
_GPU = "kernels of one NVIDIA H200. The optimizer's work, copies to the host and several GPUs were not measured"
SCHEMA = 3  # of the JSON file: increase it when a field changes its meaning or is removed


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options."""
    network = parser.add_argument_group("the network")
    measured = "measure what you do not pass; start the command with mpirun, srun or torchrun"
    network.add_argument("--measure", action="store_true", help=measured)
    seconds = "duration of each measurement, roughly (%(default)s)"
    network.add_argument("--seconds", type=options.duration, default="2s", metavar="TIME", help=seconds)
    network.add_argument("--ranks", type=options.count, metavar="P", help="number of ranks that train")
    per_node = "ranks on each node, such as the GPUs of a machine, which share its link (1)"
    network.add_argument("--ranks-per-node", type=options.count, metavar="M", help=per_node)
    network.add_argument("--rate", type=options.rate, help="rate of a node's link, each way: 50mbit, 1gbit")
    trip = (
        "round trip between nodes: 80ms (default: 0.2 ms at 100mbit and more, as in a local network; otherwise 30 ms)"
    )
    network.add_argument("--rtt", type=options.seconds, metavar="TIME", help=trip)
    network.add_argument("--loss", type=options.loss, metavar="PART", help="packet loss: 0.1%% or 0.001 (0)")
    control = "TCP congestion control: cubic slows down after a loss, bbr does not (cubic)"
    network.add_argument("--congestion", choices=("cubic", "bbr"), help=control)
    training = parser.add_argument_group("the training")
    n = "size of the model, in float32: K, M and G are decimal"
    training.add_argument("--parameters", type=options.count, metavar="N", help=n)
    step = "time that a rank computes in a step, without exchanges: 30ms"
    training.add_argument("--step-time", type=options.duration, metavar="TIME", help=step)
    every = "numbers of local steps in a round to compare (%(default)s)"
    training.add_argument(
        "--sync-every", type=options.listed(options.count), default="1,8,32,128", metavar="LIST", help=every
    )
    choice = "your optimizer: SparseAdamW replaces AdamW, register() suits SGD (%(default)s)"
    training.add_argument("--optimizer", choices=methods.OPTIMIZERS, default="adamw", help=choice)
    cores = "share of a CPU core that a rank has for the work of exchanges, up to 1 (%(default)s)"
    training.add_argument("--cores-per-rank", type=_CORES, default=1.0, metavar="C", help=cores)
    device = "what does the work of exchanges on each rank: a CPU core, or a GPU like one NVIDIA H200 (%(default)s)"
    training.add_argument("--device", choices=("cpu", "cuda"), default="cpu", help=device)
    costs = "costs of work on a CPU, a file of `sparsecomm tune` (default: typical costs of a CPU core of 2024)"
    training.add_argument("--profile", type=Path, metavar="FILE", help=costs)
    options.add_files(parser, "utilisation against rate and H")


def run(arguments: argparse.Namespace) -> int:
    """Print the table and the advice, and write the files; return 0."""
    if not arguments.measure:
        _check(arguments, "ranks", "rate")
        options.check_writable(arguments.json, arguments.plot)
        _plan(arguments)
        return 0
    # Report an unresponsive rank within seconds, but leave time for the measurements.
    os.environ.setdefault("SPARSECOMM_TIMEOUT", str(30 + 4 * arguments.seconds))
    comm = world()
    files = [arguments.json, arguments.plot] if comm.Get_rank() == 0 else []
    agreed(comm, lambda: _check(arguments))
    agreed(comm, lambda: options.check_writable(*files))
    versions = measurement.versions(comm)
    agreed(comm, lambda: measurement.check_alike(versions))
    transport = transport_of(comm)
    agreed(comm, lambda: measurement.check_several(transport))
    _measure(transport, comm, arguments)
    agreed(comm, lambda: _plan(arguments) if transport.rank == 0 else None)
    return 0


def _check(arguments: argparse.Namespace, *needed: str) -> None:
    """Check the options before anything is measured."""
    examples = {"ranks": "P", "rate": "50mbit", "parameters": "30.8M", "step_time": "30ms"}
    needed = (*needed, "parameters", "step_time")
    missing = [name for name in examples if name in needed and vars(arguments)[name] is None]
    if missing:
        text = ", ".join(f"--{name.replace('_', '-')} {examples[name]}" for name in missing)
        measured = ", or --measure under mpirun or torchrun" if "rate" in missing else ""
        raise InvalidInputError(f"plan: options are missing. Add, with your numbers: {text}{measured}")
    if arguments.ranks and arguments.ranks % (arguments.ranks_per_node or 1):
        raise InvalidInputError(
            f"--ranks {arguments.ranks}: must be a multiple of --ranks-per-node {arguments.ranks_per_node}"
        )
    if arguments.device == "cuda" and arguments.cores_per_rank < 1:
        raise InvalidInputError("--cores-per-rank with --device cuda: GPUs do the work of exchanges. Omit one of them")
    options.costs(arguments.profile)


def _measure(transport: Transport, comm: World, arguments: argparse.Namespace) -> None:
    """Measure the links, print the results, and fill in the options that were not passed. Collective."""
    placement = measurement.placement(transport, comm.allgather(socket.gethostname()))
    if transport.rank == 0:
        print(f"{'ranks':<14} {placement}", flush=True)
    measured, P = measurement.measure(transport, comm, arguments.seconds), transport.size
    assert measured.links.farthest is not None
    first, second = measured.links.farthest
    longest = f"{time_text(measured.links.round_trip)}, the longest, between rank {first} and rank {second}"
    lines = [
        ("library", transport.library),
        ("interfaces", ", ".join(measured.interfaces) or measured.problem),
        ("round trip", longest),
        ("rates", measured.rates_text),
        ("losses", "unknown" if measured.loss is None else f"{percent_text(measured.loss)} of the packets"),
        ("TCP", measured.control or "congestion control unknown"),
        *(("! warning", warning) for warning in [*measured.warnings, *measurement.warnings(transport)]),
        ("", ""),
    ]
    if transport.rank == 0:
        print(*(f"{label:<14} {text}" for label, text in lines), sep="\n", flush=True)
    arguments.ranks = arguments.ranks or P
    if arguments.ranks_per_node is None and P % transport.num_nodes == 0 and transport.num_nodes > 1:
        arguments.ranks_per_node = P // transport.num_nodes
    for name, value in measured.options.items():
        if getattr(arguments, name) is None:
            setattr(arguments, name, value)


def _plan(arguments: argparse.Namespace) -> None:
    """Print the table and the advice, and write the files."""
    costs, assumed = options.costs(arguments.profile), {}
    cuda, per_node = arguments.device == "cuda", arguments.ranks_per_node or 1
    if cuda:  # a profile contains the work of a CPU
        costs, assumed["assumed work"] = replace(methods.CUDA, node=costs.node), _GPU
    if arguments.rtt is None:
        arguments.rtt = _LAN_TRIP if arguments.rate >= _LAN else _WAN_TRIP
        where = "in a local network" if arguments.rate >= _LAN else "over the internet"
        assumed["assumed trips"] = f"as {where}: measure round trips with `ping HOST`, and pass --rtt"
    training = Training(arguments.ranks, arguments.parameters, arguments.step_time, arguments.cores_per_rank)
    network = Network(
        arguments.rate,
        arguments.rtt,
        arguments.loss or 0.0,
        per_node,
        congestion=arguments.congestion or "cubic",
        inside=methods.PCIE if cuda else None,
    )
    nodes = nodes_count_as_one(training, network)
    if cuda and nodes:
        rate = rate_text(8 / methods.PCIE.beta)
        assumed["assumed GPUs"] = f"{rate} between the GPUs of a node, as over PCIe 4.0; NVLink is faster"
    every = sorted(arguments.sync_every)
    table = list(methods.ways(training, network, every, costs, arguments.optimizer))
    chosen, min_seconds = methods.best(table), min(way.seconds for way in table)
    memory = {"memory": methods.memory(training, network)} if arguments.optimizer == "adamw" else {}
    head = {"sparsecomm": sc.__version__, **methods.described(training, network), **memory, **assumed}
    columns = _COLUMNS if nodes else _COLUMNS[:-1]
    print(table_head(head, columns))
    for way in table:
        print(table_line((way, min_seconds), columns))
    lines = methods.advice(chosen, table, training, network)
    print("", *lines, sep="\n", flush=True)
    if arguments.json is not None:
        header = {"sparsecomm": sc.__version__, **asdict(training), **asdict(network), "costs": asdict(costs)}
        header["loss_participants"] = PARTICIPANTS
        rows = [way.as_row() for way in table]
        content = {"schema": SCHEMA, "header": header, "advice": lines, "taken": table.index(chosen), "rows": rows}
        with options.writing(arguments.json):
            arguments.json.write_text(json_text(content))
    if arguments.plot is not None:
        with options.writing(arguments.plot):
            save(draw(training, network, every, costs, chosen, arguments.optimizer), arguments.plot)


def _percent(fraction: float) -> str:
    return number_text(100 * fraction, 2) if fraction < 0.1 else f"{100 * fraction:.0f}"


_NODES = {True: "yes", False: "no"}
_COLUMNS = [
    Column("", "", 21, lambda row: f"{row[0].method:<20}"),
    Column("H", "steps", 6, lambda row: row[0].H),
    Column("delay", "steps", 7, lambda row: row[0].exchange.delay or "-"),
    Column("density", "", 9, lambda row: number_text(row[0].exchange.density)),
    Column("algorithm", "", 11, lambda row: row[0].predicted.algorithm),
    Column("wire", "", 13, lambda row: "-" if row[0].predicted.algorithm == GLOO else row[0].predicted.wire),
    Column("exchange", "s", 10, lambda row: number_text(row[0].predicted.seconds)),
    Column("sent", "MB", 8, lambda row: number_text(row[0].predicted.nbytes / 1e6)),
    Column("step", "s", 9, lambda row: number_text(row[0].step_seconds)),
    Column("computing", "%", 11, lambda row: _percent(row[0].predicted.utilisation)),
    Column("loss", "nats", 13, lambda row: "not trained" if row[0].loss is None else f"{row[0].loss:+.3f}"),
    Column("equal loss", "x", 12, lambda row: "-" if row[0].loss is None else number_text(row[0].seconds / row[1])),
    Column("nodes", "", 7, lambda row: "-" if row[0].predicted.algorithm == GLOO else _NODES[row[0].exchange.nodes]),
]


# -- the plot ---------------------------------------------------------------------------------------------------------

_STYLES: dict[str, dict[str, Any]] = {  # the same colour for the same exchange
    methods.DENSE: style("dense"),
    methods.DENSE_LOCAL: style("dense") | {"marker": "s", "linestyle": "--"},
    methods.ADAMW: style("SparseAdamW"),
    methods.SGD: style("double") | {"marker": "P", "linestyle": "--"},
    methods.LOCAL: style("local steps"),
    methods.DELAYED: style("local steps") | {"marker": "D", "linestyle": "--"},
}
_FACTORS = [10 ** (j / 6) for j in range(-9, 10)]  # multiples of the rate of the plan


def draw(
    training: Training, network: Network, every: Sequence[int], costs: Costs, chosen: methods.Way, optimizer: str
) -> Any:
    """Return the figure of utilisation: on the left against the rate, on the right against H."""
    H = chosen.H if chosen.H > 1 else max(every)
    networks = [replace(network, rate=factor * network.rate) for factor in _FACTORS]
    lengths_by_rate = list(dict.fromkeys((H, chosen.H)))  # of a round; only the chosen method is drawn with the second
    by_rate = [
        (net.rate, way) for net in networks for way in methods.ways(training, net, lengths_by_rate, costs, optimizer)
    ]
    by_length = list(methods.ways(training, network, every, costs, optimizer))
    figure, (rates, lengths) = pyplot().subplots(1, 2, figsize=(12, 4.8), layout="constrained", sharey=True)
    for method, look in _STYLES.items():
        way = chosen if method == chosen.method else next((w for _, w in by_rate if w.method == method), None)
        if way is None:  # it does not suit the optimizer, or is never used
            continue
        setting = method, way.arguments
        at_rate = [(rate, _percentage(w)) for rate, w in by_rate if (w.method, w.arguments, w.H) == (*setting, way.H)]
        at_length = [(w.H, _percentage(w)) for w in by_length if (w.method, w.arguments) == setting]
        rates.plot(*zip(*at_rate, strict=True), **look, markevery=[len(at_rate) // 2], label=_label(way))
        if method in (methods.DENSE, methods.ADAMW, methods.SGD):
            lengths.axhline(at_length[0][1], color=look["color"], linestyle=look.get("linestyle", "-"))
        elif at_length:
            lengths.plot(*zip(*at_length, strict=True), **look)
    ring = {"marker": "o", "color": "black", "markersize": 14, "fillstyle": "none", "linestyle": ""}
    rates.plot([network.rate], [_percentage(chosen)], **ring, label="the plan")
    lengths.plot([chosen.H], [_percentage(chosen)], **ring)
    rates.axvline(network.rate, color="black", linewidth=0.8, linestyle=":")
    log_axis(rates.xaxis, rate_text)
    rates.set_xlabel("rate of a node's link, bits per second")
    rates.set_ylabel("utilisation: compute time / wall time, %")
    lengths.set_xscale("log", base=2)
    lengths.set_xticks(every, [number_text(H) for H in every])
    lengths.minorticks_off()
    lengths.set_xlabel(f"H: local steps per round, at {rate_text(network.rate)}")
    for axes in (rates, lengths):
        axes.set_ylim(-2, 102)
        axes.grid(True, alpha=0.35)
    figure.legend(*rates.get_legend_handles_labels(), frameon=False, loc="outside right upper")
    figure.suptitle("\n".join(methods.described(training, network).values()), fontsize="medium")
    return figure


def _percentage(way: methods.Way) -> float:
    return 100 * way.predicted.utilisation


def _label(way: methods.Way) -> str:
    if way.method in (methods.ADAMW, methods.SGD):
        return f"{way.method}, density {number_text(way.exchange.density)}"
    return way.method if way.method == methods.DENSE else f"{way.method}, H = {way.H}"
