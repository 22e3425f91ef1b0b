"""The measurement of links before the first call without a profile: its precision, its cost and its failures."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from random import Random
from typing import Any, TypeVar

import numpy as np
import pytest
from hypothesis import Phase, example, given, settings
from hypothesis import strategies as st

import sparsecomm as sc
from sparsecomm.calls import collectives
from sparsecomm.calls.measurement import costs_for_steps, costs_of, measured_links
from sparsecomm.calls.queue import Handle
from sparsecomm.local_steps.defaults import auto_algorithm
from sparsecomm.transport import simulated
from sparsecomm.transport.base import HOST
from sparsecomm.tuning import clocks
from sparsecomm.tuning.profile import KnownCosts
from tests.ranks import run

T = TypeVar("T")
N, K = 40, 5
STEP = 10**0.05 * 1.01  # largest factor by which rounding to ten values per decade changes a value


def gradient(rank: int, number: int) -> np.ndarray:
    """Return integers, whose sums are exact."""
    return np.random.default_rng([rank, number]).integers(-8, 9, N).astype(np.float32)


# -- precision --------------------------------------------------------------------------------------------------------


def networks(max_ranks: int) -> Any:
    """Return a decorator for tests of ``(nodes, alpha, rate, random)``."""
    return given(
        st.integers(2, max_ranks).flatmap(lambda P: st.lists(st.integers(0, 4), min_size=P, max_size=P)),
        st.floats(1e-6, 0.1),
        st.floats(5e7, 1e11),
        st.randoms(use_true_random=False),
    )


def measured(
    measure: Callable[[simulated.SimulatedTransport], T], nodes: list[int], alpha: float, rate: float, random: Any
) -> tuple[T, list[float]]:
    """Return what all ranks measure, and how far their clocks are ahead. Some ranks begin late."""
    ahead = [random.uniform(-1e3, 1e3) for _ in nodes]
    lates = [random.choice([0.0, random.uniform(0, 3 * alpha), 1.0]) for _ in nodes]

    def program(transport: simulated.SimulatedTransport) -> T:
        transport.clock = lambda: transport.seconds + ahead[transport.rank]  # type: ignore[method-assign]
        return measure(transport)

    inside = {"node_alpha": 1e-6, "node_beta": 1e-10}
    results = run(len(nodes), program, nodes, alpha=alpha, beta=8 / rate, delays=lates, **inside)
    assert results == results[:1] * len(nodes)
    return results[0], ahead


@settings(max_examples=40)
@networks(17)
def test_measured_links_match_the_network(nodes: list[int], alpha: float, rate: float, random: Any) -> None:
    known, _ = measured(costs_of, nodes, alpha, rate, random)
    costs, several, shared = known.costs, len(set(nodes)) > 1, len(set(nodes)) < len(nodes)
    assert (costs.node is not None) == shared
    expected = [(costs.link, alpha, 8 / rate)] if several else [(costs.link, 1e-6, 1e-10)]
    if costs.node is not None:
        expected.append((costs.node, 1e-6, 1e-10))
    # On nodes of unequal size some messages wait for others in the same round.
    equal = len(set(Counter(nodes).values())) == 1
    waits, slower = (200, 1.6) if equal else (256, 1.75)
    for link, delay, beta in expected:
        assert delay / STEP <= link.alpha <= (delay + waits * beta) * STEP
        assert beta / STEP <= link.beta <= beta * STEP * slower
    assert known.source.startswith("measured at set-up: ")
    assert ("between nodes" in known.source, "inside" in known.source) == (several, shared)


@settings(max_examples=2, phases=[Phase.explicit, Phase.generate])
@networks(7)
@example([0, 1], 1e-5, 1e10, Random(1))
def test_a_time_budget_makes_the_measurement_more_precise(
    nodes: list[int], alpha: float, rate: float, random: Any
) -> None:
    """It also finds the clock offsets of all ranks."""
    links, ahead = measured(lambda transport: measured_links(transport, 0.02), nodes, alpha, rate, random)
    several, shared = len(set(nodes)) > 1, len(set(nodes)) < len(nodes)
    assert (links.between is not None, links.inside is not None) == (several, shared)
    for link, delay, beta in ((links.between, alpha, 8 / rate), (links.inside, 1e-6, 1e-10)):
        if link is not None:
            assert link.alpha == pytest.approx(delay, rel=0.05, abs=200 * beta)
            assert link.beta == pytest.approx(beta, rel=0.1)
            assert link.gap <= 200 * beta + 1.01e-8
    far = alpha if several else 1e-6
    assert 2 * far <= links.round_trip <= 2 * (far + 200 * 8 / rate)
    for rank, offset in clocks.offsets(range(len(nodes)), links.fastest).items():
        assert offset.seconds == pytest.approx(ahead[rank] - ahead[0], abs=offset.bound + 1e-6)
        assert offset.bound <= 4 * (alpha + 200 * 8 / rate)


def test_the_room_for_a_long_message_is_known_when_its_receive_is_posted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over MPI, a message without room waits until it has been probed."""
    receive, rooms = simulated.SimulatedTransport.receive, []

    def recorded(transport: Any, source: int, memory: Any = HOST, expected: int = 0) -> Any:
        message = receive(transport, source, memory, expected)
        if len(message) > 10_000:
            rooms.append((expected, len(message)))
        return message

    monkeypatch.setattr(simulated.SimulatedTransport, "receive", recorded)
    run(2, costs_of, [0, 1], alpha=1e-5, beta=1e-9)
    assert len(rooms) >= 2
    assert all(expected == length for expected, length in rooms)


@pytest.mark.parametrize("P", [2, 3, 4, 8, 16, 64])
def test_a_measurement_takes_one_and_a_half_round_trips(P: int) -> None:
    """With an odd number of nodes, it takes one round trip more."""
    trips = max(
        result.seconds for result in simulated.run(P, lambda transport: costs_of(transport).checksum, alpha=1.0)
    )
    assert trips == 3 + 2 * (P % 2)


# -- when links are measured ------------------------------------------------------------------------------------------


def test_links_with_round_trips_from_5_ms_are_timed_once() -> None:
    def program(transport: simulated.SimulatedTransport) -> int:
        costs_of(transport)
        return transport.counters.messages_sent

    near, far = (run(2, program, alpha=alpha, nodes=[0, 1]) for alpha in (2.4e-3, 2.6e-3))
    assert 2 * sum(far) < sum(near)


@pytest.mark.parametrize(
    ("options", "setting", "calls"),  # on one node, and on two
    [
        ({}, None, (2, 2)),
        ({}, "none", (1, 1)),
        ({"algorithm": "tree"}, None, (1, 2)),  # one node: the wire format alone does not need costs
        ({"algorithm": auto_algorithm(1), "wire": "packed_int2"}, None, (2, 2)),
        ({"algorithm": "tree", "wire": "packed"}, None, (1, 2)),
    ],
)
@pytest.mark.parametrize("nodes", [[0], [0, 0], [0, 1], [0, 0, 0, 1, 1]], ids=str)
def test_links_are_measured_once_per_communicator_if_costs_matter(
    options: dict[str, Any],
    setting: str | None,
    calls: tuple[int, int],
    nodes: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    P = len(nodes)
    if setting:
        monkeypatch.setenv("SPARSECOMM_PROFILE", setting)

    def program(transport: simulated.SimulatedTransport) -> list[int]:
        numbers = []
        for number in range(3):
            sc.sparse_allreduce(gradient(transport.rank, number), K, comm=transport, **options)
            numbers.append(transport.number)
        return numbers

    first = calls[len(set(nodes)) - 1] if P > 1 else 1
    assert run(P, program, nodes) == [[first, first + 1, first + 2]] * P


@pytest.mark.parametrize("measures", [True, False], ids=["the next call measures", "the next call does not"])
def test_an_interrupted_measurement_is_not_repeated(measures: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A reducer that is interrupted during the measurement waits for the same measurement again."""

    def interrupted(handle: Handle) -> None:
        raise KeyboardInterrupt

    def program(transport: simulated.SimulatedTransport) -> int:
        if transport.rank == 0:
            with monkeypatch.context() as patch:
                patch.setattr(Handle, "wait", interrupted)
                for costs in (costs_for_steps, costs_of):
                    with pytest.raises(KeyboardInterrupt):
                        costs(transport)
        if measures:
            costs_for_steps(transport)
        else:
            sc.sparse_allreduce(gradient(transport.rank, 0), K, comm=transport, algorithm="tree")
        return transport.number

    assert run(2, program, [0, 1]) == [1 if measures else 2] * 2


def test_explain_uses_the_costs_of_calls() -> None:
    def program(transport: simulated.SimulatedTransport) -> tuple[str, int]:
        said = str(sc.explain(N, K, comm=transport))
        sc.sparse_allreduce(gradient(transport.rank, 0), K, comm=transport)
        assert str(sc.explain(N, K, comm=transport)) == said
        return said, transport.number

    results = run(3, program, [0, 1, 2], alpha=0.04, beta=4e-8)
    assert results == results[:1] * 3
    assert results[0][1] == 2
    assert "costs: measured at set-up: 40 ms, 200 Mb/s between nodes\n" in results[0][0]


# -- errors -----------------------------------------------------------------------------------------------------------


def failing(transport: simulated.SimulatedTransport, place: int, error: BaseException) -> None:
    """Make operation number ``place`` of a rank's first call fail; sends, receives and exchanges count."""
    count = 0

    def around(operation: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any, **kwargs: Any) -> Any:
            nonlocal count
            count += 1
            if transport.number == 1 and count == place + 1:
                raise error
            return operation(*args, **kwargs)

        return counted

    transport.isend, transport.receive, transport.exchange = map(
        around, (transport.isend, transport.receive, transport.exchange)
    )  # type: ignore[method-assign]


@pytest.mark.covering(1)
@pytest.mark.parametrize("nodes", [[0, 1], [0, 0, 0], [0, 0, 1, 1], list(range(5))], ids=str)
@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt])
@pytest.mark.parametrize("alpha", [1e-6, 1e-2])
def test_a_rank_that_fails_during_a_measurement(nodes: list[int], kind: type[BaseException], alpha: float) -> None:
    """All ranks leave the measurement, or raise a mismatch next. No gradient is lost, and later calls succeed."""
    P = len(nodes)
    for place in range(0, 60, 3):
        came = []

        def program(transport: simulated.SimulatedTransport) -> tuple[np.ndarray, ...]:
            if transport.rank == P - 1:
                failing(transport, place, kind())  # noqa: B023
            residual, total, gradients = (np.zeros(N, np.float32) for _ in range(3))
            failed = 0
            while True:
                x = gradient(transport.rank, failed)
                gradients += x
                before, expected = sc.last_call(transport).number, residual + x
                try:
                    result = sc.sparse_allreduce(x, K, comm=transport, residual=residual)
                    break
                except (sc.TransportError, sc.CollectiveMismatchError, kind) as error:
                    came.append(type(error))  # noqa: B023
                    last = sc.last_call(transport)
                    assert last.number > before
                    assert not last.succeeded
                    np.testing.assert_array_equal(residual, expected)
                failed += 1
                assert failed < 4
            total[result.indices] = result.values
            return residual, total, gradients

        results = run(P, program, nodes, alpha=alpha, beta=1e-9)
        residuals, totals, gradients = (sum(part) for part in zip(*results, strict=True))
        np.testing.assert_array_equal(residuals + totals / P, gradients)
        assert all(np.array_equal(result[1], results[0][1]) for result in results)
        if not came:  # the first call has fewer operations
            break
    else:
        pytest.fail("the last place was within the call, too")


@pytest.mark.parametrize("kind", [OSError, KeyboardInterrupt, sc.TransportError])
@pytest.mark.parametrize("stage", ["begin", "begun", "measured"])
def test_a_rank_that_fails_beside_a_measurement(
    kind: type[BaseException], stage: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All ranks learn of it. The call counts as begun and failed, so the gradient is in the residual."""
    plan_costs = collectives.plan_costs

    def fails_afterwards(transport: simulated.SimulatedTransport, *others: Any) -> KnownCosts:
        costs = plan_costs(transport, *others)
        if transport.rank == 1:
            raise kind
        return costs

    def program(transport: simulated.SimulatedTransport) -> None:
        residual, x = np.ones(N, np.float32), gradient(transport.rank, 0)
        right, failed = transport.begin, []

        def begin(*args: Any) -> None:
            if stage == "begun" or failed:
                right(*args)
            if not failed:
                failed.append(True)
                raise kind

        if transport.rank == 1 and stage != "measured":
            transport.begin = begin  # type: ignore[method-assign]
        with pytest.raises(kind if transport.rank == 1 else sc.TransportError):
            sc.sparse_allreduce(x, K, comm=transport, residual=residual)
        assert sc.last_call(transport).number > 0
        assert not sc.last_call(transport).succeeded
        np.testing.assert_array_equal(residual, x + 1)

    if stage == "measured":
        monkeypatch.setattr(collectives, "plan_costs", fails_afterwards)
    run(3, program)
