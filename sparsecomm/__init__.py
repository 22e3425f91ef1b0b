"""Sparse allreduce of gradients: the global top-k of all ranks, with nothing lost and the same bits everywhere.

    import sparsecomm as sc

    residual = np.zeros_like(gradient)
    update = sc.sparse_allreduce(gradient, 0.001, residual=residual, op="mean", out=gradient)

`sparse_allreduce` sums sparse gradients over MPI; `topk`, `threshold` and `merge_topk` are its building blocks. They
take tensors of NumPy, PyTorch, JAX and everything else with ``__dlpack__``, and return a `SparseVector`.
"""

from importlib.metadata import PackageNotFoundError, version

from sparsecomm import _built, processor  # noqa: F401  # in this order, before any other compiled module
from sparsecomm.api import (
    Algorithm,
    Handle,
    algorithms,
    check_weights,
    explain,
    isparse_allreduce,
    merge_topk,
    realign,
    register_algorithm,
    sparse_allreduce,
    threshold,
    topk,
)
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    SparseCommError,
    TimeoutError,
    TransportError,
    WeightMismatchError,
)
from sparsecomm.local_steps import LocalSteps, NesterovSGD, OuterOptimizer, reshard
from sparsecomm.membership import grow, join, shrink
from sparsecomm.reducer import Rebuilt, Reducer, Step, Warmup
from sparsecomm.tensors.sparse import SparseVector

try:
    __version__ = version("sparsecomm")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

__all__ = [
    "Algorithm",
    "CollectiveMismatchError",
    "Handle",
    "InvalidInputError",
    "LocalSteps",
    "NesterovSGD",
    "OuterOptimizer",
    "RankFailedError",
    "Rebuilt",
    "Reducer",
    "SparseCommError",
    "SparseVector",
    "Step",
    "TimeoutError",
    "TransportError",
    "Warmup",
    "WeightMismatchError",
    "__version__",
    "algorithms",
    "check_weights",
    "explain",
    "grow",
    "isparse_allreduce",
    "join",
    "merge_topk",
    "realign",
    "register_algorithm",
    "reshard",
    "shrink",
    "sparse_allreduce",
    "threshold",
    "topk",
]
