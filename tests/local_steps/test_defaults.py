from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm.algorithms import Comparison
from sparsecomm.local_steps.defaults import auto_algorithm, with_defaults
from sparsecomm.tensors.interop import specs_of
from sparsecomm.tuning.equal_loss import nats, relative_steps
from tests.ranks import run

AUTO = Comparison((("split:2", 1.0), ("allgather", 1.0)))  # for rounds of one step
NARROW, WIDE = {"x": np.zeros(5000, np.float16)}, {"x": np.zeros(5000), "y": np.zeros(3, np.float32)}


@pytest.mark.parametrize(
    ("parameters", "asked", "expected"),
    [
        (NARROW, {}, {"op": "mean_of_contributors", "algorithm": AUTO, "decay": 0.8, "wire": "packed_int2"}),
        (WIDE, {}, {"op": "mean_of_contributors", "wire": "auto"}),
        (NARROW, {"algorithm": "tree"}, {"op": "mean", "algorithm": "tree", "decay": 0.8}),
        (NARROW, {"algorithm": "dense"}, {"op": "mean", "decay": 1.0}),
        (NARROW, {"algorithm": "auto", "decay": 0.5}, {"op": "mean_of_contributors", "algorithm": AUTO, "decay": 0.5}),
        (NARROW, {"algorithm": "fastest", "op": "mean"}, {"algorithm": "fastest"}),
        (WIDE, {"wire": "plain", "scope": "model"}, {"wire": "plain", "scope": "model"}),
        (NARROW, {"algorithm": "split", "clip": 5.0, "chunk": 64}, {}),
        (NARROW, {"wire": "packed_int2", "momentum": 0.5, "scope": "bucket"}, {}),
    ],
)
def test_defaults_give_way(parameters: Any, asked: Any, expected: Any) -> None:
    """A `Reducer` accepts the resulting options, and a round works with them."""
    options: dict[str, Any] = dict(with_defaults(specs_of(parameters).values(), 1, **asked))
    assert options == options | asked | expected

    def program(transport: Any) -> dict[str, Any]:
        local = {name: array.copy() for name, array in parameters.items()}
        steps = sc.LocalSteps(local, comm=transport, sync_every=1, **asked)
        for array in local.values():
            array += np.arange(array.size, dtype=array.dtype) * 2.0**-10 + transport.rank
        assert steps.step(local) == tuple(local)
        return {name: array.tobytes() for name, array in local.items()}

    results = run(3, program)
    assert results == [results[0]] * 3


def test_what_trains_worse_must_be_faster_by_as_much() -> None:
    """In the report, H = 30 reached 1.649 and 1.552 nats; dense sums with half of the steps were 0.228 nats worse."""
    assert auto_algorithm(1) == AUTO
    assert repr(auto_algorithm(30)) == f"split:2*{2 ** ((1.649 - 1.552) / (1.714 - 1.486)):.2f}|allgather"
    assert auto_algorithm(10**6) == auto_algorithm(100)  # beyond the largest measured H


@pytest.mark.parametrize(("H", "P", "rate", "rtt"), [(30, 8, 1e8, 0.0), (30, 4, 1e9, 0.0), (10, 8, 1e9, 0.08)])
def test_auto_takes_least_time_to_equal_loss(H: int, P: int, rate: float, rtt: float) -> None:
    n = 2_000_000

    def took(transport: Any) -> str:
        local = sc.LocalSteps({"x": np.zeros(n, np.float32)}, comm=transport, sync_every=H)
        o = local.reducers[0]._settings
        explanation = sc.explain(n, 64 / 4096, comm=transport, algorithm=o.algorithm, wire=o.wire)
        worse = {"split:2": relative_steps(nats("split:2", H)), "allgather": relative_steps(nats("allgather", H))}
        best = min(explanation.candidates, key=lambda c: c.seconds * worse[c.algorithm.name])
        assert explanation.candidates[0] is best
        return best.algorithm.name

    assert len(set(run(P, took, nodes=range(P), alpha=rtt / 2 + 1e-4, beta=8 / rate))) == 1


def test_an_unknown_algorithm_is_refused() -> None:
    with pytest.raises(sc.InvalidInputError, match="algorithm='splat'"):
        sc.LocalSteps(NARROW, algorithm="splat")
