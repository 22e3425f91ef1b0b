"""sparsecomm in PyTorch.

- For AdamW: `SparseAdamW`, which replaces `torch.optim.AdamW` and exchanges gradients itself.
- For SGD with `DistributedDataParallel`: ``state = sparsecomm.torch.register(ddp)``, or `SparseState` and
  `sparse_hook` if a framework registers hooks itself.
- With FSDP2 in several replicas: ``state = sparsecomm.torch.register_fsdp(model, comm=replicas)``.
- For SGD in your own loop: `DistributedOptimizer`.
- For very slow links: `DiLoCo`, which exchanges only once in many local steps.
- For one tensor: ``sparsecomm.sparse_allreduce(x, 0.001, residual=r, op="mean", out=x)``.
- Programs started by ``torchrun`` need no MPI: `ProcessGroupTransport` uses the process group. Call
  `torch.distributed.init_process_group` before the first call.

**Means.** After ``loss.backward()`` every ``p.grad`` holds the mean over all ranks of the entries that were sent
(`SparseAdamW` leaves ``p.grad`` as it is). Residuals store the rest, by parameter. Clipping ``p.grad`` after
``backward()`` clips the mean; pass ``clip=`` to clip each rank's gradient before the exchange.

**No gradient means no step.** A parameter that is frozen, or that no rank used, does not change, as in PyTorch. Its
residual is kept until it trains again, or until ``discard()`` drops it. If only some ranks used a parameter, the other
ranks contribute zeros, and all get the mean.

**Gradients that you throw away** by ``zero_grad()`` (GANs, skipped batches) enter the residuals and are applied later.
Run such passes under ``no_sync()``, or call ``discard()``.

**The same weights** on all ranks are required: see `broadcast_parameters`. The first step checks them
(`sparsecomm.check_weights`); ``check_weights_every`` repeats the check in later steps.

**Loss scaling (AMP).** Pass the scaler: ``scaler=``. An infinity on one rank then makes all scalers skip the step. The
finite gradients of that step stay in the residuals, which follow the loss scale.

**DTensors** (FSDP2, tensor parallelism): each rank exchanges its local shards. ``comm`` must be a process group of
ranks that hold the same shards. Plain FSDP, without replicas, is refused: each rank holds a different part.
"""

from sparsecomm.errors import needing as _needing

with _needing("PyTorch", __name__, "torch"):
    import torch as _torch  # noqa: F401

from sparsecomm.checkpoints import Checkpoint
from sparsecomm.torch.adamw import SparseAdamW
from sparsecomm.torch.checkpoints import Stateful, load, save
from sparsecomm.torch.diloco import DiLoCo
from sparsecomm.torch.exchange import SparseState, sparse_hook
from sparsecomm.torch.hook import ShardedState, keep_local, register, register_fsdp
from sparsecomm.torch.optimizer import DistributedOptimizer, SparseOptimizer
from sparsecomm.torch.parameters import broadcast_parameters
from sparsecomm.transport.process_group import ProcessGroupTransport

__all__ = [
    "Checkpoint", "DiLoCo", "DistributedOptimizer", "ProcessGroupTransport", "ShardedState", "SparseAdamW",
    "SparseOptimizer", "SparseState", "Stateful", "broadcast_parameters", "keep_local", "load", "register",
    "register_fsdp", "save", "sparse_hook",
]  # fmt: skip
