"""Does training with sparse gradients reach what it reaches with dense ones?

    mpirun -n 4 python examples/convergence.py                    # each rank a process
    python examples/convergence.py --simulated 4 8 --jobs 2       # the same bits, all ranks in one process
    python examples/convergence.py --simulated 8 --densities --equal-bytes 0.01 --momentum 0.9 0
    python examples/convergence.py --report a.json b.json         # only the tables and the plots

A convolutional network learns handwritten digits, an LSTM learns English text (`convergence_tasks.py`); each with
dense gradients, by Top-k, and by gTop-k in three ways (`convergence_training.py`), from the same weights, on the same
batches, for as many steps, with the hyper-parameters that suit dense best. Sparse trainings warm up, and have momentum
correction, as in Deep Gradient Compression (Lin et al., ICLR 2018); the selection is from the whole model, as in gTop-k
(Shi et al., ICDCS 2019).

Density is no fair currency: at density d Top-k applies up to P d n entries per step, gTop-k d n. With --equal-bytes
each method has the density at which it sends as many bytes per step as Top-k at D (`convergence_bytes.py`). Of options
with several values all combinations are trained, and the tables and plots show each method at its best.

Simulated ranks also count the seconds of communication, on a network of 1 Gb/s, for a model of 25.6 million weights
with the same densities. What a GPU computes and what selection takes is not in them.

Written are OUT.json with every curve, OUT.txt with the tables, and for each number of ranks P the plots OUT-P.png (how
training went) and OUT-bytes-P.png (what bytes and seconds buy). Trainings that OUT.json has already are not repeated,
so that an interrupted run goes on, and runs with other ranks make one table.
"""

from __future__ import annotations

import argparse
import importlib.util
import math
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import product
from multiprocessing import get_context
from pathlib import Path

if missing := [n for n in ("torch", "sklearn", "matplotlib", "rich") if importlib.util.find_spec(n) is None]:
    sys.exit(f"This example needs {', '.join(missing)}: pip install torch scikit-learn matplotlib rich")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
os.environ.setdefault("SPARSECOMM_THREADS", "1")

from convergence_bytes import equal_density
from convergence_plots import plot_costs, plot_courses
from convergence_results import Results, Training, about
from convergence_tables import tables
from convergence_tasks import TASKS
from convergence_training import METHODS, MOMENTUM, WARMUP, Curve, Setting, combined, recipe, simulate, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sparsecomm.wire import WIRES

TABLE_WIDTH = 180
USUAL = ("dense", "allgather", "tree", "butterfly", "split")
Done = Iterator[tuple[Setting, Curve]]
Advance = Callable[[int], None]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two models with dense and with sparse gradients.")
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument(
        "--methods", nargs="+", choices=[m for m in METHODS if METHODS[m][1] is not None], default=list(USUAL)
    )
    parser.add_argument("--densities", nargs="*", type=float, default=[0.01, 0.001], help="after the warm-up")
    parser.add_argument(
        "--equal-bytes", nargs="+", type=float, default=[], metavar="D", help="as many per step as Top-k at density D"
    )
    parser.add_argument("--seeds", type=int, default=3, help="how many: of weights and batches")
    parser.add_argument("--steps", type=int, help="of each training, in place of each model's own number")
    parser.add_argument("--steps-times", nargs="+", type=int, default=[1], metavar="N", help="N times as many steps")
    sparse = parser.add_argument_group("sparse trainings; all combinations are trained")
    sparse.add_argument("--momentum", nargs="+", type=float, default=[MOMENTUM])
    sparse.add_argument("--rate", nargs="+", type=float, default=[1.0], help="factor on the model's own learning rate")
    sparse.add_argument("--wire", nargs="+", choices=WIRES, default=["packed"])
    sparse.add_argument("--warmup", nargs="+", type=float, default=[WARMUP], help="share of the steps")
    sparse.add_argument("--decay", nargs="+", type=float, default=[1.0], help="factor on the residuals in each step")
    parser.add_argument("--simulated", nargs="+", type=int, metavar="P", help="simulate P ranks in one process")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, with --simulated")
    parser.add_argument("--out", default="convergence", help="where to write, without .json")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="train nothing: merge these files")
    given = parser.parse_args()
    for name, minimum in (("seeds", 1), ("jobs", 1), ("steps", 10)):
        if (number := getattr(given, name)) is not None and number < minimum:
            parser.error(f"--{name} {number}: expected {minimum} or more")
    for option, fits, expected in (
        ("densities", lambda x: 0 < x < 1, "numbers between 0 and 1"),
        ("equal_bytes", lambda x: 0 < x < 1, "numbers between 0 and 1"),
        ("steps_times", lambda x: x >= 1, "numbers from 1 on"),
        ("momentum", lambda x: 0 <= x < 1, "numbers from 0 to below 1"),
        ("rate", lambda x: 0 < x < math.inf, "numbers above 0"),
        ("warmup", lambda x: 0 <= x <= 0.9, "numbers from 0 to 0.9"),
        ("decay", lambda x: 0 < x <= 1, "numbers above 0, up to 1"),
    ):
        values = getattr(given, option)
        if not all(map(fits, values)):
            parser.error(f"--{option.replace('_', '-')} {' '.join(map(str, values))}: expected {expected}")
    if not given.densities and not given.equal_bytes and set(given.methods) != {"dense"}:
        parser.error("--densities and --equal-bytes are both empty: expected a number at least in one")
    for P in given.simulated or ():
        if P < 1 or any(TASKS[model].batch % P for model in given.models):
            parser.error(f"--simulated {P}: expected a number of ranks that divides the batches into equal shares")
    if (given.simulated or given.equal_bytes) and importlib.util.find_spec("greenlet") is None:
        parser.error("--simulated and --equal-bytes need greenlet: pip install greenlet")
    if not Path(given.out).absolute().parent.is_dir():
        parser.error(f"--out {given.out}: there is no such folder")
    return given


def settings(given: argparse.Namespace, ranks: list[int], note: Callable[[str], None]) -> list[Setting]:
    """Return all trainings, with whole seeds first, so that an interrupted run has something to compare.

    Args:
        given: the arguments.
        ranks: the numbers of ranks.
        note: told of what cannot be.
    """
    wanted = []
    for model, P, times, method in product(given.models, ranks, given.steps_times, given.methods):
        steps = times * (given.steps or TASKS[model].steps)
        if method == "dense":
            wanted.append(Setting(model, P, method, 1.0, 0, steps))
            continue
        for momentum, rate, wire, warmup, decay in product(
            given.momentum, given.rate, given.wire, given.warmup, given.decay
        ):
            usual = Setting(model, P, method, 0.0, 0, steps, momentum, rate, wire, warmup, decay)
            wanted += [replace(usual, density=density) for density in given.densities]
            for equal_to in given.equal_bytes:
                density = equal_density(model, P, method, wire, equal_to)
                if density is None:
                    note(f"left out: no density of {method} sends what Top-k does at {equal_to:g} ({model}, P = {P})")
                else:
                    wanted.append(replace(usual, density=density, equal_to=equal_to))
    return [replace(setting, seed=seed) for seed in range(given.seeds) for setting in dict.fromkeys(wanted)]


def in_processes(todo: list[Setting], jobs: int, advance: Advance) -> Done:
    """Train on simulated ranks, ``jobs`` trainings at a time."""
    if jobs == 1:
        for setting in todo:
            yield setting, simulate(setting, lambda: advance(1))
        return
    with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
        futures = {pool.submit(simulate, setting): setting for setting in todo}
        try:
            for future in as_completed(futures):
                advance(futures[future].steps)
                yield futures[future], future.result()
        finally:
            pool.shutdown(cancel_futures=True)


def finish(results: Results, out: str, console: Console) -> None:
    """Write the results, the tables and the plots."""
    results.write(Path(f"{out}.json"))
    made = tables(results)
    console.print(*made, sep="\n")
    with open(f"{out}.txt", "w") as file:
        for run in results.runs:
            versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            file.write(f"{run['command']}\n  on {run['machine']}; {versions}\n")
        Console(file=file, width=TABLE_WIDTH).print(*made, sep="\n")
    written = [f"{out}.json", f"{out}.txt"]
    for P in sorted({setting.ranks for setting in results.trainings} - {1}):  # one rank sends nothing
        for plot, name in ((plot_courses, f"{out}-{P}.png"), (plot_costs, f"{out}-bytes-{P}.png")):
            plot(results, P, Path(name))
            written.append(name)
    console.print(f"written: {', '.join(written)}", soft_wrap=True)


def main() -> None:
    given = arguments()
    console, out = Console(), Path(f"{given.out}.json")
    console.width = max(console.width, TABLE_WIDTH)
    if given.report:
        finish(Results.read(*given.report), given.out, console)
        return
    comm = None
    if not given.simulated:
        from mpi4py import MPI

        comm = MPI.COMM_WORLD
        if any(TASKS[model].batch % comm.size for model in given.models):
            sys.exit(f"{comm.size} ranks: expected a number of ranks that divides the batches into equal shares")
    rank = 0 if comm is None else comm.rank
    results = Results.read(out) if rank == 0 and out.exists() else Results()
    todo: list[Setting] = []
    same: dict[Setting, list[Setting]] = {}  # settings of the same training
    if rank == 0:
        for setting in settings(given, given.simulated or [comm.size if comm else 1], console.print):
            if not results.has(setting):
                same.setdefault(setting.work, []).append(setting)
        todo = list(same)
    if comm is not None:
        todo = comm.bcast(todo)
    columns = TextColumn("{task.description:<34}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    with Progress(*columns, console=console, disable=rank > 0) as progress:
        bar = progress.add_task("", total=sum(setting.steps for setting in todo))

        def advance(steps: int) -> None:
            progress.advance(bar, steps)

        done = in_processes(todo, given.jobs, advance) if comm is None else over_mpi(todo, comm, advance)
        transport = "simulated" if comm is None else MPI.Get_library_version().split(",")[0].strip()
        for number, (setting, curve) in enumerate(done):
            if rank == 0:
                progress.update(bar, description=f"{setting.model}, P = {setting.ranks}: {setting.name}")
                if number == 0:
                    launched = [] if comm is None else ["mpirun", "-n", str(comm.size)]
                    results.runs.append(about([*launched, "python", *sys.argv]))
                for each in same[setting]:
                    results.add(Training(each, recipe(each), transport, curve))
                results.write(out)
    if rank == 0:
        finish(results, given.out, console)


def over_mpi(todo: list[Setting], comm: object, advance: Advance) -> Done:
    """Train with a process per rank."""
    from mpi4py import MPI

    from sparsecomm import transport

    assert isinstance(comm, MPI.Intracomm)
    for setting in todo:
        curves = comm.allgather(train(setting, transport.transport_of(comm), lambda: advance(1)))
        yield setting, combined(setting, curves)


if __name__ == "__main__":
    main()
