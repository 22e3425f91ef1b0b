from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.local_steps.defaults import AUTO, with_defaults
from sparsecomm.reducer.layout import specs_of
from tests.reducer.programs import run

NARROW, WIDE = {"x": np.zeros(5000, np.float16)}, {"x": np.zeros(5000), "y": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("parameters", "asked", "expected"),
    [
        (NARROW, {}, {"op": "mean_of_contributors", "algorithm": AUTO, "decay": 0.8, "wire": "packed_int2"}),
        (WIDE, {}, {"op": "mean_of_contributors", "wire": "auto"}),
        (NARROW, {"algorithm": "tree"}, {"op": "mean", "algorithm": "tree", "decay": 0.8}),
        (NARROW, {"algorithm": "dense"}, {"op": "mean", "decay": 1.0}),
        (NARROW, {"algorithm": "auto", "decay": 0.5}, {"op": "mean_of_contributors", "algorithm": AUTO, "decay": 0.5}),
        (NARROW, {"algorithm": "auto|tree", "op": "mean"}, {"algorithm": "auto|tree"}),
        (WIDE, {"wire": "plain", "scope": "model"}, {"wire": "plain", "scope": "model"}),
    ],
)
def test_defaults_give_way(parameters: Any, asked: Any, expected: Any) -> None:
    """What they become is what a `Reducer` takes; a round is made with it."""
    options: dict[str, Any] = dict(with_defaults(specs_of(parameters).values(), **asked))
    assert options == options | asked | expected

    def program(ranks: Any) -> dict[str, Any]:
        local = {name: array.copy() for name, array in parameters.items()}
        steps = sc.LocalSteps(local, comm=ranks, sync_every=1, **asked)
        for array in local.values():
            array += np.arange(array.size, dtype=array.dtype) * 2.0**-10 + ranks.rank
        assert steps.step(local) == tuple(local)
        return {name: array.tobytes() for name, array in local.items()}

    results = run(3, program)
    assert results == [results[0]] * 3


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(sc.InvalidInputError, match="algorithm='splat'"):
        sc.LocalSteps(NARROW, algorithm="splat")
