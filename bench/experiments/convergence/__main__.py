"""Does training with sparse gradients reach the accuracy of training with dense ones?

    python -m bench.experiments.convergence --simulated 4 8 --jobs 2
    python -m bench.experiments.convergence --simulated 8 --densities --equal-bytes 0.01 --momentum 0.9 0
    python -m bench.experiments.convergence --report a.json b.json         # only the tables

A convolutional network learns handwritten digits, and an LSTM learns English text (`bench.experiments.tasks`), each
with dense gradients, by Top-k, and by gTop-k in several ways, from the same weights, on the same batches, for the same
number of steps, with the hyper-parameters that suit dense best. Sparse runs use a warm-up and momentum correction,
as in Deep Gradient Compression (Lin et al., ICLR 2018), and select from the whole model, as in gTop-k (Shi et al.,
ICDCS 2019).

The same density means different traffic for different methods: Top-k applies up to P d n entries per step, gTop-k d n.
With --equal-bytes each method gets the density at which it sends as many bytes per step as Top-k at D. All combinations
of options with several values are trained, and the tables show each method at its best.

Simulated ranks also count the seconds of communication on a network of 1 Gb/s, for a model of 25.6 million weights with
the same densities, without computation and selection.

The command writes OUT.json with every curve, and OUT.txt with the tables. Trainings in OUT.json are not repeated, so
you can continue an interrupted run, and combine runs with different ranks in one table.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path

from rich.console import Console

from bench import report
from bench.experiments.convergence import training
from bench.experiments.convergence.results import Results, Training
from bench.experiments.convergence.tables import tables
from bench.experiments.convergence.training import METHODS, Setting, equal_density
from bench.experiments.grid import in_processes
from bench.experiments.tasks import TASKS
from sparsecomm.tools import options as types
from sparsecomm.wire import WIRES

TABLE_WIDTH = 180
USUAL = ("dense", "allgather", "tree", "butterfly", "split")


def parse() -> argparse.Namespace:
    parser = report.parser(__doc__, prog="python -m bench.experiments.convergence")
    add = parser.add_argument
    density, count = types.number(1e-12, 1 - 1e-12, "a number between 0 and 1"), types.count
    add("--models", nargs="+", choices=TASKS, default=list(TASKS))
    add("--methods", nargs="+", choices=METHODS, default=list(USUAL))
    add("--densities", nargs="*", type=density, default=[0.01, 0.001], help="after the warm-up")
    add("--equal-bytes", nargs="+", type=density, default=[], metavar="D", help="the bytes per step of Top-k at D")
    add("--seeds", type=count, default=3, help="number of seeds, of weights and batches (3)")
    add("--steps", type=count, help="of each training, instead of the model's own number")
    add("--steps-times", nargs="+", type=count, default=[1], metavar="N", help="N times as many steps")
    add("--simulated", nargs="+", type=count, default=[4], metavar="P", help="ranks, in one process (4)")
    add("--jobs", type=count, default=1, help="runs at a time")
    add("--out", default="convergence", help="where to write, without .json")
    add("--report", nargs="+", type=Path, metavar="FILE", help="train nothing: merge these files")
    add = parser.add_argument_group("sparse runs; all combinations are trained").add_argument
    add(
        "--momentum",
        nargs="+",
        type=types.number(0, 1 - 1e-12, "a number from 0 to below 1"),
        default=[training.MOMENTUM],
    )
    add(
        "--rate",
        nargs="+",
        type=types.number(1e-12, 1e12, "a number above 0"),
        default=[1.0],
        help="factor on the task's",
    )
    add("--wire", nargs="+", choices=WIRES, default=["packed"])
    fraction = types.number(0, 0.9, "a number from 0 to 0.9")
    add("--warmup", nargs="+", type=fraction, default=[training.WARMUP], help="share of the steps")
    add("--decay", nargs="+", type=types.density, default=[1.0], help="factor on the residuals in each step")
    options = parser.parse_args()
    if options.steps is not None and options.steps < 10:
        parser.error(f"--steps {options.steps}: must be at least 10")
    if not options.densities and not options.equal_bytes and set(options.methods) != {"dense"}:
        parser.error("--densities and --equal-bytes are both empty: pass a number to one of them")
    for P in options.simulated:
        if P < 1 or any(TASKS[model].batch % P for model in options.models):
            parser.error(f"--simulated {P}: expected a number of ranks that divides the batches into equal shares")
    if not Path(options.out).absolute().parent.is_dir():
        parser.error(f"--out {options.out}: there is no such folder")
    return options


def settings(options: argparse.Namespace, note: Callable[[str], None]) -> list[Setting]:
    """Return all runs, seed by seed, so that an interrupted command has something to compare."""
    wanted = []
    for model, P, times, method in product(options.models, options.simulated, options.steps_times, options.methods):
        steps = times * (options.steps or TASKS[model].steps)
        if method == "dense":
            wanted.append(Setting(model, P, method, 1.0, 0, steps))
            continue
        for momentum, rate, wire, warmup, decay in product(
            options.momentum, options.rate, options.wire, options.warmup, options.decay
        ):
            usual = Setting(model, P, method, 0.0, 0, steps, momentum, rate, wire, warmup, decay)
            wanted += [replace(usual, density=density) for density in options.densities]
            for equal_to in options.equal_bytes:
                density = equal_density(model, P, method, wire, equal_to)
                if density is None:
                    note(
                        f"left out: {method} has no density with the bytes of Top-k at {equal_to:g} ({model}, P = {P})"
                    )
                else:
                    wanted.append(replace(usual, density=density, equal_to=equal_to))
    return [replace(setting, seed=seed) for seed in range(options.seeds) for setting in dict.fromkeys(wanted)]


def finish(results: Results, out: str, console: Console) -> None:
    """Write the results and the tables."""
    results.write(Path(f"{out}.json"))
    all_tables = tables(results)
    console.print(*all_tables, sep="\n")
    with open(f"{out}.txt", "w") as file:
        for run in results.runs:
            versions = ", ".join(f"{name} {number}" for name, number in run["versions"].items())
            file.write(f"{run['command']}\n  on {run['machine']}; {versions}\n")
        Console(file=file, width=TABLE_WIDTH).print(*all_tables, sep="\n")
    console.print(f"written: {out}.json, {out}.txt", soft_wrap=True)


def main() -> None:
    options = parse()
    console, out = Console(), Path(f"{options.out}.json")
    console.width = max(console.width, TABLE_WIDTH)
    if options.report:
        finish(Results(*options.report), options.out, console)
        return
    results = Results(*([out] if out.exists() else []))
    same: dict[Setting, list[Setting]] = {}  # settings of the same training
    for setting in settings(options, console.print):
        if not results.has(setting):
            same.setdefault(setting.work, []).append(setting)
    if same:
        run = report.about("", [])
        versions = {name: number for name, number in run["versions"].items() if number}
        command = " ".join(["python -m bench.experiments.convergence", *sys.argv[1:]])
        results.runs.append({"command": command, "machine": run["machine"], "versions": versions})
    for number, (setting, curve) in enumerate(in_processes(training.simulate, list(same), options.jobs)):
        console.print(f"{number + 1} of {len(same)}: {setting.model}, P = {setting.ranks}: {setting.name}")
        for equal in same[setting]:
            results.add(Training(equal, training.recipe(equal), curve))
        results.write(out)
    finish(results, options.out, console)


if __name__ == "__main__":
    main()
