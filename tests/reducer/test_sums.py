"""The sums of a `Reducer`: nothing is lost, all ranks get the same bits, and the order of pushes does not matter."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.reducer.bucket import Addition
from sparsecomm.testing import num_contributors
from sparsecomm.transport import simulated
from sparsecomm.wire import EXACT, WIRES
from tests import data, reference
from tests.ranks import nodes_of, run
from tests.reducer.programs import (
    MIXED,
    SHAPES,
    Arrays,
    as_float64,
    bits,
    gradients,
    reducer_of,
    residuals,
    same,
    total,
)

ALGORITHMS = [*sc.algorithms(), "hierarchical:split", "split:2", "auto"]
ABSENT = ["nothing", "None", "None, out"]  # ways to leave out a gradient
ALL = SHAPES | {"g": (150,)}
SENT = {name for name, shape in ALL.items() if np.prod(shape)}
TYPES = st.sampled_from([MIXED, dict.fromkeys(ALL, "float32")])
SUMS = {"float64": np.float64}
BY_CHUNK = ("allgather", "ssar_split_allgather")  # sums by chunk do not depend on other ranks' selections
CHECK = settings(max_examples=20, phases=[Phase.generate])


class Seen(NamedTuple):
    """One rank's gradients and results of a step, and its state before and after."""

    how: dict[str, str]
    gradients: Arrays
    residuals: tuple[Arrays, Arrays]
    velocities: tuple[Arrays, Arrays]
    outs: Arrays
    step: sc.Step
    groups: list[list[str]]


def trained(
    transport: simulated.SimulatedTransport,
    options: dict[str, Any],
    hows: list[list[dict[str, str]]],
    seed: int,
    dtypes: dict[str, str],
) -> list[Seen]:
    """Make steps in which each rank pushes gradients as ``hows`` says by step, rank and name."""
    reducer, history = reducer_of(transport, tensors=gradients(0, ALL, dtypes), **options), []
    for step, everyones in enumerate(hows):
        how, pushed, outs = everyones[transport.rank], gradients(seed + 10 * step + transport.rank, ALL, dtypes), {}
        before, groups = reducer.state_dict(), reducer.groups
        for name, what in how.items():
            gradient = pushed[name].copy() if what == "push" else None
            if what != "nothing":
                if what != "None":
                    outs[name] = np.full(ALL[name], 7, SUMS.get(dtypes[name], np.float32))
                reducer.push(name, gradient, out=outs.get(name))
        done = reducer.wait()
        after = reducer.state_dict()
        changes = [(before[kind], after[kind]) for kind in ("residuals", "velocities")]
        history.append(Seen(how, as_float64(pushed), *changes, outs, done, groups))
    return history


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_nothing_is_lost_and_what_has_no_gradient_stays_as_it_is(algorithm: str) -> None:
    """All ranks get the same bits. A missing gradient counts as zero; a tensor without any takes no part."""
    by_chunk = [] if algorithm == "double" else ["chunk"] * (6 if algorithm in BY_CHUNK else 1)
    scopes = ["tensor", "bucket", "model", *by_chunk]
    options = {
        "scope": st.sampled_from(scopes),
        "density": st.sampled_from([0.004, 0.02, 0.1, 0.5, 1.0]),
        "op": st.sampled_from(["sum", "mean"]),
        "wire": st.just("packed") | st.sampled_from(list(WIRES)),
        "dense_below": st.sampled_from([0, 100, 10_000]),
        "bucket_bytes": st.sampled_from([1, 1500, None]),
        "momentum": st.sampled_from([0.0, 0.5]),
        "masking": st.booleans(),
        "decay": st.just(1.0) if algorithm == "dense" else st.sampled_from([1.0, 0.5]),
        "clip": st.sampled_from([None, 1e9]),
        "chunk": st.sampled_from([1, 16, 100, 4096]),
        "skip_nonfinite": st.booleans(),
    }

    @CHECK
    @given(st.integers(1, 8), data.seeds, TYPES, st.booleans(), st.fixed_dictionaries(options))
    def check(P: int, seed: int, dtypes: dict[str, str], complete: bool, options: dict[str, Any]) -> None:
        rng, steps = random.Random(seed), []
        for _ in range(3):
            some = [["push"]] if complete else [ABSENT, [*ABSENT, "push", "push", "push"]]
            ways = {name: rng.choice(some) for name in ALL}
            drawn = [{name: rng.choice(choices) for name, choices in ways.items()} for _ in range(P)]
            steps.append([dict(rng.sample(sorted(how.items()), len(how))) for how in drawn])
        wire = options["wire"] if dtypes is not MIXED or WIRES[options["wire"]].kind is EXACT else "packed"
        options |= {"algorithm": algorithm, "wire": wire}
        for seen in zip(*run(P, lambda r: trained(r, options, steps, seed, dtypes)), strict=True):
            check_step(seen, options)

    check()


def check_step(seen: tuple[Seen, ...], options: dict[str, Any]) -> None:
    P, results = len(seen), []
    has = [{name for name, what in rank.how.items() if what == "push"} for rank in seen]
    nowhere = SENT - set().union(*has)
    inputs, withheld = [], []  # contributions to the sum, and residuals that take no part
    for rank, present in zip(seen, has, strict=True):
        assert rank.step.usable
        assert rank.step.without_gradient == nowhere
        assert rank.step.sums_without_out.keys() == SENT - present - nowhere - rank.outs.keys()
        result = {name: part.to_dense() for name, part in rank.step.sums_without_out.items()}
        for name, out in rank.outs.items():
            if name in nowhere:
                assert (out == 7).all()
            elif name in SENT:
                result[name] = out
        results.append(bits(dict(sorted(result.items()))))
        (before, after), (velocities, velocities_after) = rank.residuals, rank.velocities
        entered = {}
        for name, gradient in rank.gradients.items():
            velocity = options["momentum"] * velocities.get(name, 0) + gradient
            entered[name] = (options["decay"] * before[name] + velocity) * (name in present)
            if velocities:  # unchanged, or masked where this rank selected entries or the result applies
                kept_velocity = velocity if name in present else velocities[name]
                masked = (velocities_after[name] == 0) & options["masking"]
                if name not in present:
                    masked &= result.get(name, 0) != 0
                assert (masked | (velocities_after[name] == kept_velocity)).all()
            if name in nowhere:
                assert bits({name: before[name]}) == bits({name: after[name]})
            assert after[name].shape == ALL[name]
            assert after[name].dtype == rank.outs.get(name, after[name]).dtype
        inputs.append(entered)
        withheld.append({name: array for name, array in before.items() if name not in present})
    assert all(result == results[0] for result in results)
    assert len({repr(rank.groups) for rank in seen}) == 1
    sums = {name: np.zeros(shape) for name, shape in ALL.items()} | as_float64(result)
    if options["op"] == "mean":
        sums = {name: P * mean for name, mean in sums.items()}
    ended, began = [rank.residuals[1] for rank in seen], total([*inputs, *withheld])
    if WIRES[options["wire"]].kind.planes:  # few bits, which round
        for name, array in total([*ended, sums]).items():
            np.testing.assert_allclose(array, began[name], rtol=1e-5, atol=1e-4, err_msg=name)
    else:
        sums = {name: np.rint(64 * array) / 64 for name, array in sums.items()}  # gradients are whole numbers
        same(total([*ended, sums]), began)
    if options["wire"] in ("plain", "packed") and options["algorithm"] != "auto":
        check_selection(inputs, sums, seen[0].groups, options)


def check_selection(inputs: list[Arrays], sums: Arrays, groups: list[list[str]], options: dict[str, Any]) -> None:
    """Check sums against the algorithm in plain NumPy, if they do not depend on the order of additions."""
    density, P = options["density"], len(inputs)
    for group in groups:
        algorithm = options["algorithm"]
        xs = [np.concatenate([x[name].reshape(-1) for name in group]).astype(np.float32) for x in inputs]
        n = len(xs[0])
        if density == 1.0 or max(np.prod(ALL[name]) for name in group) < options["dense_below"]:
            algorithm = "dense"
        if options["scope"] != "chunk" or algorithm == "dense":
            k = max(1, round(density * n))
            expected = reference.dense(reference.allreduce(algorithm, xs, k, nodes_of(P)), n)
        elif algorithm in BY_CHUNK:
            k, expected = max(1, round(density * options["chunk"])), np.zeros(n)
            for name, end in zip(group, np.cumsum([np.prod(ALL[name]) for name in group]), strict=True):
                part = slice(int(end - np.prod(ALL[name])), int(end))
                for x in xs:
                    chosen = reference.topk_by_chunk(x[part], k, options["chunk"])
                    expected[part] += reference.dense(chosen, len(x[part]))
        else:
            continue
        np.testing.assert_array_equal(np.concatenate([sums[name].reshape(-1) for name in group]), expected)


@pytest.mark.parametrize("algorithm", ["auto", "ssar_split_allgather"])
@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("extra", [{}, {"momentum": 0.5, "skip_nonfinite": True}], ids=str)
def test_a_mean_of_contributors_is_the_sum_divided_by_their_number(
    P: int, algorithm: str, extra: dict[str, Any]
) -> None:
    """Dense tensors are divided by P, and residuals are the same as with "sum"."""
    density, dense = 0.1, {name for name, shape in SHAPES.items() if np.prod(shape) < 10}
    selecting = "split" if algorithm == "auto" else algorithm

    def program(transport: simulated.SimulatedTransport) -> list[tuple[Arrays, Arrays, Arrays]]:
        options = {"comm": transport, "scope": "tensor", "dense_below": 10, **extra}
        sums = sc.Reducer(gradients(0), density, op="sum", algorithm=selecting, **options)
        means = sc.Reducer(gradients(0), density, op="mean_of_contributors", algorithm=algorithm, **options)
        history = []
        for step in range(3):
            total_, mean = (gradients(9 * step + transport.rank) for _ in "12")
            inputs = {name: means.residual(name) + mean[name] for name in SHAPES}  # without momentum
            sums.reduce(total_)
            means.reduce(mean)
            same(residuals(means), residuals(sums))
            history.append((inputs, total_, mean))
        return history

    results = run(P, program)
    for step in range(3):
        for name, shape in SHAPES.items():
            inputs = [result[step][0][name].reshape(-1) for result in results]
            k = max(1, round(density * np.prod(shape))) if np.prod(shape) else 1
            total_, mean = (results[0][step][part][name].reshape(-1) for part in (1, 2))
            counts = np.float32(P) if name in dense else num_contributors(inputs, k)
            if not extra or name in dense:
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
    """`push_with` subtracts without writing the difference."""

    def program(transport: simulated.SimulatedTransport) -> None:
        plain, parted = (sc.Reducer(gradients(0), 0.1, comm=transport, **options) for _ in range(2))
        for step in range(3):
            after, before = (gradients(seed, normal=True) for seed in (10 * step + transport.rank, 10 * step + 5))
            if nonfinite and step == 1 and transport.rank == 1:
                after["a"][3, 5] = np.inf
            pushed = {name: np.asarray(before[name] - after[name]) for name in after}
            wanted = plain.reduce(pushed)
            for name, array in after.items():
                how = Addition(minuend=before[name].reshape(-1))
                parted.push_with(name, array, how)
                with pytest.raises(sc.InvalidInputError, match="was pushed in step"):
                    parted.push_with(name, array, how)
            done = parted.wait()
            assert (done.usable, done.sums_without_out.keys()) == (wanted.usable, {n for n in after if after[n].size})
            for name, entries in done.sums_without_out.items():
                np.testing.assert_array_equal(entries.to_dense(), pushed[name])
            for name in after:
                np.testing.assert_array_equal(plain.residual(name), parted.residual(name))
        assert plain.counters.skipped == parted.counters.skipped == (nonfinite and "skip_nonfinite" in options)

    with np.errstate(invalid="ignore"):
        run(2, program)


def test_types_and_tensors_without_elements_share_no_call() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        mine = gradients(0, ALL, MIXED)
        reducer = sc.Reducer(mine, 0.1, comm=transport, scope="model", dense_below=0)
        assert sorted(map(sorted, reducer.groups)) == [["a", "b", "c", "g"], ["e", "f"]]
        assert reducer.residual("e").shape == ()
        assert reducer.residual("d").shape == (0, 3)
        nothing = sc.Reducer({"empty": np.zeros((0, 3), np.float32)}, comm=transport)
        nothing.push("empty", np.zeros((0, 3), np.float32))
        assert nothing.wait().sums_without_out == {}
        assert nothing.wait().number == 1
        assert nothing.state_dict()["residuals"]["empty"].shape == (0, 3)

    run(2, program)


@pytest.mark.parametrize("algorithm", ["split", "double", "allgather"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_is_not_finite_does_not_come_back(algorithm: Any, momentum: float) -> None:
    """One rank has more NaN than a step sends. The next step is finite, and other residuals are unchanged."""

    def program(transport: simulated.SimulatedTransport) -> list[bool]:
        reducer = sc.Reducer(
            {"x": np.zeros(2000, np.float32)},
            0.01,
            comm=transport,
            algorithm=algorithm,
            momentum=momentum,
            dense_below=0,
        )
        bad, nonfinite = transport.rank == 1, []
        for step in range(3):
            x = np.ones(2000, np.float32)
            if step == 1 and bad:
                x[:600:2], x[1:600:2] = np.nan, np.inf
            before = reducer.residual("x").copy()
            done = reducer.reduce({"x": x})
            assert done.usable
            nonfinite.append(done.nonfinite)
            where = "the gradient of x on this rank" if bad else "a gradient of another rank"
            assert done.cause.startswith(f"rank {transport.rank}: {where} is not finite" if step == 1 else "")
            assert np.isfinite(x).all() == (step != 1)
            assert step != 1 or np.isnan(x[0])
            residual = reducer.residual("x")
            assert np.isfinite(residual).all()
            if step == 1:
                assert residual[600:].sum() > before[600:].sum()
        return nonfinite

    assert run(2, program) == [[False, True, False]] * 2
