"""Sparse allreduce for JAX. Functions take residuals as arguments and return new ones.

    import optax
    import sparsecomm.jax

    optimizer = optax.chain(sparsecomm.jax.sparsify(), optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

`sparse_adamw` replaces ``optax.adamw``. `sparsify` averages gradients in an optax chain that ends with SGD.
`allreduce_tree` averages gradients without optax, and `sparse_allreduce` sums one array. All work eagerly and under
`jax.jit`, in `jax.lax.scan`, `fori_loop` and `while_loop`, and in a branch of `jax.lax.cond` that all ranks take.
`LocalSteps` is called from Python.

**Ranks.** A rank is one process with one device. Start the ranks with ``mpirun``; `jax.distributed` is not needed.
Arrays that are sharded over devices, `jax.shard_map`, `jax.pmap`, `jax.vmap` and derivatives are not supported.

**Under jit** the exchange of a whole tree is one ordered callback, so that all ranks make the same calls in the same
order. XLA may run it on another thread: call `jax.effects_barrier()` before you use the same communicator yourself.
Eager calls of this module do so. Ctrl-C takes effect when the call has ended.

**Copies.** On a CPU, an array is read in place. Residuals, several leaves that share a call, and results under jit are
copied once. On a GPU, eager calls stay in device memory (by DLPack, with CuPy), and calls under jit copy to the host.
`sparse_adamw` copies parameters and its state to the host in every step, and computes the step there.

**Errors.** Invalid arguments raise `InvalidInputError` while tracing. Under jit, JAX raises errors of the exchange as
`jax.errors.JaxRuntimeError`, whose text ends with the type and the text of the original. After an error nothing has
been written, and the gradient is not in the residual: pass both again, unless they were donated.

**Weights** must be the same on all ranks. `sparsify` and `sparse_adamw` compare them: see ``check_weights_every``. In
other loops, call `sparsecomm.check_weights` on all ranks.

**Checkpoints.** Residuals are part of the training state, an ordinary pytree, and so are the moments of `sparse_adamw`.
They differ between ranks: each rank saves and loads its own, for example by `sparsecomm.save`.
"""

from sparsecomm.errors import needing as _needing

with _needing("JAX", __name__, "jax"):
    import jax as _jax  # noqa: F401

from sparsecomm.jax.adamw import SparseAdamWState, sparse_adamw
from sparsecomm.jax.local_steps import LocalSteps
from sparsecomm.jax.transform import SparsifyState, sparsify
from sparsecomm.jax.trees import allreduce_tree, init_residuals, sparse_allreduce

__all__ = [
    "LocalSteps", "SparseAdamWState", "SparsifyState", "allreduce_tree", "init_residuals", "sparse_adamw",
    "sparse_allreduce", "sparsify",
]  # fmt: skip
