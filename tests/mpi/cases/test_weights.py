"""Ranks that compare their weights: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import numpy as np
import pytest

import sparsecomm as sc
from tests.mpi.ranks import MPI, RANK, P


def test_weights_are_compared() -> None:
    weights = {"a": np.full(1000, np.nan), "b": np.arange(50), "c": np.zeros(3)}
    sc.check_weights(weights)
    if RANK == P - 1:
        weights["b"][49] = 0
    handle = sc.isparse_allreduce(np.ones(4, np.float32), 4)  # it goes on before
    if P > 1:
        with pytest.raises(sc.WeightMismatchError, match=rf"^b, int64 \(50,\): the weights of rank {P - 1} are not"):
            sc.check_weights(weights.items(), comm=MPI.COMM_WORLD)
    assert handle.wait().values.tolist() == [P] * 4
    sc.check_weights({"a": weights["a"]}, comm=None)
