"""Handwritten digits with JAX and optax on several ranks, with sparse gradients and a checkpoint.

    mpirun -n 4 python examples/jax_optax.py

Every rank computes the gradient of its part of each batch; `sparsecomm.jax.sparsify`, the first link of the optax
chain, averages about the largest 10 % of the entries. The whole step is under `jax.jit`. Half way, every rank saves its
``(params, state)`` and continues from its file, as after a restart.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import tempfile
from typing import Any

if missing := [name for name in ("jax", "optax", "sklearn") if importlib.util.find_spec(name) is None]:
    sys.exit(f"This example needs {', '.join(missing)}: pip install jax optax scikit-learn")

os.environ.setdefault("JAX_PLATFORMS", "cpu")

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI
from sklearn.datasets import load_digits

import sparsecomm as sc
from sparsecomm import transport

LAYERS = (64, 128, 64, 10)
BATCH, EPOCHS = 128, 30  # samples of all ranks together, passes over the training set
comm = MPI.COMM_WORLD
rank, ranks = comm.Get_rank(), comm.Get_size()

optimizer = optax.chain(sc.jax.sparsify(0.1, comm=comm), optax.sgd(0.1, momentum=0.5))


def initial() -> Any:
    keys = jax.random.split(jax.random.key(0), len(LAYERS) - 1)  # the same on all ranks
    sizes = zip(keys, LAYERS[:-1], LAYERS[1:], strict=True)
    return [{"w": jax.random.normal(key, (a, b)) * (2 / a) ** 0.5, "b": jnp.zeros(b)} for key, a, b in sizes]


def scores(params: Any, x: jax.Array) -> jax.Array:
    for layer in params[:-1]:
        x = jax.nn.relu(x @ layer["w"] + layer["b"])
    return x @ params[-1]["w"] + params[-1]["b"]


def loss(params: Any, x: jax.Array, labels: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(scores(params, x), labels).mean()


@jax.jit
def step(params: Any, state: Any, x: jax.Array, labels: jax.Array) -> tuple[Any, Any]:
    updates, state = optimizer.update(jax.grad(loss)(params, x, labels), state, params)
    return optax.apply_updates(params, updates), state


def main() -> None:
    x, labels = load_digits(return_X_y=True)
    x, order = (x / 16).astype(np.float32), np.random.default_rng(0).permutation(len(x))
    train, test = order[:1437], order[1437:]
    own = max(1, BATCH // ranks)  # samples of each batch on each rank
    params = initial()
    state = optimizer.init(params)
    rng = np.random.default_rng(1)  # the same batches on all ranks

    for epoch in range(EPOCHS):
        shuffled = rng.permutation(train)
        for begin in range(0, len(train) - own * ranks + 1, own * ranks):
            mine = shuffled[begin + rank * own : begin + (rank + 1) * own]
            params, state = step(params, state, x[mine], labels[mine])
        if epoch == EPOCHS // 2:
            jax.effects_barrier()  # before this thread uses the communicator
            with tempfile.TemporaryDirectory() as folder:
                sc.save(folder, epoch, {"params": params, "state": state}, comm=comm)
                checkpoint = sc.load(folder, {"params": None, "state": None}, comm=comm)
            assert checkpoint is not None
            leaves = jax.tree.leaves((checkpoint.values["params"], checkpoint.values["state"]))
            params, state = jax.tree.unflatten(jax.tree.structure((params, state)), leaves)

    jax.effects_barrier()  # before this thread uses the communicator
    everyone = comm.allgather(b"".join(leaf.tobytes() for leaf in jax.tree.leaves(jax.device_get(params))))
    assert all(bits == everyone[0] for bits in everyone), "the ranks' weights differ"
    if rank == 0:
        accuracy = float((scores(params, x[test]).argmax(1) == labels[test]).mean())
        steps, size = int(state[0].step), len(everyone[0]) // 4
        sent = transport.transport_of(comm).counters.bytes_sent / steps / 1e3
        dense = 2 * (ranks - 1) / ranks * size * 4 / 1e3
        print(f"{ranks} rank(s), {steps} steps, {size:,} weights: test accuracy {accuracy:.1%}")
        print(f"sent per step: {sent:.1f} kB; a dense allreduce would send {dense:.1f} kB")


if __name__ == "__main__":
    main()
