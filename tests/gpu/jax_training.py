"""Steps of JAX under jit with arrays on a GPU, run by each rank: see `test_training.py`."""

from __future__ import annotations

import hashlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from mpi4py import MPI

import sparsecomm as sc


def main() -> None:
    comm, parameters = MPI.COMM_WORLD, {"w": jnp.ones((300, 300)), "b": jnp.zeros(300)}
    if next(iter(parameters["w"].devices())).platform != "gpu":
        print("JAX finds no GPU", flush=True)
        return
    sparse = optax.chain(sc.jax.sparsify(1.0, comm=comm), optax.sgd(0.1))
    for optimizer in (sparse, optax.chain(sc.jax.sparsify(0.1, comm=comm), optax.sgd(0.1))):
        digests = comm.allgather(hashlib.sha256(trained(optimizer, parameters, comm.rank)).hexdigest())
        assert len(set(digests)) == 1, "the weights of ranks differ"
    # A step at density 1.0 is the mean of the steps that ranks would make alone.
    alone = comm.allgather(trained(optax.sgd(0.1), parameters, comm.rank, 1))
    mean = np.mean([np.frombuffer(weights, np.float32) for weights in alone], axis=0)
    together = np.frombuffer(trained(sparse, parameters, comm.rank, 1), np.float32)
    np.testing.assert_allclose(together, mean, rtol=1e-5, atol=1e-6)
    print(f"rank {comm.rank}: a step under jit", flush=True)


def trained(optimizer: Any, parameters: Any, rank: int, steps: int = 10) -> bytes:
    """Return the bytes of the weights after some steps on the data of ``rank``."""
    state = optimizer.init(parameters)

    def loss(parameters: Any, x: Any) -> Any:
        return ((x @ parameters["w"] + parameters["b"]) ** 2).mean()

    @jax.jit
    def step(parameters: Any, state: Any, x: Any) -> Any:
        updates, state = optimizer.update(jax.grad(loss)(parameters, x), state, parameters)
        return optax.apply_updates(parameters, updates), state

    for i in range(steps):
        parameters, state = step(parameters, state, jax.random.normal(jax.random.key(100 * rank + i), (8, 300)))
    jax.effects_barrier()
    return np.asarray(parameters["w"]).tobytes()


if __name__ == "__main__":
    main()
