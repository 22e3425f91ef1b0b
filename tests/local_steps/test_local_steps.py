"""`LocalSteps` against the whole algorithm in plain NumPy; errors of exchanges, NaN, and what is refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests.local_steps.programs import DTYPES, SHAPES, Oracle, bits, initial, made, train
from tests.reducer.programs import run

TWO = (("f", "a"), ("b", "c", "d", "e"))


@pytest.mark.parametrize("P", [1, 2, 3, 4])
@pytest.mark.parametrize(
    ("density", "fragments", "sync_every", "delay", "alpha", "sgd"),
    [
        (0.1, 1, 3, 0, 0.0, None),
        (0.1, TWO, 4, 2, 0.25, (0.7, 0.9, True)),
        (0.3, 3, 5, 4, 0.5, (0.5, 0.5, False)),
        (1.0, 2, 1, 0, 0.0, (0.7, 0.9, True)),
        (1.0, 6, 6, 5, 0.0, None),
    ],
)
def test_the_whole_algorithm(
    P: int, density: float, fragments: Any, sync_every: int, delay: int, alpha: float, sgd: Any
) -> None:
    steps = 4 * sync_every + 1
    if fragments == 2 and sync_every == 1:
        sync_every = 2

    def program(ranks: simulated.SimulatedTransport) -> Any:
        parameters = initial()
        local = made(
            ranks,
            parameters,
            density,
            sync_every=sync_every,
            fragments=fragments,
            fragment_sync_delay=delay,
            fragment_update_alpha=alpha,
            outer=sc.NesterovSGD(*sgd) if sgd else None,
        )
        replaced = train(local, parameters, ranks.rank, 1, steps)
        residuals = {name: a for each in local.state_dict()["reducers"] for name, a in each["residuals"].items()}
        assert (local.round, local.local_step) == divmod(steps, sync_every)
        return local.fragments, replaced, parameters, local.global_parameters(), residuals

    results = run(P, program)
    oracle = Oracle(P, results[0][0], sync_every, delay, alpha, density, sgd=sgd)
    oracle.train(steps)
    applied = {end: oracle.fragments[i] for i, _, end in oracle.exchanges}
    close = 2e-6 if density == 1 and P > 2 else 0.0  # dense sums have another order
    for rank, (_, replaced, parameters, held, residuals) in enumerate(results):
        assert replaced == [applied.get(step, ()) for step in range(1, steps + 1)]
        assert bits(held) == bits(results[0][3])
        for name, shape in SHAPES.items():
            assert parameters[name].dtype == DTYPES[name]
            half = 1e-3 if close and DTYPES[name] == "float16" else close
            for mine, theirs, rtol in (
                (parameters[name], oracle.local[rank][name], half),
                (held[name], oracle.globals[name], half),
                (residuals[name], oracle.residuals[rank][name], half),
            ):
                np.testing.assert_allclose(mine, theirs.reshape(shape), rtol=rtol, atol=rtol, err_msg=name)
