"""`Reducer` between ranks, over MPI. Every rank runs this file: see `tests/mpi/test_under_mpirun.py`."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from tests.mpi.ranks import RANK, WORLD
from tests.reducer.programs import MIXED, SHAPES, bits, gradients, residuals, same, total

DTYPES = {name: MIXED[name] for name in SHAPES}


@pytest.mark.parametrize("scope", ["tensor", "bucket", "model"])
@pytest.mark.parametrize(
    "options", [{}, {"algorithm": "tree", "wire": "packed"}, {"algorithm": "split"}, {"algorithm": "dense"}]
)
def test_nothing_is_lost_and_all_ranks_get_the_same_bits(scope: str, options: dict[str, Any]) -> None:
    reducer = sc.Reducer(
        gradients(0, dtypes=DTYPES), 0.05, op="sum", scope=scope, bucket_bytes=1500, dense_below=10, **options
    )
    pushed, applied = [], []
    for step in range(4):
        mine = gradients(10 * step + RANK, dtypes=DTYPES, max_=3)
        pushed.append({name: a.astype(np.float64) for name, a in mine.items()})
        for name in random.Random(step + RANK).sample(list(mine), len(mine)):
            reducer.push(name, mine[name])
        assert reducer.wait().number == step
        assert len({str(b) for b in WORLD.allgather(bits(mine))}) == 1
        applied.append(mine)
    same(total([*WORLD.allgather(residuals(reducer)), *applied]), total(WORLD.allgather(total(pushed))))
    assert len({str(g) for g in WORLD.allgather(reducer.groups)}) == 1
