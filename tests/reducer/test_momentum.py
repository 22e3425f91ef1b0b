"""Momentum correction, clipping and schedules, against an oracle in plain NumPy and PyTorch's SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import reference
from tests.ranks import run
from tests.reducer.programs import SHAPES, gradients, same

X_LONG = {"x": np.zeros(200, np.float32), "small": np.zeros(10, np.float32)}


@pytest.mark.covering(1)
@pytest.mark.parametrize("P", [1, 2, 5, 8])
@pytest.mark.parametrize("algorithm", sc.algorithms())
@pytest.mark.parametrize("masking", [True, False])
def test_velocity_is_forgotten_where_a_rank_has_selected_and_where_the_result_applies(
    P: int, algorithm: str, masking: bool
) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer(
            X_LONG,
            0.1,
            comm=transport,
            algorithm=algorithm,
            momentum=0.5,
            masking=masking,
            dense_below=20,
            wire="plain",
        )
        mine = gradients(transport.rank, {name: a.shape for name, a in X_LONG.items()})
        velocity = {name: a.copy() for name, a in mine.items()}
        reducer.reduce(mine)
        if masking and algorithm != "dense":
            if algorithm != "double" or transport.rank or P == 1:  # with several ranks, rank 0 owns all entries
                velocity["x"][reference.topk(velocity["x"], 20)[0]] = 0
            velocity["x"][mine["x"] != 0] = 0
        same(reducer.state_dict()["velocities"], velocity)  # "small" is summed densely, so its velocity is not masked

    run(P, program)


@pytest.mark.parametrize("P", [1, 4])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e25])
@pytest.mark.parametrize("clip", [0.5, 50.0])
def test_clipping(P: int, op: str, size: float, clip: float) -> None:
    """The norm covers all tensors, even if its square overflows float32."""

    def program(transport: simulated.SimulatedTransport) -> Any:
        mine = {name: np.asarray(size * a, np.float32) for name, a in gradients(transport.rank).items()}
        before = {name: a.astype(np.float64) for name, a in mine.items()}
        reducer = sc.Reducer(mine, 1.0, comm=transport, op=op, clip=clip)
        reducer.reduce(mine)
        return mine, before

    results = run(P, program)
    max_norm = clip * (np.sqrt(P) if op == "mean" else 1 / np.sqrt(P))
    expected = dict.fromkeys(SHAPES, 0.0)
    for _, before in results:
        norm = np.sqrt(sum((a**2).sum() for a in before.values()))
        for name, a in before.items():
            expected[name] = expected[name] + a * min(1.0, max_norm / norm) / (P if op == "mean" else 1)
    for mine, _ in results:
        for name in SHAPES:
            np.testing.assert_allclose(mine[name], expected[name], rtol=1e-5, atol=1e-6 * size)
