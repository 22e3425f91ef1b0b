"""The time that sparsecomm saves, and costs, inside a training step.

    python -m bench.slow_network run --ranks 4 --rate 1gbit -- python -m bench.training ddp
    python -m bench.slow_network run --ranks 4 --rate 1gbit -- python -m bench.training adamw
    python -m bench.training adamw --elements 25600000
    python -m bench.training adamw --elements 25600000 --simulated 4
    torchrun --nproc-per-node 4 -m bench.training memory --elements 20000000
    python -m bench.training hook
    mpirun -n 2 python -m bench.training ddp
    python -m bench.slow_network run --ranks 2 --rate 100mbit -- python -m bench.training overlap

- ``ddp``: the time per step of DistributedDataParallel over gloo, dense and with the sparse hook, on the same model.
- ``adamw``: the same under AdamW, by `sparsecomm.torch.SparseAdamW`. On one rank, the optimizer's
  work alone, with gradients that are ready: its time divided by the time of PyTorch's fused AdamW. With
  ``--simulated N``, the work of one of N simulated ranks, which includes encoding and decoding messages.
- ``memory``: bytes of resident memory per weight on each rank, after the last step and at the peak in a step. They
  include the weight, its gradient and everything that `SparseAdamW` stores. Linux only.
- ``hook``: what the hook costs where the network is infinitely fast: one rank, against a hook that does nothing, in
  times of reading all gradients twice.
- ``overlap``: the fraction of the exchange time that overlap with computation of the same length does not hide.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mpi4py import MPI
from rich.table import Table
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

import sparsecomm as sc
import sparsecomm.torch as sct
from bench import report
from bench.compare.baselines import start_gloo
from bench.timing import Runner, Timer
from sparsecomm.optimizers.options import DENSITY as DENSITY_OF_ADAMW
from sparsecomm.quantities import rate_text
from sparsecomm.transport import simulated

DENSITY = 0.001


def main() -> None:
    parser = report.parser(__doc__)
    parser.add_argument("what", choices=["ddp", "adamw", "memory", "hook", "overlap"])
    parser.add_argument("--steps", type=int, default=20, help="measured steps of each contender (20)")
    parser.add_argument("--warmup", type=int, default=3, help="steps before them (3)")
    parser.add_argument("--width", type=int, default=2048, help="of the model's layers (2048: 11.5M parameters)")
    parser.add_argument("--batch", type=int, default=4, help="samples per rank and step (4)")
    parser.add_argument("--parts", type=int, default=16, help="number of gradients, with overlap (16)")
    parser.add_argument("--elements", type=int, default=1 << 23, help="of all these gradients (2^23)")
    parser.add_argument("--simulated", type=int, default=1, help="number of simulated ranks, with adamw (1)")
    parser.add_argument("--density", type=float, default=DENSITY, help=f"({DENSITY})")
    parser.add_argument("--write", type=Path, metavar="STEM", help="write STEM.txt and STEM.json")
    args = parser.parse_args()
    warnings.filterwarnings("ignore", module="torch")
    torch.set_num_threads(max(1, int(os.environ.get("OMP_NUM_THREADS", "0") or 0)) or 1)
    {"ddp": ddp, "adamw": adamw, "memory": memory, "hook": hook, "overlap": overlap}[args.what](args)


def ddp(args: argparse.Namespace) -> None:
    world = MPI.COMM_WORLD
    start_gloo(MPI.COMM_WORLD)
    alone = new_model(args)  # nothing is exchanged: what computation takes
    contenders: dict[str, Callable[[], None]] = {"computation alone": _stepper(alone, args)}
    states: dict[str, sct.SparseState] = {}
    for label, register in {
        "a hook that does nothing": sct.keep_local,
        "gloo, dense": lambda model: None,
        "gloo, float16": lambda model: model.register_comm_hook(None, default_hooks.fp16_compress_hook),
        "sparse hook, over gloo": lambda model: sct.register(model, args.density, algorithm="fastest"),
        "sparse hook, over MPI": lambda model: sct.register(model, args.density, algorithm="fastest", comm=world),
    }.items():
        model = DistributedDataParallel(new_model(args), gradient_as_bucket_view=True)
        state = register(model)
        if isinstance(state, sct.SparseState):
            states[label] = state
        contenders[label] = _stepper(model, args)
    _publish_steps(args, "ddp", contenders, {label: state.reducer for label, state in states.items()})


def adamw(args: argparse.Namespace) -> None:
    if MPI.COMM_WORLD.size == 1:
        return _own_work(args) if args.simulated == 1 else _simulated_work(args)
    world = MPI.COMM_WORLD
    start_gloo(MPI.COMM_WORLD)
    dense = {"lr": 1e-3, "fused": True}
    alone, plain = new_model(args), DistributedDataParallel(new_model(args), gradient_as_bucket_view=True)
    contenders = {
        "computation alone": _stepper(alone, args, torch.optim.AdamW(alone.parameters(), **dense)),
        "gloo, dense": _stepper(plain, args, torch.optim.AdamW(plain.parameters(), **dense)),
    }
    reducers = {}
    for label, options in {
        "SparseAdamW, over gloo": {},
        "SparseAdamW, overlap, over gloo": {"overlap": True},
        "SparseAdamW, over MPI": {"comm": world},
    }.items():
        model = new_model(args)
        optimizer = sct.SparseAdamW(model.named_parameters(), **options)
        contenders[label] = _stepper(model, args, optimizer)
        contenders[label]()  # so that there is a reducer
        reducers[label] = optimizer.reducer
    _publish_steps(args, "adamw", contenders, reducers)


def _simulated_work(args: argparse.Namespace) -> None:
    """Measure the work of one of several simulated ranks, which take turns on one thread."""
    weight = torch.nn.Parameter(torch.randn(args.elements))
    weight.grad = torch.randn(args.elements)
    fused, length = torch.optim.AdamW([weight], fused=True), args.elements // args.parts
    dense = measure({"fused": fused.step}, args.steps, args.warmup)["fused"]

    def program(transport: simulated.SimulatedTransport) -> list[float]:
        random = np.random.default_rng(transport.rank)
        weights = {str(i): np.zeros(length, np.float32) for i in range(args.parts)}
        gradients = {name: random.standard_normal(length, np.float32) for name in weights}
        optimizer, starts = sc.SparseAdamW(weights, check_weights_every=None, comm=transport), []
        for _ in range(args.warmup + args.steps + 1):
            starts.append(time.perf_counter())
            optimizer.step(gradients)
        return np.diff(starts[args.warmup :]).tolist()

    seconds = [result.value for result in simulated.run(args.simulated, program)]
    ours = np.median(np.array(seconds), axis=0) / args.simulated
    low, median, high = report.quartiles(ours / np.median(dense))
    print(f"fused AdamW {1e3 * np.median(dense):.1f} ms; one of {args.simulated} ranks {1e3 * np.median(ours):.1f} ms")
    print(f"ratio {median:.2f} ({low:.2f} - {high:.2f})")


def memory(args: argparse.Namespace) -> None:
    start_gloo(MPI.COMM_WORLD) if MPI.COMM_WORLD.size > 1 else torch.distributed.init_process_group("gloo")

    def train(elements: int) -> None:
        named = [(str(i), torch.nn.Parameter(torch.zeros(elements // args.parts))) for i in range(args.parts)]
        optimizer = sct.SparseAdamW(named)
        for _ in range(args.steps):
            optimizer.zero_grad()
            for _, parameter in named:
                parameter.grad = torch.randn_like(parameter)
            optimizer.step()
        trained.append((named, optimizer))

    def resident(line: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(text.split()[1]) << 10 for text in lines if text.startswith(line))

    trained: list[Any] = []
    train(args.parts * 4096)  # the first use imports more modules
    before = resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the peak begins here
    train(args.elements)
    after, peak = ((resident(line) - before) / args.elements for line in ("VmRSS", "VmHWM"))
    torch.distributed.barrier()
    if torch.distributed.get_rank() == 0:
        ranks = torch.distributed.get_world_size()
        print(f"{ranks} ranks: {after:.1f} bytes per weight after {args.steps} steps, {peak:.1f} at the peak in a step")


def _own_work(args: argparse.Namespace) -> None:
    """Measure what the optimizers do with a gradient that is there."""
    ours, theirs = (torch.nn.Parameter(torch.randn(args.elements)) for _ in range(2))
    ours.grad = theirs.grad = torch.randn(args.elements)
    optimizer = sct.SparseAdamW([("weights", ours)], check_weights_every=None, comm=MPI.COMM_WORLD)
    fused = torch.optim.AdamW([theirs], fused=True)
    seconds = measure({"fused AdamW": fused.step, "SparseAdamW": optimizer.step}, args.steps, args.warmup)
    medians = {label: report.quartiles(times, 1e3) for label, times in seconds.items()}
    ratios = {label: report.quartiles(times / seconds["fused AdamW"]) for label, times in seconds.items()}
    columns = [
        ("optimizer", lambda label: label),
        ("ms (quartiles)", lambda label: quartiles_text(medians[label])),
        ("/ fused AdamW (quartiles)", lambda label: quartiles_text(ratios[label])),
    ]
    table = report.table(medians, columns, title=f"own work per step, {args.elements / 1e6:.1f}M parameters, P = 1")
    publish(args, "own_work", table, {"parameters": args.elements, "ms": medians, "ratios": ratios})


def _publish_steps(
    args: argparse.Namespace, what: str, contenders: dict[str, Callable[[], None]], reducers: dict[str, sc.Reducer]
) -> None:
    """Measure contenders, among them "gloo, dense", and publish the table of their steps."""
    world, seconds = MPI.COMM_WORLD, measure(contenders, args.steps, args.warmup)
    parameters = sum(p.numel() for p in new_model(args).parameters())
    if world.rank > 0:
        return
    medians = {label: report.quartiles(times, 1e3) for label, times in seconds.items()}
    dense = medians["gloo, dense"][1]
    sent = {
        label: f"{reducer.counters.bytes_sent / reducer.counters.steps / 1e3:.1f} kB"
        for label, reducer in reducers.items()
    }
    density = args.density if what == "ddp" else DENSITY_OF_ADAMW
    columns = [
        ("contender", lambda label: label),
        ("ms (quartiles)", lambda label: quartiles_text(medians[label])),
        ("dense / this", lambda label: f"{dense / medians[label][1]:.2f}"),
        ("sent per step", sent.get),
    ]
    title = f"time per step, {parameters / 1e6:.1f}M parameters, density {density:g}, P = {world.size}"
    table = report.table(medians, columns, title=title)
    data = {"parameters": parameters, "density": density, "ranks": world.size, "ms": medians}
    publish(args, what, table, data)


def new_model(args: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    w = args.width
    layers = [nn.Linear(512, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, w), nn.ReLU(), nn.Linear(w, 1000)]
    return nn.Sequential(*layers)


def _stepper(
    model: nn.Module, args: argparse.Namespace, optimizer: torch.optim.Optimizer | None = None
) -> Callable[[], None]:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.01)
    x, y = torch.randn(args.batch, 512), torch.randint(1000, (args.batch,))

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()

    return step


def measure(contenders: Mapping[str, Callable[[], object]], steps: int, warmup: int = 1) -> dict[str, np.ndarray]:
    """Return seconds of each step, the slowest rank's. Contenders take turns, so that all see the same machine."""
    timers = {label: Timer(MPI.COMM_WORLD, Runner(step), "step", steps) for label, step in contenders.items()}
    for step in range(-warmup, steps):
        for timer in timers.values():
            timer.run(step)
    return {label: timer.timing().slowest for label, timer in timers.items()}


def quartiles_text(milliseconds: list[float]) -> str:
    return "{1:.2f} ({0:.2f} - {2:.2f})".format(*milliseconds)


# -- the hook's own cost ----------------------------------------------------------------------------------------------


def hook(args: argparse.Namespace) -> None:
    start_gloo(MPI.COMM_WORLD)
    plain = DistributedDataParallel(new_model(args), gradient_as_bucket_view=True)
    sct.keep_local(plain)
    contenders = {"nothing": _stepper(plain, args)}
    for scope in ("tensor", "bucket", "model"):
        model = DistributedDataParallel(new_model(args), gradient_as_bucket_view=True)
        sct.register(model, args.density, algorithm="butterfly", wire="plain", scope=scope)
        contenders[scope] = _stepper(model, args)
    allreduce = DistributedDataParallel(new_model(args), gradient_as_bucket_view=True)
    contenders["DDP's own, dense"] = _stepper(allreduce, args)
    gradients = np.random.default_rng(0).standard_normal(sum(p.numel() for p in plain.parameters())).astype(np.float32)
    contenders["read twice"] = lambda: (gradients.max(), gradients.max())
    seconds = measure(contenders, args.steps, args.warmup)
    reading = report.quartiles(seconds["read twice"], 1e3)
    labels = ("tensor", "bucket", "model", "DDP's own, dense")
    rows = {label: report.quartiles(seconds[label] - seconds["nothing"], 1e3) for label in labels}
    step = 1e3 * float(np.median(seconds["nothing"]))
    columns = [
        ("hook", lambda label: f"sparse, scope {label}" if label in ("tensor", "bucket", "model") else label),
        ("ms added (quartiles)", lambda label: quartiles_text(rows[label])),
        (f"/ reading twice ({reading[1]:.2f} ms)", lambda label: f"{rows[label][1] / reading[1]:.2f}"),
    ]
    title = f"added to a step of {step:.1f} ms, {len(gradients) / 1e6:.1f}M parameters, P = 1"
    table = report.table(rows, columns, title=title)
    data = {"parameters": len(gradients), "read_twice_ms": reading, "added_ms": rows}
    publish(args, "hook", table, data | {"step_ms": report.quartiles(seconds["nothing"], 1e3)})


# -- overlap ----------------------------------------------------------------------------------------------------------


def overlap(args: argparse.Namespace) -> None:
    """Measure steps in which gradients become ready one after another, after computation here or on a device."""
    world, n = MPI.COMM_WORLD, args.elements // args.parts
    rng = np.random.default_rng(world.rank)
    gradients = {f"g{i}": rng.standard_normal(n).astype(np.float32) for i in range(args.parts)}
    outs = {name: np.empty_like(g) for name, g in gradients.items()}
    reducer = sc.Reducer(gradients, args.density, comm=world, algorithm="fastest", bucket_bytes=1)
    a, work = torch.randn(128, 128), {"here": 200, "elsewhere": 0.01 / args.parts}

    def compute(where: str) -> None:
        if where == "elsewhere":
            time.sleep(work[where])
        else:
            for _ in range(int(work[where])):
                torch.mm(a, a)

    def step(where: str, exchange: str) -> None:
        for name in reversed(gradients):
            if where:
                compute(where)
            if exchange == "beside":
                reducer.push(name, gradients[name], outs[name])
        if exchange == "after":
            for name in reversed(gradients):
                reducer.push(name, gradients[name], outs[name])
        if exchange:
            reducer.wait()

    contenders = {"exchange alone": lambda: step("", "after")}
    for where in work:
        contenders |= {
            f"computation {where}": lambda where=where: step(where, ""),
            f"{where}, then exchange": lambda where=where: step(where, "after"),
            f"{where}, overlapped": lambda where=where: step(where, "beside"),
        }
    for where in [*work, *work]:  # as long as the exchange
        alone = {name: contenders[name] for name in ("exchange alone", f"computation {where}")}
        exchange, computation = (float(np.median(times)) for times in measure(alone, args.steps, args.warmup).values())
        work[where] = world.bcast(work[where] * exchange / computation)
    seconds = measure(contenders, args.steps, args.warmup)
    if world.rank > 0:
        return
    what = f"{args.parts} gradients of {n / 1e6:.2f}M elements, density {args.density:g}, P = {world.size}"
    visible = {
        label: report.quartiles(times - seconds[f"computation {label.partition(',')[0]}"], 1e3)
        for label, times in seconds.items()
        if label.partition(",")[0] in work
    }

    def fraction_not_hidden(label: str) -> str | None:
        where = label.partition(",")[0]
        return f"{visible[label][1] / visible[f'{where}, then exchange'][1]:.2f}" if label in visible else None

    columns = [
        ("step", lambda label: label),
        ("ms (quartiles)", lambda label: quartiles_text(report.quartiles(seconds[label], 1e3))),
        ("exchange not hidden, ms", lambda label: f"{visible[label][1]:.2f}" if label in visible else None),
        ("fraction not hidden", fraction_not_hidden),
    ]
    table = report.table(seconds, columns, title=f"one step: {what}")
    data = {"ranks": world.size, "n": n, "parts": args.parts, "density": args.density, "visible_ms": visible}
    data["ms"] = {label: report.quartiles(times, 1e3) for label, times in seconds.items()}
    publish(args, "overlap", table, data)


def publish(args: argparse.Namespace, what: str, table: Table, data: dict[str, Any]) -> None:
    """Publish a table with the link of `bench.slow_network`, if there is one."""
    threads = int(os.environ.get("SPARSECOMM_THREADS", "0")) or None
    about = report.about("-m bench.training", sys.argv[1:], MPI.COMM_WORLD.size, threads)
    lines = report.head(about)
    if measured := report.emulated_link():
        about["link"] = measured
        alpha, beta = 1e6 * measured["alpha"], 1e9 * measured["beta"]
        lines.append(f"# links of {rate_text(measured['asked'])}, measured: {alpha:.0f} us, {beta:.2f} ns per byte")
    report.publish(args.write, lines, [table], {"run": about, what: data})


if __name__ == "__main__":
    main()
