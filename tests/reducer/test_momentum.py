"""Momentum correction, clipping and schedules, against an oracle in plain NumPy and PyTorch's SGD."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.transport import simulated
from tests import data, reference
from tests.reducer.programs import SHAPES, gradients, run, same

CHECK = settings(max_examples=8, phases=[Phase.generate])
OPTIONS = {"momentum": st.sampled_from([0.0, 0.5]), "masking": st.booleans(), "decay": st.sampled_from([1.0, 0.5])}
X = {"x": (200,)}
X_LONG = {"x": np.zeros(200, np.float32), "small": np.zeros(10, np.float32)}


class Rank:
    """Deep Gradient Compression on one rank, of one tensor: Lin et al., Algorithms 1 and 4."""

    def __init__(self, n: int, m: float, masking: bool, decay: float) -> None:
        self.u, self.v = np.zeros(n, np.float32), np.zeros(n, np.float32)
        self.m, self.masking, self.decay = np.float32(m), masking, np.float32(decay)

    def select(self, g: np.ndarray, k: int | None) -> tuple[np.ndarray, np.ndarray]:
        """What it sends; all without a k."""
        self.u = self.m * self.u + g
        self.v = self.decay * self.v + self.u
        chosen = np.flatnonzero(self.v) if k is None else reference.topk(self.v, k)[0]
        entries = chosen, self.v[chosen]
        self.v[chosen] = 0
        if self.masking and k is not None:
            self.u[chosen] = 0
        return entries


@pytest.mark.parametrize("P", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("algorithm", ["split", "dense", "allgather"])
def test_sums_are_those_of_deep_gradient_compression(P: int, algorithm: str) -> None:
    """Momenta and decays of 1/2 and whole numbers: sums are exact, so the order of additions does not matter."""

    @CHECK
    @given(data.seeds, st.sampled_from([1, 8, 200]), st.fixed_dictionaries(OPTIONS))
    def check(seed: int, k: int, options: dict[str, Any]) -> None:
        m, decay = options["momentum"], 1.0 if algorithm == "dense" else options["decay"]
        options |= {"decay": decay}

        def program(transport: simulated.SimulatedTransport) -> Any:
            options_ = {"algorithm": algorithm, "op": "sum", "dense_below": 0, **options}
            reducer = sc.Reducer({"x": np.zeros(200, np.float32)}, k / 200, comm=transport, **options_)
            found = []
            for step in range(5):
                mine = gradients(seed + 10 * step + transport.rank, X)
                reducer.reduce(mine)
                found.append(mine["x"])
            state = reducer.state_dict()
            return found, state["residuals"]["x"], state["velocities"].get("x")

        each = [Rank(200, m, options["masking"] and m > 0, decay) for _ in range(P)]
        expected, whole = [], algorithm == "dense" or k == 200
        for step in range(5):
            given_ = [gradients(seed + 10 * step + r, X)["x"] for r in range(P)]
            sent = [rank.select(g, None if whole else k) for g, rank in zip(given_, each, strict=True)]
            total = sum(reference.dense(entries, 200) for entries in sent)
            rejecting = algorithm == "split" and not whole
            kept = reference.dense(reference.topk(total, k), 200) if rejecting else total
            expected.append(kept)
            for rank, (indices, values) in zip(each, sent, strict=True):
                if rejecting:
                    back = kept[indices] == 0
                    rank.v[indices[back]] = values[back]
                if rank.masking and not whole:
                    rank.u[kept != 0] = 0
        for rank, (steps, residual, velocity) in zip(each, run(P, program), strict=True):
            np.testing.assert_array_equal(steps, expected)
            np.testing.assert_array_equal(residual, rank.v)
            if m:
                np.testing.assert_array_equal(velocity, rank.u)

    check()


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
            if algorithm != "double" or transport.rank or P == 1:  # of several ranks the first owns all
                velocity["x"][reference.topk(velocity["x"], 20)[0]] = 0
            velocity["x"][mine["x"] != 0] = 0
        same(reducer.state_dict()["velocities"], velocity)  # that of "small", which is summed whole, goes on

    run(P, program)


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("scope", ["tensor", "bucket", "model"])
def test_a_density_of_1_with_momentum_is_dense_sgd(P: int, scope: str) -> None:
    torch = pytest.importorskip("torch")
    steps = 6
    weights = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
    optimizer = torch.optim.SGD(list(weights.values()), lr=1.0, momentum=0.9)
    for step in range(steps):
        for name, weight in weights.items():
            weight.grad = torch.tensor(sum(gradients(10 * step + r)[name] for r in range(P)) / P)
        optimizer.step()

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer(gradients(0), 1.0, comm=transport, momentum=0.9, scope=scope)
        mine = {name: np.zeros(shape) for name, shape in SHAPES.items()}
        for step in range(steps):
            update = gradients(10 * step + transport.rank)
            reducer.reduce(update)
            for name in mine:
                mine[name] = mine[name] - update[name]
        for name in mine:
            np.testing.assert_allclose(mine[name], weights[name].numpy(), rtol=1e-5, atol=1e-5)

    run(P, program)


@pytest.mark.parametrize("P", [1, 4])
@pytest.mark.parametrize("op", ["sum", "mean"])
@pytest.mark.parametrize("size", [1e-3, 1.0, 1e25])
@pytest.mark.parametrize("clip", [0.5, 50.0])
def test_clipping(P: int, op: str, size: float, clip: float) -> None:
    """The norm is of all tensors; also where its square is beyond float32."""

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


def test_densities_follow_the_schedule_and_are_asked_for_before_anything_changes() -> None:
    def schedule(step: int) -> float:
        return [1.0, 0.5, 0.1, 7.0][step]

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = sc.Reducer(
            {"x": np.zeros(100, np.float32)}, schedule, comm=transport, algorithm="split", dense_below=0
        )
        for step in range(3):
            mine = {"x": np.arange(1.0, 101.0, dtype=np.float32)}
            done = reducer.reduce(mine)
            assert done.density == schedule(step)
            assert np.count_nonzero(mine["x"]) == 100 * schedule(step)
        before = reducer.residual("x").copy()
        for call in (lambda: reducer.push("x", np.ones(100, np.float32)), reducer.wait):
            with pytest.raises(sc.InvalidInputError, match=r"returned 7\.0 for step 3"):
                call()
            assert not reducer.pending
        np.testing.assert_array_equal(reducer.residual("x"), before)

    run(2, program)
