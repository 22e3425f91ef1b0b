"""The sums of a `Reducer`: nothing is lost, all ranks get the same bits, and the order of pushes does not matter."""

from __future__ import annotations

import functools
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.cli.oracles import contributors
from sparsecomm.transport import simulated
from sparsecomm.wire import WIRES
from tests import data, reference
from tests.reducer.programs import (
    MIXED,
    SHAPES,
    Arrays,
    as_float64,
    bits,
    copies,
    gradients,
    reducer_of,
    residuals,
    run,
    same,
    total,
)

RANKS = [1, 2, 3, 5, 8]
SCOPES = ["tensor", "bucket", "model", "chunk"]
STEPS = 3
MIXED_SHAPES = {**SHAPES, "g": (150,)}

FEW_BITS = [name for name, wire in WIRES.items() if wire.kind.planes]  # whole numbers become others

OPTIONS = {
    "scope": st.sampled_from(SCOPES),
    "density": st.sampled_from([0.004, 0.05, 0.5, 1.0]),
    "op": st.sampled_from(["sum", "mean"]),
    "wire": st.sampled_from(list(WIRES)),
    "dense_below": st.sampled_from([0, 100, 10_000]),
    "bucket_bytes": st.sampled_from([1, 1500, None]),
}
CHECK = settings(max_examples=5, phases=[Phase.generate])  # shrinking takes long

every_size = pytest.mark.parametrize("P", RANKS)
every_scope = pytest.mark.parametrize("scope", SCOPES)


def add_difference(minuend: np.ndarray, backend: Any, x: Any, *rest: Any) -> bool:
    return bool(backend.add_difference(minuend, x, *rest))


def train(
    transport: simulated.SimulatedTransport,
    options: dict[str, Any],
    *,
    seed: int = 0,
    steps: int = STEPS,
    shapes: dict[str, tuple[int, ...]] = SHAPES,
    dtypes: dict[str, str] | None = None,
    shuffle: bool = False,
) -> tuple[Arrays, Arrays, Arrays, list[Any]]:
    """What was pushed, applied, and kept; and the bits of every step's sums."""
    P, r = transport.size, transport.rank
    reducer = sc.Reducer(gradients(0, shapes, dtypes), comm=transport, **options)
    pushed, applied, seen = [], [], []
    for step in range(steps):
        given_ = gradients(seed + 100 * step + r, shapes, dtypes, 3)
        pushed.append(as_float64(given_))
        names = list(given_)
        if shuffle:
            random.Random(seed + step + r).shuffle(names)
        outs = {
            name: np.full(a.shape, 7, a.dtype if a.dtype.itemsize == 8 else np.float32) for name, a in given_.items()
        }
        for name in names:
            reducer.push(name, given_[name], out=outs[name])
        done = reducer.wait()
        assert (done.number, done.usable, done.left) == (step, True, {})
        seen.append(bits(outs))
        scale = P if reducer._settings.options.op == "mean" else 1
        whole = (lambda a: a) if options.get("wire") in FEW_BITS else np.rint
        applied.append({name: whole(a.astype(np.float64) * scale) for name, a in outs.items()})
    return total(pushed), total(applied), residuals(reducer), seen


@every_size
@pytest.mark.parametrize("algorithm", [*sc.algorithms(), "auto"])
def test_nothing_is_lost_and_all_ranks_get_the_same_bits(P: int, algorithm: str) -> None:
    @CHECK
    @given(data.seeds, st.booleans(), st.fixed_dictionaries(OPTIONS))
    def check(seed: int, mixed: bool, options: dict[str, Any]) -> None:
        wire = options["wire"]
        wire = "packed" if mixed and wire.startswith("packed_") else wire  # float64 is never narrow
        options |= {"wire": wire, "chunk": 100, "algorithm": algorithm}
        if algorithm == "double" and options["scope"] == "chunk":
            options["scope"] = "bucket"  # the other is refused
        shapes, dtypes = (MIXED_SHAPES, MIXED) if mixed else (SHAPES, None)
        results = run(P, lambda r: train(r, options, seed=seed, shapes=shapes, dtypes=dtypes, shuffle=True))
        kept = total(result[2] for result in results)
        ended, began = total([kept, results[0][1]]), total(result[0] for result in results)
        if wire in FEW_BITS:
            for name in began:
                np.testing.assert_allclose(ended[name], began[name], rtol=0, atol=1e-5 * P, err_msg=name)
        else:
            same(ended, began)
        assert all(result[3] == results[0][3] for result in results)
        for result in results:
            for name, residual in result[2].items():
                assert residual.shape == shapes[name]
                assert residual.dtype == (np.float64 if mixed and MIXED[name] == "float64" else np.float32)

    check()


@pytest.mark.parametrize("algorithm", ["auto", "ssar_split_allgather"])
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5, "skip_nonfinite": True}], ids=str)
def test_a_mean_of_contributors_is_the_sum_divided_by_their_number(
    P: int, algorithm: str, extra: dict[str, Any]
) -> None:
    """Tensors that are summed whole are divided by P; and residuals are those of the sum."""
    density, whole = 0.1, {name for name, shape in SHAPES.items() if np.prod(shape) < 10}
    selecting = "split" if algorithm == "auto" else algorithm

    def program(transport: simulated.SimulatedTransport) -> list[tuple[Arrays, Arrays, Arrays]]:
        options = {"comm": transport, "scope": "tensor", "dense_below": 10, **extra}
        sums = sc.Reducer(gradients(0), density, op="sum", algorithm=selecting, **options)
        means = sc.Reducer(gradients(0), density, op="mean_of_contributors", algorithm=algorithm, **options)
        found = []
        for step in range(3):
            total_, mean = (gradients(9 * step + transport.rank) for _ in "12")
            held = {name: means.residual(name) + mean[name] for name in SHAPES}  # without momentum
            sums.reduce(total_)
            means.reduce(mean)
            same(residuals(means), residuals(sums))
            found.append((held, total_, mean))
        return found

    results = run(P, program)
    for step in range(3):
        for name, shape in SHAPES.items():
            held = [result[step][0][name].reshape(-1) for result in results]
            k = max(1, round(density * np.prod(shape))) if np.prod(shape) else 1
            total_, mean = (results[0][step][part][name].reshape(-1) for part in (1, 2))
            counts = np.float32(P) if name in whole else contributors(held, k)
            if not extra or name in whole:
                np.testing.assert_array_equal(mean, (total_ / counts).astype(np.float32))
            np.testing.assert_array_equal(mean != 0, total_ != 0)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.5, "decay": 0.8},
        {"clip": 3.0},
        {"skip_nonfinite": True, "decay": 0.8},
        {"scope": "chunk", "chunk": 64, "decay": 0.8, "op": "mean_of_contributors", "algorithm": "split"},
    ],
)
@pytest.mark.parametrize("nonfinite", [False, True])
def test_a_difference_is_pushed_as_the_array_would_be(options: dict[str, Any], nonfinite: bool) -> None:
    """Without its sum being written; what it is made of may be changed at once."""

    def program(transport: simulated.SimulatedTransport) -> None:
        whole, parted = (sc.Reducer(gradients(0), 0.1, comm=transport, **options) for _ in range(2))
        for step in range(3):
            after, before = (gradients(seed, normal=True) for seed in (10 * step + transport.rank, 10 * step + 5))
            if nonfinite and step == 1 and transport.rank == 1:
                after["a"][3, 5] = np.inf
            pushed = {name: np.asarray(before[name] - after[name]) for name in after}
            wanted = whole.reduce(pushed)
            for name, its in after.items():
                add = functools.partial(add_difference, before[name].reshape(-1))
                parted.push_with(name, its, add)
                with pytest.raises(sc.InvalidInputError, match="was pushed in step"):
                    parted.push_with(name, its, add)
                its[...] = before[name][...] = 7
            done = parted.wait()
            assert (done.usable, done.left.keys()) == (wanted.usable, {n for n in after if after[n].size})
            for name, entries in done.left.items():
                np.testing.assert_array_equal(entries.to_dense(), pushed[name])
            for name in after:
                np.testing.assert_array_equal(whole.residual(name), parted.residual(name))
        assert whole.counters.skipped == parted.counters.skipped == (nonfinite and "skip_nonfinite" in options)

    with np.errstate(invalid="ignore"):
        run(2, program)


@every_size
@every_scope
def test_the_order_of_pushes_changes_nothing_within_a_step(P: int, scope: str) -> None:
    options = {"density": 0.05, "scope": scope, "bucket_bytes": 1500}
    shuffled = run(P, lambda transport: train(transport, options, shuffle=True))
    straight = run(P, lambda transport: train(transport, options))
    for ours, theirs in zip(shuffled, straight, strict=True):
        assert ours[3] == theirs[3]
        assert bits(ours[2]) == bits(theirs[2])


@pytest.mark.parametrize("P", [1, 2, 5])
@pytest.mark.parametrize("algorithm", ["split", "allgather", "tree", "butterfly"])
def test_each_selection_is_of_its_scope(P: int, algorithm: str) -> None:
    """Against the oracle of the whole call: the first step has no residual yet."""
    each = [gradients(rank, max_=1000) for rank in range(P)]
    names = [name for name in reversed(SHAPES) if np.prod(SHAPES[name])]

    def flat(arrays: Arrays, bucket: list[str]) -> np.ndarray:
        return np.concatenate([arrays[name].reshape(-1) for name in bucket])

    for scope, groups in (("tensor", [[name] for name in names]), ("model", [names])):

        def program(transport: simulated.SimulatedTransport, scope: str = scope) -> Any:
            mine = copies(each[transport.rank])
            reducer = sc.Reducer(mine, 0.02, comm=transport, scope=scope, algorithm=algorithm, op="sum", dense_below=0)
            reducer.reduce(mine)
            return mine, reducer.groups

        for mine, made in run(P, program):
            assert made == groups
            for bucket in groups:
                xs = [flat(arrays, bucket) for arrays in each]
                n = len(xs[0])
                k = max(1, round(0.02 * n))
                expected = reference.allreduce(algorithm, xs, k, [rank // 3 for rank in range(P)])
                np.testing.assert_array_equal(flat(mine, bucket), reference.dense(expected, n))


def test_small_tensors_are_summed_whole_in_one_call_at_the_end() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine, whole = gradients(transport.rank), total(gradients(rank) for rank in range(3))
        reducer = reducer_of(transport, scope="tensor", dense_below=300)
        assert reducer.groups == [["c"], ["a"], ["f", "e", "b"]]
        reducer.reduce(mine)
        same({name: mine[name] for name in "bef"}, {name: whole[name] for name in "bef"})

    run(3, program)


def test_types_and_tensors_without_elements_share_no_call() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = gradients(0, MIXED_SHAPES, MIXED)
        reducer = sc.Reducer(mine, 0.1, comm=transport, scope="model", dense_below=0)
        assert sorted(map(sorted, reducer.groups)) == [["a", "b", "c", "g"], ["e", "f"]]
        assert reducer.residual("e").shape == ()
        assert reducer.residual("d").shape == (0, 3)
        nothing = sc.Reducer({"empty": np.zeros((0, 3), np.float32)}, comm=transport)
        nothing.push("empty", np.zeros((0, 3), np.float32))
        assert nothing.wait().left == {}
        assert nothing.wait().number == 1
        assert nothing.state_dict()["residuals"]["empty"].shape == (0, 3)

    run(2, program)


@pytest.mark.parametrize("P", [2, 3])
def test_several_reducers_share_a_communicator(P: int) -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = [gradients(transport.rank + 10 * i) for i in range(2)]
        both = [sc.Reducer(gradients(0), 1.0, comm=transport, op="sum") for _ in range(2)]
        for step in range(3):
            for i, reducer in enumerate(both):
                mine = gradients(transport.rank + 10 * i + 100 * step)
                for name, gradient in mine.items():
                    reducer.push(name, gradient)
                    sc.sparse_allreduce(np.ones(5, np.float32), 1, comm=transport)  # between its calls
                reducer.wait()
                same(mine, total(gradients(rank + 10 * i + 100 * step) for rank in range(P)))

    run(P, program)


@pytest.mark.parametrize("algorithm", ["split", "double", "allgather"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_is_not_finite_does_not_come_back(algorithm: Any, momentum: float) -> None:
    """More of it than a step sends, on one rank: the next step is finite, and what else waits is as it was."""

    def program(transport: simulated.SimulatedTransport) -> list[bool]:
        reducer = sc.Reducer(
            {"x": np.zeros(2000, np.float32)},
            0.01,
            comm=transport,
            algorithm=algorithm,
            momentum=momentum,
            dense_below=0,
        )
        bad, found = transport.rank == 1, []
        for step in range(3):
            x = np.ones(2000, np.float32)
            if step == 1 and bad:
                x[:600:2], x[1:600:2] = np.nan, np.inf
            before = reducer.residual("x").copy()
            done = reducer.reduce({"x": x})
            assert done.usable
            found.append(done.nonfinite)
            assert np.isfinite(x).all() == (step != 1)
            kept = reducer.residual("x")
            assert np.isfinite(kept).all()
            if step == 1:
                assert kept[600:].sum() > before[600:].sum()
        return found

    assert run(2, program) == [[False, True, False]] * 2
