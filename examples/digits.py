"""Handwritten digits on several ranks: dense gradients against sparse ones, from the same initial weights.

    mpirun -n 4 python examples/digits.py

A small network (64-128-64-10, in NumPy) learns scikit-learn's 1,797 digits three times. Every rank computes the
gradient of its share of each batch; `sparsecomm.sparse_allreduce` averages them: the whole gradients (Dense), every
rank's top 1 % (Top-k), or about the top 1 % of their sum (gTop-k). What is not applied waits in the residual, and is
added to the next gradient.

All three runs use the same plain recipe: a fixed learning rate, momentum on the averaged gradient, no warm-up. The
momentum is 0.5. With 0.9 and a fifth of the learning rate the sparse runs reach the same accuracy, but they stumble
in the first ten epochs, since what comes late out of a residual is then pushed on for many steps.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import sys
import time
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

if missing := [name for name in ("sklearn", "matplotlib", "rich") if importlib.util.find_spec(name) is None]:
    sys.exit(f"This example needs {', '.join(missing)}: pip install scikit-learn matplotlib rich")

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when NumPy is loaded: the ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI
from numpy.typing import NDArray
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

import sparsecomm as sc
from sparsecomm import transport
from sparsecomm.quantities import bytes_text

Array = NDArray[np.float32]
Labels = NDArray[np.int64]

LAYERS = (64, 128, 64, 10)
DENSITY = 0.01
BATCH = 128  # of all ranks together
LEARNING_RATE = 0.1
MOMENTUM = 0.5
RUNS = {"Dense": "dense", "Top-k": "allgather", "gTop-k": "butterfly"}
COLOURS = {"Dense": "#4d4d4d", "Top-k": "#0072b2", "gTop-k": "#d55e00"}

CALL = """\
import sparsecomm as sc
residual = np.zeros_like(gradient)  # once; then in every step:
sc.sparse_allreduce(gradient, 0.01, op="mean", residual=residual, out=gradient)
weights -= learning_rate * gradient"""

comm = MPI.COMM_WORLD
rank, ranks = comm.Get_rank(), comm.Get_size()
RANKS = f"{ranks} rank{'s' * (ranks > 1)}"


class Network:
    """Layers of ReLU and a softmax. Weights and gradient are flat vectors, of which the layers are views."""

    def __init__(self, seed: int = 0) -> None:
        shapes = [s for fan_in, fan_out in pairwise(LAYERS) for s in ((fan_in, fan_out), (fan_out,))]
        offsets = np.cumsum([0, *(np.prod(s) for s in shapes)])
        self.weights = np.zeros(offsets[-1], np.float32)
        self.gradient = np.zeros_like(self.weights)
        views = [
            [flat[a:b].reshape(s) for (a, b), s in zip(pairwise(offsets), shapes, strict=True)]
            for flat in (self.weights, self.gradient)
        ]
        self.matrices, self.biases = views[0][::2], views[0][1::2]
        self.matrix_gradients, self.bias_gradients = views[1][::2], views[1][1::2]
        rng = np.random.default_rng(seed)
        for matrix in self.matrices:
            matrix[:] = rng.standard_normal(matrix.shape) * np.sqrt(2 / len(matrix))

    def forward(self, x: Array) -> list[Array]:
        """Return the input, the output of each hidden layer, and the logarithms of the probabilities."""
        values = [x]
        for matrix, bias in zip(self.matrices, self.biases, strict=True):
            values.append(np.maximum(values[-1] @ matrix + bias, 0))
        scores = values[-2] @ self.matrices[-1] + self.biases[-1]
        scores -= scores.max(1, keepdims=True)
        values[-1] = scores - np.log(np.exp(scores).sum(1, keepdims=True))
        return values

    def backward(self, x: Array, labels: Labels) -> None:
        """Fill `gradient` with that of the mean cross-entropy."""
        values = self.forward(x)
        delta = np.exp(values[-1])
        delta[np.arange(len(labels)), labels] -= 1
        delta /= len(labels)
        for i in reversed(range(len(self.matrices))):
            self.matrix_gradients[i][:] = values[i].T @ delta
            self.bias_gradients[i][:] = delta.sum(0)
            delta = (delta @ self.matrices[i].T) * (values[i] > 0)

    def loss(self, x: Array, labels: Labels) -> float:
        return -float(self.forward(x)[-1][np.arange(len(labels)), labels].mean())

    def accuracy(self, x: Array, labels: Labels) -> float:
        return float((self.forward(x)[-1].argmax(1) == labels).mean())


@dataclass
class Run:
    """The results of one training."""

    steps: list[int] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # on the whole training set
    sent: list[int] = field(default_factory=list)  # bytes sent by then, by the rank that sends most
    seconds: list[float] = field(default_factory=list)  # of each step
    accuracy: float = 0.0


def train(algorithm: str, epochs: int, progress: Progress, label: str) -> Run:
    x, x_test, labels, labels_test = data()
    network, run = Network(), Run()
    weights, gradient = network.weights, network.gradient
    residual, velocity = np.zeros_like(weights), np.zeros_like(weights)
    counters = transport.transport_of(comm).counters
    sent_before = counters.bytes_sent
    own = max(1, BATCH // ranks)  # samples of each batch on each rank
    batches = max(1, len(x) // (own * ranks))
    rng = np.random.default_rng(1)  # the same batches on all ranks, and in all runs
    bar = progress.add_task(label, total=epochs * batches)

    for _ in range(epochs):
        order = rng.permutation(len(x))
        for batch in range(batches):
            start = time.perf_counter()
            mine = order[batch * own * ranks :][rank * own : (rank + 1) * own]
            network.backward(x[mine], labels[mine])
            sc.sparse_allreduce(
                gradient, DENSITY, comm=comm, algorithm=algorithm, op="mean", residual=residual, out=gradient
            )
            velocity *= MOMENTUM
            velocity += gradient
            weights -= LEARNING_RATE * velocity
            run.seconds.append(time.perf_counter() - start)
            progress.advance(bar)
            if len(run.seconds) % 5 == 1 or len(run.seconds) == epochs * batches:
                run.steps.append(len(run.seconds))
                run.losses.append(network.loss(x, labels))
                run.sent.append(counters.bytes_sent - sent_before)

    run.sent = [max(of_ranks) for of_ranks in zip(*comm.allgather(run.sent), strict=True)]
    run.accuracy = network.accuracy(x_test, labels_test)
    everyone = comm.allgather(weights.tobytes())
    assert all(bits == everyone[0] for bits in everyone), "the ranks' weights differ"
    return run


def data() -> tuple[Array, Array, Labels, Labels]:
    """Return images and labels to train with and to test with: x, x_test, labels, labels_test."""
    x, labels = load_digits(return_X_y=True)
    split = train_test_split((x / 16).astype(np.float32), labels, test_size=0.2, random_state=0, stratify=labels)
    return split[0], split[1], split[2], split[3]


def table(runs: dict[str, Run]) -> Table:
    entries = max(1, round(DENSITY * len(Network().weights)))
    made = Table(title=f"{RANKS}, {len(Network().weights):,} weights, top {entries} of them per step (1 %)")
    made.add_column("gradients", style="bold")
    made.caption = "Between ranks of one machine the time says little of a network."
    for column in ("test accuracy", "sent per rank", "of dense", "time per step"):
        made.add_column(column, justify="right")
    dense = runs["Dense"].sent[-1]
    for label, run in runs.items():
        sent = run.sent[-1]
        fraction = f"{sent / dense:.1%}" if dense else "-"
        step = f"{1e3 * float(np.median(run.seconds)):.2f} ms"
        made.add_row(label, f"{run.accuracy:.1%}", bytes_text(sent), fraction, step)
    return made


def plot(runs: dict[str, Run], path: Path) -> None:
    import matplotlib as mpl

    mpl.use("Agg")  # no display is needed
    from matplotlib import pyplot as plt
    from matplotlib.ticker import FuncFormatter

    plt.rcParams.update({"font.size": 11, "axes.spines.top": False, "axes.spines.right": False, "axes.axisbelow": True})
    figure, (by_step, by_bytes) = plt.subplots(1, 2, figsize=(11, 4.8), sharey=True, layout="constrained")
    for label, run in runs.items():
        by_step.plot(run.steps, run.losses, color=COLOURS[label], linewidth=1.8, label=label)
        if ranks > 1:
            total = f"{label}, {bytes_text(run.sent[-1])}"
            by_bytes.plot(run.sent, run.losses, color=COLOURS[label], linewidth=1.8, label=total)
    for axes in (by_step, by_bytes):
        axes.set_yscale("log")
        axes.grid(color="0.9")
    by_step.yaxis.set_major_formatter(FuncFormatter(lambda loss, _: f"{loss:g}"))
    by_step.set(title="Loss by step", xlabel="steps", ylabel="training loss (cross-entropy)")
    by_step.set_xlim(left=0)
    by_step.legend(frameon=False)
    by_bytes.set(title="Loss by bytes sent", xlabel="sent per rank")
    if ranks > 1:
        by_bytes.set_xscale("log")
        by_bytes.legend(frameon=False, loc="lower left")
        by_bytes.xaxis.set_major_formatter(FuncFormatter(lambda nbytes, _: bytes_text(nbytes)))
    else:
        by_bytes.text(0.5, 0.5, "one rank sends nothing", transform=by_bytes.transAxes, ha="center", color="0.4")
        by_bytes.set_xticks([])
    figure.suptitle(f"Digits on {RANKS}: dense gradients, and {DENSITY:.0%} of them", fontsize=13)
    figure.savefig(path, dpi=150)


def output_is_shown() -> bool:
    """Return whether standard output reaches a terminal, under mpirun that of mpirun.

    A rank's own may be a terminal that mpirun has made (Open MPI), also where mpirun's own output goes to a file.
    """
    process = os.getppid()
    while process > 1:
        folder = Path(f"/proc/{process}")
        try:
            if (folder / "comm").read_text().strip() in ("mpirun", "mpiexec", "prterun", "orterun", "mpiexec.hydra"):
                return os.readlink(folder / "fd" / "1").startswith(("/dev/pts/", "/dev/tty", "/dev/console"))
            parent = re.search(r"^PPid:\s*(\d+)", (folder / "status").read_text(), re.MULTILINE)
        except OSError:  # it has ended, it is another user's, or this is not Linux
            break
        process = int(parent[1]) if parent else 0
    return sys.stdout.isatty()


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a small network with dense and with sparse gradients.")
    parser.add_argument("--epochs", type=int, default=60, help="passes over the training set (default 60)")
    parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where to write the plot")
    arguments = parser.parse_args()

    console = Console(quiet=rank > 0, force_terminal=output_is_shown())
    if ranks == 1:
        console.print("One rank only, so nothing is sent. Try: mpirun -n 4 python examples/digits.py")
    columns = (TextColumn("{task.description:<7}"), BarColumn(), MofNCompleteColumn(), TextColumn("steps"))
    with Progress(*columns, console=console) as progress:
        runs = {label: train(algorithm, arguments.epochs, progress, label) for label, algorithm in RUNS.items()}
    if rank > 0:
        return

    console.print(table(runs))
    console.print("All ranks hold the same weights, bit for bit.\n")
    plot(runs, arguments.plot)
    console.print("In your own program:", style="bold")
    console.print(CALL + "\n", markup=False, highlight=False, soft_wrap=True)
    console.print(f"The plot is in {arguments.plot.resolve()}", soft_wrap=True, markup=False)


if __name__ == "__main__":
    main()
