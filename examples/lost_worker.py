"""Training by local steps that survives the loss of a rank.

    mpirun -n 4 python examples/lost_worker.py
    mpirun --with-ft ulfm -n 4 python examples/lost_worker.py --lose

A small network (64-128-10, in NumPy) learns scikit-learn's digits, on each rank a part of them. A round has ten local
steps. A rank sends 64 entries of each chunk of 4,096 of its pseudo-gradient, and the residual keeps the rest.

With ``--lose`` rank 1 is killed after some rounds, and later a new process replaces it. The program checks that the
failed exchange lost nothing of the survivors' pseudo-gradients. It requires Open MPI 5. Comments with ``# sparsecomm:``
mark the lines that use the library.
"""

from __future__ import annotations

import argparse
import os
import signal
import time
import zlib

os.environ.setdefault("OMP_NUM_THREADS", "1")  # read when NumPy is loaded: the ranks share the cores
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import numpy as np
from mpi4py import MPI

import sparsecomm as sc

parser = argparse.ArgumentParser()
parser.add_argument("--rounds", type=int, default=24)
parser.add_argument("--lose", action="store_true", help="kill rank 1 before round 8, and replace it before round 16")
arguments = parser.parse_args()
KILL, REPLACE = (8, 16) if arguments.lose else (-1, -1)
BATCH, RATE, DECAY = 32, 0.2, 0.95

train, test = slice(0, 1400), slice(1400, None)
random = np.random.default_rng(1)
parameters = {
    "w1": random.normal(scale=0.15, size=(64, 128)).astype(np.float32),
    "b1": np.zeros(128, np.float32),
    "w2": random.normal(scale=0.1, size=(128, 10)).astype(np.float32),
    "b2": np.zeros(10, np.float32),
}


def digits() -> tuple[np.ndarray, np.ndarray]:
    """Return all images in a random order, and their labels."""
    from sklearn.datasets import load_digits  # takes a while, so one rank does it for all

    pixels, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(labels))
    return (pixels[order] / 16).astype(np.float32), labels[order]


def forward(p: dict[str, np.ndarray], x: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the hidden values and the probabilities of the ten digits."""
    hidden = np.maximum(x @ p["w1"] + p["b1"], 0)
    scores = hidden @ p["w2"] + p["b2"]
    scores = np.exp(scores - scores.max(1, keepdims=True))
    return hidden, scores / scores.sum(1, keepdims=True)


def local_step(p: dict[str, np.ndarray], seed: tuple[int, ...], rank: int, size: int) -> None:
    """A step of plain gradient descent, in place, on a batch of this rank's digits."""
    mine = np.arange(train.start + rank, train.stop, size)
    batch = np.random.default_rng(seed).choice(mine, BATCH)
    x, (hidden, error) = pixels[batch], forward(p, pixels[batch])
    error[np.arange(BATCH), labels[batch]] -= 1
    error /= BATCH
    back = (error @ p["w2"].T) * (hidden > 0)
    for name, gradient in {"w1": x.T @ back, "b1": back.sum(0), "w2": hidden.T @ error, "b2": error.sum(0)}.items():
        p[name] -= RATE * gradient


def waiting() -> dict[str, np.ndarray]:
    """Return the residuals of this rank after an exchange that fails now."""
    before = local.global_parameters()
    residuals = {name: local.reducers[0].residual(name) for name in parameters}
    return {name: np.float32(DECAY) * residuals[name] + (before[name] - parameters[name]) for name in parameters}


def say(text: str) -> None:
    print(f"rank {comm.Get_rank()}: {text}\n", end="", flush=True)


# sparsecomm: the global parameters begin as copies of these. The arrays are the local ones, and are written in place.
local = sc.LocalSteps(parameters, 64 / 4096, sync_every=10, decay=DECAY)

# sparsecomm: a process that `grow` has started joins those who started it, and gets all from them.
larger = sc.join()
comm = larger or MPI.COMM_WORLD
new = larger is not None
if new:
    say(str(local.rebuild(comm, parameters, joining=True)))
pixels, labels = comm.bcast(digits() if not new and comm.Get_rank() == 0 else None)

while local.round < arguments.rounds:
    if local.local_step == 0 and not new:
        if local.round == KILL and MPI.COMM_WORLD.Get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if local.round == REPLACE and comm.Get_size() < MPI.COMM_WORLD.Get_size():
            # sparsecomm: another process for the one that was lost.
            comm = sc.grow(comm)
            say(str(local.rebuild(comm, parameters)))
            comm.bcast((pixels, labels))
    local_step(parameters, (local.round, local.local_step, comm.Get_rank()), comm.Get_rank(), comm.Get_size())
    expected = waiting() if local.round == KILL else {}
    try:
        # sparsecomm: counts the local step; after the tenth it exchanges, and sets the parameters to the global ones.
        local.step(parameters)
    except sc.RankFailedError as error:
        # sparsecomm: all survivors raise in the same local step, agree on the surviving ranks, and continue.
        seen = time.perf_counter()
        comm = sc.shrink(comm)
        rebuilt = local.rebuild(comm, parameters)
        seconds = time.perf_counter() - seen
        say(f"{error}\nrank {comm.Get_rank()}: {rebuilt}")
        residuals = {name: local.reducers[0].residual(name) for name in parameters}
        equal = comm.allreduce(all(np.array_equal(residuals[name], expected[name]) for name in parameters), MPI.LAND)
        total, before = (
            comm.allreduce(sum(a.sum(dtype="f8") for a in arrays.values())) for arrays in (residuals, expected)
        )
        say(
            f"the survivors have lost {'nothing' if equal else 'SOMETHING'}: their residuals add up to {total:.6f}; "
            f"expected {before:.6f}; the next local step comes {seconds:.3f} s after the error"
        )

model = local.global_parameters()
accuracy = (forward(model, pixels[test])[1].argmax(1) == labels[test]).mean()
checksum = zlib.crc32(b"".join(values.tobytes() for values in model.values()))
counters = local.reducers[0].counters
sent = counters.bytes_sent / max(1, counters.steps)
dense = 8 * sum(values.size for values in model.values()) * (1 - 1 / comm.Get_size())
say(
    f"of {comm.Get_size()}: {local.round} rounds, accuracy {accuracy:.1%}, global parameters {checksum:08x}; sent "
    f"{sent / 1e3:.1f} kB in a round; a dense sum in each local step would send {10 * dense / 1e3:.0f} kB"
)

if arguments.lose:
    signal.alarm(10)  # now and then Open MPI's MPI_Finalize waits for ever where a rank has died
