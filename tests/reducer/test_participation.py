"""A tensor takes part in a step where a rank has a gradient for it: nothing else of it changes, and all ranks know."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.calls.plan import Options, Plan
from sparsecomm.calls.queue import queue_of
from sparsecomm.calls.sparse import SumCall
from sparsecomm.contribution import Contribution, Segment
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Link
from sparsecomm.reducer import step as step_module
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import CPU, tensor
from sparsecomm.transport import simulated
from sparsecomm.tuning.profile import KnownCosts, measured
from sparsecomm.wire import WIRES
from tests import data, reference
from tests.ranks import nodes_of
from tests.reducer.programs import SHAPES, Arrays, bits, gradients, reducer_of, residuals, run, same, total

ALGORITHMS = [*sc.algorithms(), "hierarchical:split", "split:2"]
PRESENT, ABSENT = ["push", "parts"], ["nothing", "None", "None, out"]
SENT = {name for name, shape in SHAPES.items() if np.prod(shape)}
EXACT = [name for name, wire in WIRES.items() if not wire.kind.planes]  # whole numbers stay as they are
CHECK = settings(max_examples=5, phases=[Phase.generate])


# -- the bit in the header --------------------------------------------------------------------------------------------


class OddCall(SumCall):
    """A call to which one rank, or none, contributes incompletely."""

    incomplete = False

    def _begin(self) -> None:
        self.plan.comm.begin(self._label, incomplete=self.incomplete)


@pytest.mark.covering(1)
@pytest.mark.parametrize("P", range(1, 10))
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_all_ranks_learn_that_one_contribution_is_incomplete(P: int, algorithm: str) -> None:
    """Whichever it is, on any number of nodes, with few owners of ranges and many, sent to all at once or handed on."""
    far, n = measured(Link(1e-6, 1e-9, 1e-4), Link(1e-6, 1e-9, 1e-4)), 600

    def program(transport: simulated.SimulatedTransport, k: int, costs: KnownCosts | None) -> None:
        queue = queue_of(transport)
        backend = queue.backends.of(CPU)
        plan = Plan(transport, backend, FLOAT32, (n,), n, k, Options.of(algorithm, "sum", "packed"), costs)
        for odd in (None, *range(P)):
            x = data.integers(n, "float32", transport.rank) * (transport.rank != 1)  # one has no entries
            call = OddCall(plan, Contribution(backend, [Segment(tensor(x, "x"), None)], None, (n,), n))
            call.incomplete = transport.rank == odd
            queue.call(call)
            assert plan.comm.incomplete == (odd is not None), odd

    for k, costs, nodes in ((1, None, range(P)), (40, far, nodes_of(P)), (300, None, nodes_of(P)), (300, far, [0] * P)):
        simulated.run(P, lambda transport, k=k, costs=costs: program(transport, k, costs), node_of_rank=nodes)


# -- a training, against plain NumPy ----------------------------------------------------------------------------------


class Seen(NamedTuple):
    """What one rank had before a step, what it pushed, and what it had afterwards."""

    how: dict[str, str]
    gradients: Arrays
    residuals: tuple[Arrays, Arrays]
    velocities: tuple[Arrays, Arrays]
    outs: Arrays
    step: sc.Step
    groups: list[list[str]]


def trained(
    transport: simulated.SimulatedTransport, options: dict[str, Any], hows: list[list[dict[str, str]]], seed: int
) -> list[Seen]:
    """Steps in which each rank pushes some gradients, as it is told by step, rank and name."""
    reducer, found = reducer_of(transport, **options), []
    for step, everyones in enumerate(hows):
        how, given_, outs = everyones[transport.rank], gradients(seed + 10 * step + transport.rank), {}
        before, groups = reducer.state_dict(), reducer.groups
        for name, what in how.items():
            gradient = given_[name].copy() if what in PRESENT else None
            if what != "nothing":
                outs |= {name: np.full(SHAPES[name], 7, np.float32)} if what != "None" else {}
                reducer.push(name, gradient, out=outs.get(name))
        done = reducer.wait()
        after = reducer.state_dict()
        kept = [(before[kind], after[kind]) for kind in ("residuals", "velocities")]
        found.append(Seen(how, given_, *kept, outs, done, groups))
    return found


@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_what_has_no_gradient_stays_as_it_is_and_nothing_is_lost(algorithm: str) -> None:
    """On one rank: it counts as zeros. On all: it does not take part."""
    options = {
        "scope": st.sampled_from(["tensor", "bucket", "model", *(["chunk"] if algorithm != "double" else [])]),
        "density": st.sampled_from([0.02, 0.1, 0.5, 1.0]),
        "wire": st.sampled_from(EXACT),
        "dense_below": st.sampled_from([0, 100, 10_000]),
        "momentum": st.sampled_from([0.0, 0.5]),
        "masking": st.booleans(),
        "decay": st.just(1.0) if algorithm == "dense" else st.sampled_from([1.0, 0.5]),
        "skip_nonfinite": st.booleans(),
    }

    @CHECK
    @given(st.integers(1, 8), data.seeds, st.fixed_dictionaries(options))
    def check(P: int, seed: int, options: dict[str, Any]) -> None:
        rng, steps = random.Random(seed), []
        for _ in range(3):
            ways = {name: [*PRESENT, *ABSENT] if rng.random() < 0.6 else ABSENT for name in SHAPES}
            steps.append([{name: rng.choice(its) for name, its in ways.items()} for _ in range(P)])
        options |= {"algorithm": algorithm, "chunk": 100}
        for seen in zip(*run(P, lambda r: trained(r, options, steps, seed)), strict=True):
            check_step(seen, options)

    check()


def check_step(seen: tuple[Seen, ...], options: dict[str, Any]) -> None:
    P, results = len(seen), []
    has = [{name for name, what in each.how.items() if what in PRESENT} for each in seen]
    nowhere = SENT - set().union(*has)
    inputs, kept = [], []  # what enters the sum, and what each rank keeps out of it
    for each, present in zip(seen, has, strict=True):
        assert each.step.usable
        assert each.step.without_gradient == nowhere
        assert each.step.left.keys() == SENT - present - nowhere - each.outs.keys()
        result = {name: part.to_dense() for name, part in each.step.left.items()}
        for name, out in each.outs.items():
            if name in nowhere:
                assert (out == 7).all()
            elif name in SENT:
                result[name] = out
        results.append(bits(dict(sorted(result.items()))))
        (before, after), (velocities, velocities_after) = each.residuals, each.velocities
        entered = {}
        for name, gradient in each.gradients.items():
            velocity = options["momentum"] * velocities.get(name, 0) + gradient
            entered[name] = (options["decay"] * before[name] + velocity) * (name in present)
            if velocities and name not in present:  # which another rank's result may have masked
                masked = (result.get(name, 0) != 0) & options["masking"] & (velocities_after[name] == 0)
                assert (masked | (velocities_after[name] == velocities[name])).all()
            if name in nowhere:
                assert bits({name: before[name]}) == bits({name: after[name]})
        inputs.append(entered)
        kept.append({name: array for name, array in before.items() if name not in present})
    assert all(result == results[0] for result in results)
    assert len({repr(each.groups) for each in seen}) == 1
    sums = {name: np.zeros(shape, np.float32) for name, shape in SHAPES.items()} | result
    same(total([*(each.residuals[1] for each in seen), sums]), total([*inputs, *kept]))
    if options["wire"] in ("plain", "packed") and options["scope"] != "chunk":
        for group in seen[0].groups:
            xs = [np.concatenate([x[name].reshape(-1) for name in group]).astype(np.float32) for x in inputs]
            n = len(xs[0])
            whole = options["density"] == 1.0 or max(np.prod(SHAPES[name]) for name in group) < options["dense_below"]
            k = max(1, round(options["density"] * n))
            kind = "dense" if whole else options["algorithm"]
            expected = reference.allreduce(kind, xs, k, nodes_of(P))
            mine = [sums[name].reshape(-1) for name in group]
            np.testing.assert_array_equal(np.concatenate(mine), reference.dense(expected, n))


def lacking(reducer: sc.Reducer, mine: Arrays, absent: str) -> sc.Step:
    """A step in which this rank has no gradients of these names."""
    return reducer.reduce({name: None if name in absent else gradient for name, gradient in mine.items()})


@pytest.mark.parametrize("P", [1, 3])
@pytest.mark.parametrize("scope", ["tensor", "model"])
@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_a_step_that_is_not_finite_changes_nothing_of_what_has_no_gradient(P: int, scope: str, momentum: float) -> None:
    """And all ranks see that it is not, whatever lies in front of the tensor that is not finite."""

    def program(transport: simulated.SimulatedTransport) -> None:
        options = {"scope": scope, "momentum": momentum, "skip_nonfinite": True, "algorithm": "split"}
        reducer = reducer_of(transport, **options)
        reducer.reduce(gradients(transport.rank))
        before, mine = reducer.state_dict(), gradients(10 + transport.rank)
        absent = "fea" if transport.rank == 0 else "fe"
        velocities = {name: momentum * before["velocities"].get(name, 0) + mine[name] for name in SHAPES}
        entered = {name: velocities[name] * (name not in absent) for name in SHAPES}
        if transport.rank == P - 1:
            mine["c"][100] = np.inf
            entered["c"][:] = 0
        step = lacking(reducer, mine, absent)
        assert not step.usable
        assert step.without_gradient == set("fe" if P > 1 else "fea")
        assert np.isnan(mine["c"]).any()
        same(residuals(reducer), total([before["residuals"], entered]))
        after = reducer.state_dict()["velocities"]
        assert bits({name: after[name] for name in absent if after}) == bits(
            {name: before["velocities"][name] for name in absent if after}
        )

    run(P, program)


@pytest.mark.parametrize("whole", [False, True])
def test_a_call_that_fails_changes_nothing_without_a_gradient(whole: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Here it fails on one rank when the other waits for the names that it lacks."""
    gathered = step_module.gather_words

    def fails(comm: Communicator, words: list[int], round_no: int) -> list[list[int]]:
        if comm.rank == 1 and comm.num_elements == 500:
            raise comm.broken(0, "nothing that fits")
        return gathered(comm, words, round_no)

    def program(transport: simulated.SimulatedTransport) -> Any:
        reducer = reducer_of(transport, scope="tensor", algorithm="split", skip_nonfinite=whole)
        reducer.reduce(gradients(transport.rank))
        before, mine, absent = residuals(reducer), gradients(10 + transport.rank), "ca" if transport.rank == 0 else "a"
        given_ = {name: gradient * (name not in absent) for name, gradient in mine.items()}
        with pytest.raises(sc.CollectiveMismatchError, match=r"that fits|left call"):
            lacking(reducer, mine, absent)
        after, lost = residuals(reducer), SENT if whole else {"c"}
        assert set(reducer.unsummed) == lost
        same({name: after[name] for name in lost | {"a"}}, {name: before[name] + given_[name] for name in lost | {"a"}})
        sums = gradients(20 + transport.rank)
        assert reducer.reduce(sums).without_gradient == set()
        return after, sums, residuals(reducer)

    with monkeypatch.context() as patch:
        patch.setattr(step_module, "gather_words", fails)
        results = run(2, program)
    same(results[0][1], results[1][1])
    pushed = total(gradients(20 + rank) for rank in range(2))
    same(total([results[0][1], *(r[2] for r in results)]), total([pushed, *(r[0] for r in results)]))


@pytest.mark.parametrize("options", [{}, {"clip": 1e9}, {"skip_nonfinite": True}], ids=str)
def test_a_step_that_is_left_keeps_what_was_set_aside(options: dict[str, Any]) -> None:
    """Some of its calls have been made when ranks are found to be lost, and others have not."""

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = reducer_of(transport, scope="tensor", **options)
        reducer.reduce(gradients(transport.rank))
        before, pushed = residuals(reducer), gradients(10)["a"]
        reducer.push("f", None)
        reducer.push("a", pushed)
        reducer.rebuild(transport)
        assert "a" in reducer.unsummed
        assert ("f" in reducer.unsummed) == bool(options)  # its call was made, or did not count
        same(residuals(reducer), before | {"a": before["a"] + pushed})

    run(2, program)


def test_discard_drops_what_waits_for_some_names_or_all() -> None:
    def program(transport: simulated.SimulatedTransport) -> None:
        reducer = reducer_of(transport, algorithm="double", momentum=0.5, masking=False)
        for names in (["a", "c"], "f", None):
            reducer.reduce(gradients(transport.rank))
            before = reducer.state_dict()
            with pytest.raises(sc.InvalidInputError, match="'x' is not the name of one of this Reducer"):
                reducer.discard(["a", "x"])
            assert bits(reducer.state_dict()["residuals"]) == bits(before["residuals"])
            reducer.discard(names)
            after = reducer.state_dict()
            for kind in ("residuals", "velocities"):
                for name in SHAPES:
                    kept = names is not None and name not in names
                    np.testing.assert_array_equal(after[kind][name], before[kind][name] * kept)
        assert all(residuals(reducer)["c"] == 0)

    run(3, program)


def test_a_complete_step_sends_nothing_more_and_each_incomplete_call_one_small_message() -> None:
    """Of more tensors than a word has bits."""
    tensors = {f"{i}": np.ones(3, np.float32) for i in range(70)} | {"large": np.ones(500, np.float32)}

    def program(transport: simulated.SimulatedTransport) -> None:
        reducer, sent = sc.Reducer(tensors, 0.1, comm=transport, dense_below=10, algorithm="butterfly"), []
        for absent in ((), ("3", "69"), ("3", "69", "large")):
            before = reducer.counters.copy()
            mine = {name: None if name in absent[transport.rank :] else a.copy() for name, a in tensors.items()}
            assert reducer.reduce(mine).without_gradient == set(absent[1:])
            added = reducer.counters.since(before)
            sent.append((added["sparsecomm/messages_sent"], added["sparsecomm/bytes_sent"]))
        (messages, nbytes), *others = sent
        assert [number for number, _ in others] == [messages + 1, messages + 2]
        assert all(more - nbytes < 200 * (number - messages) for number, more in others)

    run(2, program)
