"""Sparse allreduce inside JAX: nothing is written in place, residuals go in and come out.

    import optax
    import sparsecomm.jax

    optimizer = optax.chain(sparsecomm.jax.sparsify(), optax.sgd(0.1, momentum=0.9))

    @jax.jit
    def step(params, state, batch):
        updates, state = optimizer.update(jax.grad(loss)(params, batch), state)
        return optax.apply_updates(params, updates), state

`sparse_adamw` is an optimizer of optax, for transformers and all that trains by AdamW. `sparsify` averages gradients in
an optax chain that ends with SGD, `allreduce_tree` those of a training loop without optax, and
`sparse_allreduce` one array. All three work eagerly and under `jax.jit`, in `jax.lax.scan`, `fori_loop` and
`while_loop`, and in a branch of `jax.lax.cond` that all ranks take. `LocalSteps` averages what ranks have done in many
steps of their own, from Python.

**Ranks.** A rank is one process with one device. Start them with ``mpirun``; `jax.distributed` is not needed. A process
that finds itself alone, though its launcher has started several, is refused at its first call. Arrays
that are sharded over devices are refused, and so are `jax.shard_map` and `jax.pmap`, where every device would make
calls of its own. There are no derivatives, and no `jax.vmap`: take the gradient first, then call this on it.

**Under jit** the exchange is an ordered callback: one for a whole tree. Ordered, since ranks must make the same calls
in the same order, and XLA may otherwise reorder calls that do not depend on each other. The callback may run on a
thread of XLA. So before you use the same communicator yourself, wait: `jax.effects_barrier()`. Eager calls do so.
Ctrl-C is noticed when the call has ended.

**Copies.** On a CPU, arrays are read where they are. A residual is copied once, since it goes on in a new array;
several leaves in one call are joined in a buffer; under jit results are copied into XLA's memory. On a GPU, eager calls
stay in device memory (by DLPack, with CuPy), and calls under jit go through the host: that is what callbacks do.

**Errors.** What can be known from shapes, types and options is raised as `InvalidInputError` while tracing, and names
the leaf. What the exchange itself raises comes as it is from an eager call. Under jit JAX wraps it: catch
`jax.errors.JaxRuntimeError`, whose text ends with the type and the text of the original. After an error nothing has
been written: unlike with `sparsecomm.sparse_allreduce`, the gradient is not in the residual, and both may be passed
again, unless they were donated.

**The same weights** on all ranks are a condition. `sparsify` checks it in step 0, if parameters are passed to
``update``; in more steps with ``check_weights_every``. In a loop without it, call `sparsecomm.check_weights` on all
ranks.

**Checkpoints.** Residuals are a part of the training state, an ordinary pytree. They differ between ranks: each rank
saves and loads its own, by `sparsecomm.save` for example.
"""

try:
    import jax as _jax  # noqa: F401
except ImportError as error:
    from sparsecomm.errors import pip_install

    raise ImportError(f"sparsecomm.jax needs JAX ({error}): {pip_install('jax')}") from error

from sparsecomm.jax.adamw import SparseAdamWState, sparse_adamw
from sparsecomm.jax.local_steps import LocalSteps
from sparsecomm.jax.transform import SparsifyState, sparsify
from sparsecomm.jax.trees import allreduce_tree, init_residuals, sparse_allreduce

__all__ = [
    "LocalSteps",
    "SparseAdamWState",
    "SparsifyState",
    "allreduce_tree",
    "init_residuals",
    "sparse_adamw",
    "sparse_allreduce",
    "sparsify",
]
