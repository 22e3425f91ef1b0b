"""Bytes, times and memory where several ranks share a host and its link.

    python -m bench.slow_network run --ranks 2 --per-host 2 --rate 1gbit -- python -m bench.nodes bytes
    python -m bench.nodes bytes --simulated 2x1 2x8
    python -m bench.slow_network run --ranks 2 --per-host 2 --rate 1gbit -- python -m bench.nodes steps --width 2048
    python -m bench.nodes memory --simulated 2x4 4x8
    python -m bench.nodes work --simulated 4x1 2x2 --elements 11500000

- ``bytes``: the bytes that leave a host in a sparse step, and their ratio to hosts of one rank. Emulated hosts count
  them at the network interface, with headers and acknowledgements; simulated ranks count message bytes.
- ``steps``: the time of whole training steps, and of ``optimizer.step()`` in them, on the slowest rank, and the ratio
  of whole steps to dense steps of DDP.
- ``memory``: bytes per weight of the arrays that `SparseAdamW` uses, and of all memory that Python and NumPy allocate.
- ``work``: the work of `SparseAdamW` on one of several simulated ranks, without messages and without the update of the
  weights, and its ratio to as many ranks on hosts of one rank. "dense" is the part for dense sums inside nodes.

``--write STEM`` adds the results to STEM.json, where they replace earlier results of the same kind, and writes tables
of all results in this file to STEM.txt.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import tracemalloc
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from copy import deepcopy
from functools import partial
from itertools import product
from operator import itemgetter
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from mpi4py import MPI
from rich.table import Table
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
import sparsecomm.torch as sct
from bench import report
from bench.clock import Clock
from bench.compare.baselines import start_gloo
from bench.timing import Runner, Timer
from bench.training import new_model, quartiles_text
from sparsecomm.backends import CpuBackend
from sparsecomm.quantities import rate_text
from sparsecomm.tools.timing import quiet_barrier
from sparsecomm.transport import Transport, simulated, transport_of
from sparsecomm.wire import Messages

Options = dict[str, Any]  # ``nodes``
# The fields that identify a result.
KIND = "what", "simulated", "contender", "nodes", "parameters", "hosts", "per_host", "rate"
ADAMW, HOOK, DENSE = "SparseAdamW", "DDP with the hook", "DDP"
TITLES = {"bytes": "bytes sent per step", "steps": "times", "memory": "bytes per weight", "work": "own work per step"}


def main(command_line: list[str] | None = None) -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", choices=TITLES)
    values = ["auto", "False"]
    parser.add_argument("--nodes", nargs="+", choices=values, default=values, help="values of this option (both)")
    shape = {"nargs": "+", "default": [], "metavar": "HOSTSxRANKS", "type": lambda s: tuple(map(int, s.split("x")))}
    parser.add_argument("--simulated", help="numbers of simulated hosts and of ranks on each: 2x8", **shape)
    parser.add_argument("--elements", type=int, default=1_500_000, help="weights of simulated ranks (1,500,000)")
    parser.add_argument("--width", type=int, default=566, help="of the model on hosts (566: 1.5M weights; 2048: 11.5M)")
    parser.add_argument("--steps", type=int, default=10, help="measured steps (10)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (3)")
    parser.add_argument("--write", type=Path, metavar="STEM", help="add to STEM.json, and write STEM.txt")
    args = parser.parse_args(command_line)
    if args.what == "steps" if args.simulated else args.what in ("memory", "work"):
        parser.error("memory and work need --simulated, and steps needs hosts: see bench.slow_network")
    args.options = [{"nodes": text == "auto" and text} for text in args.nodes]
    os.environ.setdefault("SPARSECOMM_THREADS", "1")
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(1)
    run = report.about("-m bench.nodes", sys.argv[1:] if command_line is None else command_line)
    run["settings"].pop("SLOW_NETWORK_LINK", None)
    if args.simulated:
        publish(args.write, run, {"bytes": simulated_bytes, "memory": memory, "work": work}[args.what](args))
        return
    start_gloo(MPI.COMM_WORLD)
    transport, link = transport_of(None), report.emulated_link()
    rate = link and link["asked"]
    hosts, per_host = transport.num_nodes, transport.size // transport.num_nodes
    network = f"--ranks {hosts} --per-host {per_host} --rate {(rate or 0) / 1e6:g}mbit"
    rows = list((host_bytes if args.what == "bytes" else steps)(args, transport))
    if transport.rank == 0:
        run["command"] = f"python -m bench.slow_network run {network} -- {run['command']}"
        publish(args.write, run, [row | {"hosts": hosts, "per_host": per_host, "rate": rate} for row in rows])


# -- emulated hosts ---------------------------------------------------------------------------------------------------


class Training(Runner):
    """A model, and how its gradients are exchanged."""

    def __init__(self, args: argparse.Namespace, contender: str, options: Options) -> None:
        self.model, self.seconds = new_model(args), 0.0
        nodes = options.get("nodes", False) if contender in (HOOK, ADAMW) else None
        self.row = {"what": args.what, "contender": contender, "nodes": nodes}
        self.row["parameters"] = sum(p.numel() for p in self.model.parameters())
        self._samples = torch.Generator().manual_seed(MPI.COMM_WORLD.rank)
        if contender in (DENSE, HOOK):
            self.model = DistributedDataParallel(self.model, gradient_as_bucket_view=True)
        if contender == HOOK:
            sct.register(self.model, dense_steps=0, **options)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), fused=True)
        if contender == ADAMW:
            self.optimizer = sct.SparseAdamW(self.model.named_parameters(), **options)

    def step(self) -> None:
        x = torch.randn(4, 512, generator=self._samples)
        y = torch.randint(1000, (4,), generator=self._samples)
        self.optimizer.zero_grad()
        torch.nn.functional.cross_entropy(self.model(x), y).backward()
        start = time.perf_counter()
        self.optimizer.step()
        self.seconds = time.perf_counter() - start

    def parts(self) -> dict[str, float]:
        return {"optimizer": self.seconds}


def host_bytes(args: argparse.Namespace, transport: Transport) -> Iterator[report.Row]:
    first_ranks = [transport.node_of_rank.index(node) for node in range(transport.num_nodes)]
    for contender, options in [(DENSE, {}), *product([HOOK, ADAMW], args.options)]:
        training, counts = Training(args, contender, options), []
        for count in (args.warmup, args.steps):
            for _ in range(count):
                training.step()
            quiet_barrier(MPI.COMM_WORLD)
            counts.append(_sent())
        sent = np.array(MPI.COMM_WORLD.allgather(counts[1] - counts[0]))[first_ranks].mean(axis=0) / args.steps / 1e3
        yield training.row | {"kB_to_other_hosts": sent[0], "kB_inside": sent[1]}


def _sent() -> np.ndarray:
    """Return the bytes that this host has sent to others, and within itself."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    sent = {words[0]: int(words[9]) for words in map(str.split, lines)}
    return np.array([sent.get("eth0:", 0), sent["lo:"]])


def steps(args: argparse.Namespace, transport: Transport) -> Iterator[report.Row]:
    kinds = ("computation alone", {}), (DENSE, {}), *product([ADAMW], args.options)
    trainings = [Training(args, *kind) for kind in kinds]
    timers = [Timer(MPI.COMM_WORLD, training, "step", args.steps) for training in trainings]
    for number in range(-args.warmup, args.steps):
        for timer in timers:
            timer.run(number)
    for training, timing in zip(trainings, [timer.timing() for timer in timers], strict=True):
        times = {"step_ms": timing.slowest, "optimizer_ms": timing.parts["optimizer"].max(axis=0)}
        yield training.row | {name: report.quartiles(seconds, 1e3) for name, seconds in times.items()}


# -- simulated ranks --------------------------------------------------------------------------------------------------


def kinds_of(args: argparse.Namespace) -> Iterator[tuple[Callable[..., list[Any]], report.Row]]:
    """Yield functions that run a program on simulated ranks, each with the first fields of its row."""
    for options, (hosts, per_host) in product(args.options, args.simulated):
        row = {"what": args.what, "simulated": True, "contender": ADAMW, "nodes": options.get("nodes", False)}
        row |= {"parameters": args.elements, "hosts": hosts, "per_host": per_host}
        yield partial(_run, [rank // per_host for rank in range(hosts * per_host)], options), row


def _run(node_of_rank: list[int], options: Options, program: Callable[..., Any]) -> list[Any]:
    results = simulated.run(len(node_of_rank), partial(program, options=options), node_of_rank=node_of_rank)
    return [result.value for result in results]


def new_optimizer(
    args: argparse.Namespace, transport: Transport, options: Options
) -> tuple[sc.SparseAdamW, dict[str, Any]]:
    """Return an optimizer, and gradients for its steps."""
    random, names = np.random.default_rng(transport.rank), map(str, range(16))
    gradients = {name: random.standard_normal(args.elements // 16, np.float32) for name in names}
    weights = {name: np.zeros_like(gradient) for name, gradient in gradients.items()}
    return sc.SparseAdamW(weights, comm=transport, check_weights_every=None, **options), gradients


def simulated_bytes(args: argparse.Namespace) -> Iterator[report.Row]:
    def program(transport: simulated.SimulatedTransport, options: Options) -> list[np.ndarray]:
        optimizer, gradients = new_optimizer(args, transport, options)
        reducer = sc.Reducer(gradients, dense_steps=0, comm=transport, **options)
        isend, node, sent, totals = transport.isend, transport.node_of_rank, np.zeros(2), []

        def counted(data: Any, to: int, *memory: Any) -> Any:
            sent[int(node[to] == node[transport.rank])] += len(data)
            return isend(data, to, *memory)

        transport.isend = counted  # type: ignore[method-assign]
        for step in (lambda: reducer.reduce(deepcopy(gradients)), lambda: optimizer.step(gradients)):
            for number in range(args.warmup + args.steps):
                sent *= number != args.warmup
                step()
            totals.append(sent / args.steps)
        return totals

    for run, row in kinds_of(args):
        kilobytes = np.sum(run(program), axis=0) / row["hosts"] / 1e3
        for contender, (others, own) in zip(("Reducer", ADAMW), kilobytes, strict=True):
            yield row | {"contender": contender, "kB_to_other_hosts": others, "kB_inside": own}


def memory(args: argparse.Namespace) -> Iterator[report.Row]:
    def program(transport: Transport, options: Options) -> tuple[object, dict[str, float]]:
        optimizer, gradients = new_optimizer(args, transport, options)
        for _ in range(args.warmup):
            optimizer.step(gradients)
        buckets, moments = optimizer.reducer.buckets, optimizer._adamw.moments.values()
        arrays: dict[str, list[Any]] = {"weights": [*optimizer.weights.values()], "gradients": [*gradients.values()]}
        arrays |= {"residual": [b.residual for b in buckets], "units": [b.exponents for b in buckets]}
        arrays["moments"] = [array for items in moments for array in items if array is not None]
        totals = {name: sum(array.nbytes for array in items) / args.elements for name, items in arrays.items()}
        return (optimizer, gradients), totals | {"sum": sum(totals.values())}

    for run, row in kinds_of(args):
        tracemalloc.start()
        every = run(program)
        allocated = tracemalloc.get_traced_memory()[0] / len(every) / args.elements
        tracemalloc.stop()
        yield row | max((sizes for _, sizes in every), key=itemgetter("sum")) | {"all_allocated": allocated}


def work(args: argparse.Namespace) -> Iterator[report.Row]:
    def seconds(run: Callable[..., list[Any]]) -> np.ndarray:
        clock, dense = Clock(time.thread_time), [0.0]  # of all ranks, which take turns on this thread

        def timed(method: Callable[..., Any], *arguments: Any) -> Any:
            begin = time.thread_time()
            result = method(*arguments)
            dense[0] += time.thread_time() - begin
            return result

        def program(transport: simulated.SimulatedTransport, options: Options) -> np.ndarray:
            clock.watch(transport)
            (optimizer, gradients), starts = new_optimizer(args, transport, options), []
            optimizer._adamw.update = clock.timed(optimizer._adamw.update)  # type: ignore[method-assign]
            for _ in range(args.warmup + args.steps + 1):
                starts.append((time.thread_time() - clock.messages, dense[0]))
                optimizer.step(gradients)
            return np.diff(starts[args.warmup :], axis=0)

        with ExitStack() as stack:
            for owner, name in (CpuBackend, "flat"), (CpuBackend, "add"), (Messages, "dense"):
                method = partial(timed, getattr(owner, name))
                stack.enter_context(mock.patch.object(owner, name, lambda *args, method=method: method(*args)))
            return np.median(run(program), axis=0)

    kinds = list(kinds_of(args))
    times = [[seconds(run) for run, _ in kinds] for _ in range(3)]  # in turns, for equal conditions
    for (_, row), turns in zip(kinds, zip(*times, strict=True), strict=True):
        work_, dense = 1e3 / (row["hosts"] * row["per_host"]) * np.concatenate(turns).T
        yield row | {"work_ms": report.quartiles(work_, 1), "dense_ms": report.quartiles(dense, 1)}


# -- tables -----------------------------------------------------------------------------------------------------------


def publish(stem: Path | None, run: dict[str, Any], results: Iterable[report.Row]) -> None:
    """Publish results, together with those that the file already has."""
    kind, rows = itemgetter(*KIND), []
    ours = {kind(row): row for row in (dict.fromkeys(KIND) | row | {"run": run} for row in results)}
    if stem and (file := stem.with_name(f"{stem.name}.json")).exists():
        saved = json.loads(file.read_text())
        rows = [row | {"run": saved["runs"][row["run"]]} for row in saved["rows"] if kind(row) not in ours]
    rows += ours.values()
    runs = [row["run"] for i, row in enumerate(rows) if row["run"] not in [other["run"] for other in rows[:i]]]
    lines = dict.fromkeys([report.head(run)[0] for run in runs] + [line for run in runs for line in report.head(run)])
    tables = [_table(title, part) for what, title in TITLES.items() if (part := [r for r in rows if r["what"] == what])]
    report.publish(stem, list(lines), tables, {"runs": runs, "rows": [r | {"run": runs.index(r["run"])} for r in rows]})


def _table(title: str, rows: list[report.Row]) -> Table:
    columns: list[report.Column] = [
        ("hosts x ranks", lambda row: f"{row['hosts']} x {row['per_host']}"),
        ("link", lambda row: "simulated" if row["simulated"] else row["rate"] and rate_text(row["rate"])),
        ("weights", lambda row: f"{row['parameters'] / 1e6:.1f}M"),
        *((name, itemgetter(name)) for name in ("contender", "nodes")),
    ]
    names = [name for name in rows[0] if name not in (*KIND, "run")]
    columns += [(name.replace("_", " "), partial(_cell, name)) for name in names]
    if title != TITLES["memory"]:
        columns.append(("ratio", partial(_ratio, rows, names[0])))
    return report.table(rows, columns, title=title, title_justify="left")


def _cell(name: str, row: report.Row) -> str:
    return quartiles_text(row[name]) if isinstance(row[name], list) else f"{row[name]:,.2f}"


def _ratio(rows: list[report.Row], name: str, row: report.Row) -> str | None:
    hosts = row["hosts"] * (row["per_host"] if row["what"] == "work" else 1)
    wanted = {key: row[key] for key in KIND[:5]} | {"hosts": hosts, "per_host": 1}
    if row["what"] == "steps":
        wanted = {key: row[key] for key in KIND[4:]} | {"contender": DENSE}
    bases = [np.median(other[name]) for other in rows if wanted.items() <= other.items()]
    return f"{np.median(row[name]) / bases[0]:.2f}" if bases else None


if __name__ == "__main__":
    main()
