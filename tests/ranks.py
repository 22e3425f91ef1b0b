"""Calls on simulated ranks. Each node has three ranks; the last may have fewer."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

import sparsecomm as sc
from sparsecomm.reducer.connection import ReducerCount
from sparsecomm.transport import simulated

PER_NODE = 3


def nodes_of(P: int) -> list[int]:
    return [rank // PER_NODE for rank in range(P)]


def run(
    P: int, program: Callable[[simulated.SimulatedTransport], Any], nodes: Sequence[int] | None = None, **options: Any
) -> list[Any]:
    node_of_rank = nodes_of(P) if nodes is None else nodes
    return [result.value for result in simulated.run(P, program, node_of_rank=node_of_rank, **options)]


def errors(
    P: int, program: Callable[[simulated.SimulatedTransport], Any], **options: Any
) -> list[BaseException | None]:
    return [result.error for result in simulated.run(P, program, catch=True, **options)]


def allreduce(
    xs: Sequence[np.ndarray],
    k: float,
    residuals: Sequence[np.ndarray] | None = None,
    nodes: Sequence[int] | None = None,
    **options: Any,
) -> list[sc.SparseVector]:
    """Return the results of a call in which each rank passes its gradient of ``xs``."""

    def program(transport: simulated.SimulatedTransport) -> sc.SparseVector:
        residual = None if residuals is None else residuals[transport.rank]
        return sc.sparse_allreduce(xs[transport.rank], k, comm=transport, residual=residual, **options)

    return run(len(xs), program, nodes)


def number_reducers_from_0(transport: simulated.SimulatedTransport) -> None:
    """Number the next reducer on a transport as in a new process."""
    transport.attached(ReducerCount).value = 0
