"""Sparse allreduce of gradients: the global top-k of all ranks, without losing gradient, bit-identical on all ranks.

    import sparsecomm as sc

    residual = np.zeros_like(gradient)
    update = sc.sparse_allreduce(gradient, 0.001, residual=residual, op="mean", out=gradient)

`sparse_allreduce` sums sparse gradients over MPI or process groups of PyTorch; `topk`, `threshold` and `merge_topk` are
its building blocks. They accept arrays and tensors of NumPy, PyTorch, JAX and any other library with ``__dlpack__``,
and return a `SparseVector`.
"""

from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING

from sparsecomm import _built, processor  # noqa: F401  # in this order, before any other compiled module
from sparsecomm.algorithms import Algorithm, register_algorithm
from sparsecomm.api import LastCall, algorithms, explain, last_call, merge_topk, realign, threshold, topk
from sparsecomm.calls.collectives import isparse_allreduce, sparse_allreduce
from sparsecomm.calls.queue import Handle
from sparsecomm.checkpoints import Checkpoint, load, save
from sparsecomm.errors import (
    CollectiveMismatchError,
    InvalidInputError,
    RankFailedError,
    SparseCommError,
    TimeoutError,
    TransportError,
    WeightMismatchError,
)
from sparsecomm.local_steps import LocalSteps, NesterovSGD, OuterOptimizer
from sparsecomm.membership import grow, join, shrink
from sparsecomm.optimizers.arrays import SparseAdamW
from sparsecomm.reducer import Rebuilt, Reducer, Step, Warmup
from sparsecomm.states.schema import reshard
from sparsecomm.states.weights import check_weights
from sparsecomm.tensors.sparse import SparseVector

if TYPE_CHECKING:
    from sparsecomm import jax as jax
    from sparsecomm import patches as patches
    from sparsecomm import torch as torch

try:
    __version__ = version("sparsecomm")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"

_ON_FIRST_USE = ("jax", "patches", "torch", "typing")


def __getattr__(name: str) -> ModuleType:
    """Import a submodule on first use, since importing PyTorch or JAX takes seconds."""
    if name in _ON_FIRST_USE:
        return import_module(f"sparsecomm.{name}")
    raise AttributeError(f"module 'sparsecomm' has no attribute {name!r}")


def __dir__() -> list[str]:
    """Return the public names, including the modules whose framework is installed."""
    return sorted({*globals(), "patches", *(name for name in _ON_FIRST_USE if find_spec(name) is not None)})


__all__ = [
    "Algorithm", "Checkpoint", "CollectiveMismatchError", "Handle", "InvalidInputError", "LastCall", "LocalSteps",
    "NesterovSGD", "OuterOptimizer", "RankFailedError", "Rebuilt", "Reducer", "SparseAdamW", "SparseCommError",
    "SparseVector", "Step", "TimeoutError", "TransportError", "Warmup", "WeightMismatchError", "__version__",
    "algorithms", "check_weights", "explain", "grow", "isparse_allreduce", "join", "last_call", "load", "merge_topk",
    "realign", "register_algorithm", "reshard", "save", "shrink", "sparse_allreduce", "threshold", "topk",
]  # fmt: skip
