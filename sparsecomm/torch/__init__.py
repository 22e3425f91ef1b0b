"""sparsecomm in PyTorch.

- In place of `torch.optim.AdamW`: `SparseAdamW`, which exchanges gradients itself.
- For SGD with `DistributedDataParallel`: ``state = sparsecomm.torch.register(ddp)``, or `SparseState` and
  `sparse_hook` where a framework registers hooks itself.
- With FSDP2 in several replicas: ``state = sparsecomm.torch.register_fsdp(model, comm=replicas)``.
- For SGD in a loop of your own: `DistributedOptimizer`.
- Over slow links, with an exchange after many local steps only: `DiLoCo`.
- For one tensor: ``sparsecomm.sparse_allreduce(x, 0.001, residual=r, op="mean", out=x)``. The dense sum is in ``out``.
  The entries that it returns are arrays: ``.to_torch()`` makes a sparse tensor of them.
- Programs that ``torchrun`` starts need no MPI: bytes go over the process group, by `ProcessGroupTransport`. Call
  `torch.distributed.init_process_group` before the first call; until then every call is refused.

**What is final when.** After ``loss.backward()`` every ``p.grad`` holds the mean over all ranks of what was sent. What
was not sent waits in residuals, by parameter. ``zero_grad`` does not touch them: it clears gradients that have been
used. Clipping ``p.grad`` after ``backward()`` clips the mean; to clip what accumulates, pass ``clip=``.

**No gradient means no step.** A parameter that is frozen, or that no rank used, does not move, as in PyTorch. Its
residual is kept until it trains again, or until ``discard()`` drops it. A parameter that only some ranks used counts as
zeros on the others.

**Gradients that you throw away** by ``zero_grad()`` (GANs, skipped batches) enter the residuals. Run such passes under
``no_sync()``, or call ``discard()``.

**The same weights** on all ranks are a condition, which the first step checks (`sparsecomm.check_weights`); with
``check_weights_every`` more steps do.

**Loss scaling (AMP).** Pass the scaler: ``scaler=``. An infinity on one rank then makes all scalers skip the step; the
finite gradients of that step wait in the residuals, and all of them follow when the scale changes.

**FSDP2** fits where it replicates: `register_fsdp` sums each shard across the ranks that hold the same one. Plain FSDP
does not: every rank holds another part of the gradient, and there is nothing to sum; it is refused. **DTensors**, of
FSDP2 or tensor parallelism, go into `DistributedOptimizer` by their local shards, if ``comm`` is a process group of
ranks that hold the same ones.

**Sparse gradients** of ``nn.Embedding(sparse=True)`` are refused: dense ones lose nothing here, since only their
largest entries travel.

**When it ends.** ``optimizer.remove()``, or dropping a `DistributedOptimizer`, ends its exchange; do so on all ranks.

**Reentrant activation checkpointing** (``use_reentrant=True``) ends backward passes within backward passes: use
``use_reentrant=False`` with `DistributedOptimizer`.
"""

try:
    import torch as _torch  # noqa: F401
except ImportError as error:
    from sparsecomm.errors import pip_install

    raise ImportError(f"sparsecomm.torch needs PyTorch ({error}): {pip_install('torch')}") from error

from sparsecomm.torch.adamw import SparseAdamW
from sparsecomm.torch.broadcast import broadcast_parameters
from sparsecomm.torch.checkpoints import Checkpoint, Stateful, load, save
from sparsecomm.torch.diloco import DiLoCo
from sparsecomm.torch.fsdp import ShardedState, register_fsdp
from sparsecomm.torch.hook import SparseState, keep_local, register, sparse_hook
from sparsecomm.torch.optimizer import DistributedOptimizer, SparseOptimizer
from sparsecomm.transport.process_group import ProcessGroupTransport

__all__ = [
    "Checkpoint",
    "DiLoCo",
    "DistributedOptimizer",
    "ProcessGroupTransport",
    "ShardedState",
    "SparseAdamW",
    "SparseOptimizer",
    "SparseState",
    "Stateful",
    "broadcast_parameters",
    "keep_local",
    "load",
    "register",
    "register_fsdp",
    "save",
    "sparse_hook",
]
