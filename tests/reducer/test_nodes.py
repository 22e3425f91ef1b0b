"""Sums with nodes: each slice equals the result of a `Reducer` with one rank per node that pushes the node's sums."""

from __future__ import annotations

import logging
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.calls import nodes as node_module
from sparsecomm.transport import simulated
from tests import data
from tests.ranks import run
from tests.reducer.programs import Arrays, bits, total

LAYOUTS = [(2, 2), (2, 3), (3, 2), (2, 4), (4, 8)]
SHAPES = {"a": (20, 30), "b": (600,), "c": (8, 9, 10), "d": (0, 3), "e": (480,)}  # 2,400 elements
UNEVEN = {"a": (20, 31), "b": (7,), "c": (501,), "d": (0, 3), "e": (), "f": (16, 16)}
CHECK = settings(max_examples=12, phases=[Phase.generate])
every_layout = pytest.mark.parametrize("layout", LAYOUTS, ids=lambda layout: "x".join(map(str, layout)))


def nodes_of(layout: tuple[int, int]) -> list[int]:
    num_nodes, per_node = layout
    return [node for node in range(num_nodes) for _ in range(per_node)]


def gradients_on(rank: int, step: int, absent: dict[str, list[int]], shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Return gradients of integers, whose sums are exact."""
    arrays = {}
    for i, (name, shape) in enumerate(shapes.items()):
        if rank not in absent.get(name, []):
            arrays[name] = data.integers(int(np.prod(shape)), "float32", 1000 * step + 10 * rank + i, 8).reshape(shape)
    return arrays


def dense_of(step: sc.Step, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    """Return the sums without an output as dense arrays, with zeros for tensors without a gradient."""
    sums = step.sums_without_out
    return {n: sums[n].to_dense() if n in sums else np.zeros(s, np.float32) for n, s in shapes.items()}


def stepped(reducer: sc.Reducer, gradients: Arrays, shapes: dict[str, tuple[int, ...]]) -> Arrays:
    for name in shapes:
        reducer.push_with(name, gradients.get(name))
    return dense_of(reducer.wait(), shapes)


def in_whole(reducer: sc.Reducer, kind: str) -> Arrays:
    """Return this rank's residuals or velocities as whole tensors, zero outside its slice, plus its `unsummed`."""
    state, arrays = reducer.state_dict(), {}
    for name, array in state[kind].items():
        slices = state["slices"]
        shape = array.shape if slices is None else slices[name]["shape"]
        begin, end = (0, array.size) if slices is None else slices[name]["part"]
        arrays[name] = np.zeros(shape, array.dtype)
        arrays[name].reshape(-1)[begin:end] += array.reshape(-1)
        for unsummed in state["unsummed"].get(name, [])[kind == "velocities" :][:1]:
            arrays[name] += unsummed
    return arrays


OPTIONS = {
    "algorithm": st.sampled_from(["auto", "double", "split", "butterfly", "allgather", "tree", "dense"]),
    "density": st.sampled_from([0.01, 0.1, 0.5, 1.0]),
    "op": st.sampled_from(["sum", "mean", "mean_of_contributors"]),
    "wire": st.sampled_from(["plain", "packed", "packed_int2", "packed_bfloat16"]),
    "momentum": st.sampled_from([0.0, 0.5]),
    "decay": st.sampled_from([1.0, 0.5]),
    "masking": st.booleans(),
    "scope": st.sampled_from(["model", "model", "chunk"]),
    "skip_nonfinite": st.booleans(),
    "clip": st.sampled_from([None, 1e9]),
}


@every_layout
def test_results_are_those_of_one_rank_per_node(layout: tuple[int, int]) -> None:
    """The oracle of each slice is a reducer with one rank per node that pushes the node's sums."""
    (N, m), P = layout, layout[0] * layout[1]

    @CHECK
    @given(data.seeds, st.fixed_dictionaries(OPTIONS))
    def check(seed: int, options: dict[str, Any]) -> None:
        if options["algorithm"] == "dense":
            options |= {"decay": 1.0, "op": "sum"}
        if options["algorithm"] in ("double", "dense", "tree", "butterfly") and options["op"] != "sum":
            options["op"] = "mean"
        if options["scope"] == "chunk":
            # Other algorithms may return as many entries as the slice with the most chunks selects.
            options |= {"chunk": 64, "bucket_bytes": 1 << 20, "algorithm": "allgather"}
        rng, steps = random.Random(seed), []
        for _ in range(3):
            names, absent = rng.sample(sorted(SHAPES), 2), {}
            absent[names[0]] = rng.sample(range(P), rng.randrange(P + 1))
            node = rng.randrange(N)
            absent[names[1]] = list(range(node * m, node * m + m))
            steps.append(absent)
        options |= {"dense_below": 0}

        def program(transport: simulated.SimulatedTransport) -> list[Any]:
            zeros = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()}
            reducer, history = sc.Reducer(zeros, comm=transport, **options), []
            for step, absent in enumerate(steps):
                result = stepped(reducer, gradients_on(transport.rank, step, absent, SHAPES), SHAPES)
                history.append((result, in_whole(reducer, "residuals"), in_whole(reducer, "velocities")))
            return history

        on_nodes = run(P, program, nodes_of(layout))
        assert all(bits(own[step][0]) == bits(on_nodes[0][step][0]) for own in on_nodes for step in range(3))
        length, order, offsets = 2400 // m, list(reversed(SHAPES)), {}
        at = 0
        for name in order:
            offsets[name] = at
            at += int(np.prod(SHAPES[name]))
        for position in range(m):
            parts = {}  # tensors' parts in this slice
            for name, begin in offsets.items():
                low, high = (
                    min(max(x, begin), begin + int(np.prod(SHAPES[name])))
                    for x in (position * length, (position + 1) * length)
                )
                if low < high:
                    parts[name] = slice(low - begin, high - begin)

            def oracle(transport: simulated.SimulatedTransport, parts: dict[str, slice] = parts) -> list[Any]:
                zeros = {n: np.zeros(parts[n].stop - parts[n].start, np.float32) for n in SHAPES if n in parts}
                reducer, history = sc.Reducer(zeros, comm=transport, **options), []
                shapes = {name: array.shape for name, array in zeros.items()}
                for step, absent in enumerate(steps):
                    members = [gradients_on(transport.rank * m + i, step, absent, SHAPES) for i in range(m)]
                    sums: Arrays = {}
                    for gradients in members:
                        for name, gradient in gradients.items():
                            if name in parts:
                                sums[name] = sums.get(name, 0) + gradient.reshape(-1)[parts[name]]
                    result = stepped(reducer, sums, shapes)
                    history.append((result, in_whole(reducer, "residuals"), in_whole(reducer, "velocities")))
                return history

            alone = run(N, oracle)
            # A mean divides by the number of ranks, so a node counts as one contributor with m times the mean.
            divisor = m if options["op"] != "sum" else 1
            for step in range(3):
                for name, part in parts.items():
                    expected = (alone[0][step][0][name] / np.float32(divisor)).astype(np.float32)
                    got = on_nodes[0][step][0][name].reshape(-1)[part]
                    np.testing.assert_allclose(got, expected, rtol=1e-6 if m == 3 or N == 3 else 0, err_msg=name)
                    for node in range(N):
                        for kind in (1, 2):
                            if name in alone[node][step][kind]:
                                values = on_nodes[node * m + position][step][kind][name].reshape(-1)[part]
                                np.testing.assert_array_equal(values, alone[node][step][kind][name], err_msg=name)

    check()


@pytest.mark.covering(1)
@every_layout
@pytest.mark.parametrize("options", [{}, {"scope": "tensor", "decay": 1.0}, {"clip": 1e9, "wire": "packed"}], ids=str)
def test_nothing_is_lost_if_sizes_do_not_divide(layout: tuple[int, int], options: dict[str, Any]) -> None:
    """Some buckets are too small for slices, and several calls are in flight."""
    absent, steps = {"a": [0], "c": [1, 2]}, range(3)

    def program(transport: simulated.SimulatedTransport) -> tuple[list[Arrays], Arrays]:
        zeros = {name: np.zeros(shape, np.float32) for name, shape in UNEVEN.items()}
        reducer = sc.Reducer(
            zeros, 0.1, comm=transport, **{"op": "sum", "bucket_bytes": 1500, "dense_below": 0} | options
        )
        sums = [stepped(reducer, gradients_on(transport.rank, step, absent, UNEVEN), UNEVEN) for step in steps]
        return sums, in_whole(reducer, "residuals")

    results = run(layout[0] * layout[1], program, nodes_of(layout))
    assert all([*map(bits, sums)] == [*map(bits, results[0][0])] for sums, _ in results)
    zeros = {name: np.zeros(shape) for name, shape in UNEVEN.items()}
    pushed = [zeros | gradients_on(rank, step, absent, UNEVEN) for rank in range(len(results)) for step in steps]
    after, before = total([*results[0][0], *(waiting for _, waiting in results)]), total(pushed)
    for name in UNEVEN:
        np.testing.assert_allclose(after[name], before[name], atol=1e-4, err_msg=name)


@pytest.mark.parametrize("layout", [(2, 2), (3, 2)])
def test_a_node_sends_what_a_rank_alone_sends(layout: tuple[int, int]) -> None:
    shapes, (num_nodes, per_node) = {"w": (300_000,)}, layout

    def sent(nodes: list[int]) -> float:
        """Return the bytes that leave a node per step."""
        left = [0]

        def program(transport: simulated.SimulatedTransport) -> None:
            reducer = sc.Reducer({"w": np.zeros(shapes["w"], np.float32)}, 0.05, comm=transport, algorithm="double")
            gradient = data.gradient("normal", 300_000, "float32", transport.rank)
            reducer.reduce({"w": gradient.copy()})
            isend, own = transport.isend, nodes[transport.rank]

            def counted(message: Any, to: int, *rest: Any) -> Any:
                left[0] += len(message) * (nodes[to] != own)
                return isend(message, to, *rest)

            transport.isend = counted  # type: ignore[method-assign]
            reducer.reduce({"w": gradient})
            assert reducer.residual("w").size == 300_000 // max(nodes.count(own), 1)

        run(len(nodes), program, nodes)
        return left[0] / num_nodes

    assert sent(nodes_of(layout)) < 1.05 * sent(list(range(num_nodes))) + 500 * per_node


@pytest.mark.parametrize(
    ("nodes", "options", "said"),
    [
        ([0, 0, 1, 1], {}, "2 of 2 ranks, summed densely inside"),
        ([0, 0, 1, 1], {"nodes": False}, ""),
        ([0, 0, 1, 1], {"algorithm": "hierarchical"}, ""),
        ([0, 1, 2], {}, ""),
        ([0, 0, 0], {}, "one, of 3 ranks, which exchange sparsely as if each were a node"),
        ([0, 0, 1], {}, "2 of 1 to 2 ranks; as their sizes differ, every rank counts as a node"),
    ],
)
def test_the_report_says_which_nodes_there_are(
    nodes: list[int], options: dict[str, Any], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    def program(transport: simulated.SimulatedTransport) -> tuple[str, int]:
        reducers = [sc.Reducer({"w": np.zeros(100, np.float32)}, 0.1, comm=transport, **options) for _ in range(2)]
        for reducer in reducers:
            reducer.reduce({"w": np.ones(100, np.float32)})
        return reducers[0].report(), reducers[0].residual("w").size

    node_module._warn_once.cache_clear()
    with caplog.at_level(logging.WARNING, logger="sparsecomm"):
        for report, size in run(len(nodes), program, nodes):
            assert ("nodes  " in report) == bool(said)
            assert said in report
            assert size == (50 if "inside" in said else 100)
    assert len(caplog.records) == ("differ" in said)


@pytest.mark.parametrize("nodes", [None, True, "machines", 2, 0.5, object()])
def test_other_values_of_nodes_are_refused(nodes: Any) -> None:
    with pytest.raises(sc.InvalidInputError, match="expected 'auto', False, or a process group or mpi4py comm"):
        sc.Reducer({"w": np.zeros(3, np.float32)}, nodes=nodes)


def test_options_that_exclude_nodes() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        w = {"w": np.zeros(300, np.float32)}
        with pytest.raises(sc.InvalidInputError, match="'hierarchical' does not work with nodes="):
            sc.Reducer(w, comm=transport, algorithm="hierarchical", nodes=transport)
        with pytest.raises(sc.InvalidInputError, match=r"deadline=2\.0 does not work with nodes="):
            sc.LocalSteps(w, comm=transport, deadline=2.0, nodes=transport)

    run(2, program, [0, 0])


@pytest.mark.parametrize("density", [1.0, 0.25])
@pytest.mark.parametrize("options", [{}, {"outer": sc.NesterovSGD}, {"fragment_sync_delay": 1}], ids=str)
def test_workers_of_local_steps_may_be_nodes(options: dict[str, Any], density: float) -> None:
    """If the ranks of a node train alike, dense rounds equal those with one rank per node."""

    def program(transport: simulated.SimulatedTransport, per_node: int) -> tuple[Arrays, Arrays]:
        parameters = {"a": np.ones((40, 64), np.float32), "b": np.full(512, 2, np.float32)}
        own = {key: value() if key == "outer" else value for key, value in options.items()}
        local = sc.LocalSteps(parameters, density, sync_every=2, comm=transport, **own)
        for step in range(6):
            rng = np.random.default_rng([transport.rank // per_node, step])
            for parameter in parameters.values():
                parameter -= rng.integers(-4, 5, parameter.shape).astype(np.float32) / 64
            local.step(parameters)
        local.finish(parameters)
        return {name: array.copy() for name, array in local.global_parameters().items()}, parameters

    all_outputs = run(4, lambda transport: program(transport, 2), [0, 0, 1, 1])
    assert all([*map(bits, outputs)] == [*map(bits, all_outputs[0])] for outputs in all_outputs)
    if density == 1.0:
        assert [*map(bits, all_outputs[0])] == [*map(bits, run(2, lambda transport: program(transport, 1), [0, 1])[0])]


@pytest.mark.covering(1)
@every_layout
@pytest.mark.parametrize("density", [0.001, 0.3])
def test_explain_says_what_a_reducer_chooses(layout: tuple[int, int], density: float) -> None:
    n, options = 48_000, {"algorithm": "fastest", "wire": "auto"}

    def program(transport: simulated.SimulatedTransport) -> tuple[Any, ...]:
        explanation = sc.explain(n, density, comm=transport, nodes="auto", **options)
        reducer = sc.Reducer({"w": np.zeros(n, np.float32)}, density, comm=transport, **options)
        reducer.reduce({"w": np.ones(n, np.float32)})
        plan = reducer.buckets[0].last_plan
        assert plan is not None
        assert f"on {layout[0]} nodes, for each of {layout[1]} slices, whose calls share the link" in str(explanation)
        return explanation.candidates[0], plan.choice

    network = {"alpha": 1e-4, "beta": 8e-9, "node_alpha": 1e-6, "node_beta": 1e-10}
    for expected, chosen in run(layout[0] * layout[1], program, nodes_of(layout), **network):
        assert (expected.algorithm, expected.wire, expected.seconds) == (chosen.algorithm, chosen.wire, chosen.seconds)
