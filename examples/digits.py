"""Handwritten digits on several ranks: dense gradients against sparse ones, from the same initial weights.

    mpirun -n 4 python examples/digits.py

A small network (64-128-10, in NumPy) learns scikit-learn's digits three times. Every rank computes the gradient of its
part of each batch, and `sparsecomm.sparse_allreduce` averages the gradients: all entries (Dense), each rank's top 1 %
(Top-k), or the top 1 % of the sum (gTop-k). The residual stores the remaining entries for the next steps.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when NumPy is imported; the ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MPLBACKEND", "Agg")  # write the plot to a file

try:
    import matplotlib.pyplot as plt
    import numpy as np
    from mpi4py import MPI
    from sklearn.datasets import load_digits
except ImportError as error:
    sys.exit(f"This example needs {error.name}: pip install scikit-learn matplotlib")

import sparsecomm as sc
from sparsecomm import transport

BATCH, LEARNING_RATE, MOMENTUM = 128, 0.1, 0.5
MEAN_OF = 20  # steps, in the plot
RUNS = {"Dense": "dense", "Top-k": "allgather", "gTop-k": "butterfly"}
SHAPES = (64, 128), (128,), (128, 10), (10,)
CALL = """\
import numpy as np
import sparsecomm as sc

residual = np.zeros_like(gradient)  # once; then in every step:
sc.sparse_allreduce(gradient, 0.01, op="mean", residual=residual, out=gradient)
weights -= learning_rate * gradient"""

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=60)
parser.add_argument("--plot", type=Path, default=Path("digits.png"), help="where to write the plot")
arguments = parser.parse_args()
comm, rank, ranks = MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size()

images, labels = load_digits(return_X_y=True)
images, test = (images / 16).astype(np.float32), np.arange(len(images)) % 5 == 0
sizes = [int(np.prod(shape)) for shape in SHAPES]


def layers(flat: np.ndarray) -> list[np.ndarray]:
    """Return views of a flat vector: the matrix and the bias of each layer."""
    parts = np.split(flat, np.cumsum(sizes)[:-1])
    return [part.reshape(shape) for part, shape in zip(parts, SHAPES, strict=True)]


def forward(weights: np.ndarray, x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden values and the probabilities of the ten digits."""
    w1, b1, w2, b2 = layers(weights)
    hidden = np.maximum(x @ w1 + b1, 0)
    scores = np.exp((scores := hidden @ w2 + b2) - scores.max(1, keepdims=True))
    return hidden, scores / scores.sum(1, keepdims=True)


def train(algorithm: str) -> tuple[float, list[int], list[float]]:
    """Return the test accuracy and, by step, the bytes that this rank sent and the loss on its batch."""
    random = np.random.default_rng(0)  # the same weights and batches on all ranks and in all runs
    weights = np.concatenate([random.standard_normal(n) / 8 for n in sizes]).astype(np.float32)
    gradient, residual, velocity = (np.zeros_like(weights) for _ in range(3))
    counters, sent, losses = transport.transport_of(comm).counters, [], []
    before = counters.bytes_sent
    for _ in range(arguments.epochs * (~test).sum() // BATCH):
        batch = random.choice(np.flatnonzero(~test), BATCH)[rank::ranks]
        x, (hidden, error) = images[batch], forward(weights, images[batch])
        losses.append(-float(np.log(error[np.arange(len(batch)), labels[batch]] + 1e-9).mean()))
        error[np.arange(len(batch)), labels[batch]] -= 1
        error /= len(batch)
        back = (error @ layers(weights)[2].T) * (hidden > 0)
        gradient[:] = np.concatenate([g.ravel() for g in (x.T @ back, back.sum(0), hidden.T @ error, error.sum(0))])
        sc.sparse_allreduce(gradient, 0.01, algorithm=algorithm, op="mean", residual=residual, out=gradient)
        velocity = MOMENTUM * velocity + gradient
        weights -= LEARNING_RATE * velocity
        sent.append(counters.bytes_sent - before)
    assert len(set(comm.allgather(weights.tobytes()))) == 1, "the ranks' weights differ"
    return float((forward(weights, images[test])[1].argmax(1) == labels[test]).mean()), sent, losses


results = {name: train(algorithm) for name, algorithm in RUNS.items()}
if rank == 0:
    print(f"{ranks} rank(s), {sum(sizes):,} weights, 1 % of them in each step (by default, SparseAdamW selects 9 %)\n")
    for name, (accuracy, sent, _) in results.items():
        fraction = f"{sent[-1] / results['Dense'][1][-1]:.1%} of dense" if ranks > 1 else "try mpirun -n 4"
        print(f"{name:<8} test accuracy {accuracy:.1%}, sent per rank {sent[-1] / 1e6:.2f} MB ({fraction})")
    print(f"\nAll ranks hold the same weights, bit for bit. In your own program:\n\n{CALL}\n")
    for name, (_, sent, losses) in results.items():
        count = min(MEAN_OF, len(losses))
        plt.plot(np.array(sent[count - 1 :]) / 1e6, np.convolve(losses, np.full(count, 1 / count), "valid"), label=name)
    plt.gca().set(xscale="log", yscale="log", xlabel="MB sent by rank 0", ylabel=f"loss, mean of {MEAN_OF} steps")
    plt.gca().xaxis.set_major_formatter("{x:g}")
    plt.gca().yaxis.set_major_formatter("{x:g}")
    plt.legend()
    plt.savefig(arguments.plot, dpi=150)
    print(f"The plot is in {arguments.plot.resolve()}")
