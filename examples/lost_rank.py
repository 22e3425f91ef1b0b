"""A training that continues when a rank dies.

    mpirun --with-ft ulfm -n 4 python examples/lost_rank.py

A linear classifier learns ten clouds of points. In epoch 3, rank 1 is killed. The other ranks agree on who survives,
and continue without a checkpoint. Before epoch 6, a new process replaces the lost one, and receives weights, epoch and
the state of the `Reducer` from them. Comments with ``# sparsecomm:`` mark the lines for this. Requires Open MPI 5.
"""

from __future__ import annotations

import argparse
import os
import signal
import zlib

import numpy as np
from mpi4py import MPI

import sparsecomm as sc

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=9)
parser.add_argument("--kill", type=int, default=3, help="epoch in which rank 1 dies; -1: never")
parser.add_argument("--replace", type=int, default=6, help="epoch before which a new process joins; -1: never")
arguments = parser.parse_args()

CLASSES, FEATURES, BATCH, STEPS = 10, 200, 16, 20
centres = np.random.default_rng(0).normal(size=(CLASSES, FEATURES)).astype(np.float32)
weights = {"w": np.zeros((FEATURES, CLASSES), np.float32), "b": np.zeros(CLASSES, np.float32)}
reducer = sc.Reducer(weights, 0.05, momentum=0.9, dense_below=100)
epoch = 0


def points(*seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Return a batch of noisy points, and their classes."""
    random = np.random.default_rng(seed)
    labels = random.integers(0, CLASSES, BATCH)
    return (centres[labels] + 4 * random.normal(size=(BATCH, FEATURES))).astype(np.float32), labels


def gradients(x: np.ndarray, labels: np.ndarray) -> dict[str, np.ndarray]:
    """Return the gradients of the cross-entropy."""
    scores = x @ weights["w"] + weights["b"]
    p = np.exp(scores - scores.max(1, keepdims=True))
    p /= p.sum(1, keepdims=True)
    p[np.arange(len(x)), labels] -= 1
    return {"w": x.T @ p / len(x), "b": p.mean(0)}


def catch_up(joining: bool) -> None:
    """Bring a new rank to the state of the others."""
    global epoch
    rebuilt = reducer.rebuild(comm, joining=joining)
    epoch = comm.bcast(epoch)
    for values in weights.values():
        comm.Bcast(values)
    print(f"rank {comm.Get_rank()}: {rebuilt}\n", end="", flush=True)


# sparsecomm: in a process that `grow` has started, `join` returns a communicator with the other ranks.
larger = sc.join()
comm = larger or MPI.COMM_WORLD
new = larger is not None
if new:
    catch_up(joining=True)
while epoch < arguments.epochs:
    # sparsecomm: start a process in place of the lost one.
    if epoch == arguments.replace and not new and comm.Get_size() < MPI.COMM_WORLD.Get_size():
        comm = sc.grow(comm)
        catch_up(joining=False)
    for step in range(STEPS):
        if (epoch, step) == (arguments.kill, STEPS // 2) and not new and MPI.COMM_WORLD.Get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        means = gradients(*points(epoch, step, comm.Get_rank()))
        try:
            reducer.reduce(means)
        except sc.RankFailedError as error:
            # sparsecomm: all survivors raise in the same step. They agree on who survives and continue. They apply the
            # sums of the failed step that all have received; the residuals store the rest.
            print(f"rank {comm.Get_rank()}: {error}\n", end="", flush=True)
            comm = sc.shrink(comm)
            print(f"now rank {comm.Get_rank()}: {reducer.rebuild(comm)}\n", end="", flush=True)
            means |= {name: np.zeros_like(weights[name]) for name in reducer.unsummed}
        for name, mean in means.items():
            weights[name] -= 0.05 * mean
    epoch += 1

tests = [points(arguments.epochs, step, 0) for step in range(50)]
accuracy = np.mean([(x @ weights["w"] + weights["b"]).argmax(1) == labels for x, labels in tests])
checksum = zlib.crc32(b"".join(values.tobytes() for values in weights.values()))
who = f"rank {comm.Get_rank()} of {comm.Get_size()}"
print(f"{who}: {reducer.step} steps, accuracy {accuracy:.1%}, weights {checksum:08x}\n", end="", flush=True)

signal.alarm(10)  # MPI_Finalize of Open MPI sometimes hangs after a rank has died
