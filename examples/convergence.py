"""Does training with sparse gradients reach what it reaches with dense ones?

    mpirun -n 4 python examples/convergence.py                    # each rank a process
    python examples/convergence.py --simulated 4 8 --jobs 2       # the same bits, all ranks in one process
    python examples/convergence.py --report a.json b.json         # only the table and the plots

A convolutional network learns handwritten digits, an LSTM learns English text (`convergence_tasks.py`); each with
dense gradients, by Top-k, and by gTop-k in three ways (`convergence_training.py`), from the same weights, on the same
batches, for as many steps, with the hyper-parameters that suit dense best. Sparse trainings warm up, and have momentum
correction, as in Deep Gradient Compression (Lin et al., ICLR 2018); the selection is from the whole model, as in gTop-k
(Shi et al., ICDCS 2019).

Written are OUT.json with every curve, OUT.txt with the table, and a plot OUT-P.png for each number of ranks P.
Trainings that OUT.json has already are not repeated, so that an interrupted run goes on, and runs with other ranks
make one table.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path

if missing := [n for n in ("torch", "sklearn", "matplotlib", "rich") if importlib.util.find_spec(n) is None]:
    sys.exit(f"This example needs {', '.join(missing)}: pip install 'sparsecomm[demo,torch]'")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the ranks share the cores
os.environ.setdefault("SPARSECOMM_THREADS", "1")

from convergence_results import Results, Training, about, plot, table
from convergence_tasks import TASKS
from convergence_training import METHODS, MOMENTUM, Curve, Setting, combined, recipe, simulate, train
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

TABLE_WIDTH = 130
USUAL = ("dense", "allgather", "tree", "butterfly", "split")
Done = Iterator[tuple[Setting, Curve]]
Advance = Callable[[int], None]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Train two models with dense and with sparse gradients.")
    parser.add_argument("--models", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(USUAL))
    parser.add_argument("--densities", nargs="+", type=float, default=[0.01, 0.001], help="after the warm-up")
    parser.add_argument("--momentum", type=float, default=MOMENTUM, help="of sparse trainings; dense ones keep theirs")
    parser.add_argument("--seeds", type=int, default=3, help="how many: of weights and batches")
    parser.add_argument("--steps", type=int, help="of each training, in place of each model's own number")
    parser.add_argument("--simulated", nargs="+", type=int, metavar="P", help="simulate P ranks in one process")
    parser.add_argument("--jobs", type=int, default=1, help="trainings at a time, with --simulated")
    parser.add_argument("--out", default="convergence", help="where to write, without .json")
    parser.add_argument("--report", nargs="+", type=Path, metavar="FILE", help="train nothing: merge these files")
    given = parser.parse_args()
    for name, minimum in (("seeds", 1), ("jobs", 1), ("steps", 10)):
        if (number := getattr(given, name)) is not None and number < minimum:
            parser.error(f"--{name} {number}: expected {minimum} or more")
    if any(not 0 < density < 1 for density in given.densities):
        parser.error(f"--densities {given.densities}: expected numbers between 0 and 1")
    if not 0 <= given.momentum < 1:
        parser.error(f"--momentum {given.momentum}: expected a number from 0 to below 1")
    for P in given.simulated or ():
        if P < 1 or any(TASKS[model].batch % P for model in given.models):
            parser.error(f"--simulated {P}: expected a number of ranks that divides the batches into equal shares")
    if given.simulated and importlib.util.find_spec("greenlet") is None:
        parser.error("--simulated needs greenlet: pip install 'sparsecomm[simulated]'")
    if not Path(given.out).absolute().parent.is_dir():
        parser.error(f"--out {given.out}: there is no such folder")
    return given


def settings(given: argparse.Namespace, ranks: list[int]) -> list[Setting]:
    """Return all trainings, with whole seeds first, so that an interrupted run has something to compare."""
    return [
        Setting(
            model,
            P,
            method,
            density,
            seed,
            given.steps or TASKS[model].steps,
            MOMENTUM if method == "dense" else given.momentum,
        )
        for seed in range(given.seeds)
        for model in given.models
        for P in ranks
        for method in given.methods
        for density in ([1.0] if method == "dense" else given.densities)
    ]


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
    """Write the results, the table and the plots."""
    results.write(Path(f"{out}.json"))
    made = table(results)
    console.print(made)
    with open(f"{out}.txt", "w") as file:
        for run in results.runs:
            versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            file.write(f"{run['command']}\n  on {run['machine']}; {versions}\n")
        Console(file=file, width=TABLE_WIDTH).print(made)
    written = [f"{out}.json", f"{out}.txt"]
    for P in sorted({setting.ranks for setting in results.trainings}):
        written.append(f"{out}-{P}.png")
        plot(results, P, Path(written[-1]))
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
    todo = [s for s in settings(given, given.simulated or [comm.size if comm else 1]) if not results.has(s)]
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
                results.add(Training(setting, recipe(setting), transport, curve))
                results.write(out)
    if rank == 0:
        finish(results, given.out, console)


def over_mpi(todo: list[Setting], comm: object, advance: Advance) -> Done:
    """Train with a process per rank."""
    from mpi4py import MPI

    from sparsecomm import transport

    assert isinstance(comm, MPI.Intracomm)
    for setting in todo:
        curves = comm.allgather(train(setting, transport.of(comm), lambda: advance(1)))
        yield setting, combined(setting, curves)


if __name__ == "__main__":
    main()
