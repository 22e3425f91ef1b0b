"""Predicted utilisation: against published measurements, laws of TCP, and general properties."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sparsecomm.primitives.costs import Link
from sparsecomm.tuning.equal_loss import TRAINED, nats, relative_steps
from sparsecomm.tuning.profile import DEFAULT
from sparsecomm.tuning.utilisation import GLOO, SEGMENT, Exchange, Network, Training, predict, stream_rate
from sparsecomm.wire import HEADER_BYTES

PUBLISHED = {
    (1, 50e6): 0.0007, (8, 50e6): 0.0055, (32, 50e6): 0.0241, (128, 50e6): 0.1155,
    (1, 200e6): 0.0032, (8, 200e6): 0.0248, (32, 200e6): 0.1001, (128, 200e6): 0.3609,
    (1, 1e9): 0.0174, (8, 1e9): 0.1235, (32, 1e9): 0.3601, (128, 1e9): 0.7152,
    (1, 5e9): 0.0776, (8, 5e9): 0.4024, (32, 5e9): 0.6810, (128, 5e9): 0.8700,
}  # fmt: skip
THEIRS = Training(4, 30_800_000, 0.030)

trainings = st.builds(
    Training, st.integers(2, 32), st.integers(10**4, 10**9), st.floats(1e-3, 10).filter(lambda seconds: seconds > 0)
)
networks = st.builds(
    Network,
    st.floats(1e6, 1e11),
    st.sampled_from([0.0, 1e-4, 2e-3, 0.02, 0.08, 0.3]),
    st.sampled_from([0.0, 1e-5, 1e-3, 0.02]),
    st.just(1),
    st.sampled_from([None, 1, 8]),
    st.sampled_from(["cubic", "bbr"]),
)
exchanges = st.builds(
    Exchange,
    st.sampled_from([GLOO, "allgather", "split:2", "butterfly", "dense"]),
    st.sampled_from(["plain", "packed"]),
    st.sampled_from([1e-3, 1 / 64]),
    st.sampled_from([None, 1, 8, 100]),
) | st.builds(
    Exchange,
    st.sampled_from([GLOO, "double"]),
    st.sampled_from(["packed_int2", "packed_sign"]),
    st.sampled_from([0.018, 0.1]),
    overlap=st.booleans(),
    adamw=st.booleans(),
)


# -- published measurements, and TCP ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("H", "rate"), PUBLISHED)
def test_dense_cells_are_those_published(H: int, rate: float) -> None:
    """Their 50 Mb/s links delivered 40 Mb/s with H = 1 to 32 and 50 with H = 128, so small H deviates more."""
    utilisation = predict(THEIRS, Network(rate), Exchange(sync_every=H)).utilisation
    assert utilisation == pytest.approx(PUBLISHED[H, rate], abs=0.05)
    assert utilisation / PUBLISHED[H, rate] == pytest.approx(1, abs=0.45)


@pytest.mark.parametrize(("rtt", "loss"), [(0.08, 1e-3), (0.02, 1e-3), (0.1, 1e-2)])
def test_a_long_message_on_a_lossy_path_is_as_slow_as_by_mathis(rtt: float, loss: float) -> None:
    """Mathis: 1.22 MSS / (RTT sqrt(loss)), or 5.6 Mb/s at 80 ms and 0.1 %. Measured with Reno: 5.2 to 8.7."""
    network = Network(1e9, rtt, loss)
    expected = 8 * SEGMENT * 1.22 / (rtt * math.sqrt(loss))
    assert stream_rate(network) == pytest.approx(expected)
    prediction = predict(Training(2, 100_000_000, 1.0), network, Exchange())
    assert 8 * prediction.nbytes / prediction.seconds == pytest.approx(expected, rel=0.15)


# Seconds of gloo's all_reduce of n floats: PyTorch 2.13, 4 ranks, emulated links (`bench.slow_network`) after 0.5 s
# without traffic; median of three.
GLOO_SECONDS = {
    (1000, 200e6, 0.08): 0.486, (500_000, 200e6, 0.08): 0.649, (2_500_000, 200e6, 0.08): 1.33,
    (10_000_000, 200e6, 0.08): 4.52, (1000, 1e9, 0.08): 0.485, (500_000, 1e9, 0.08): 0.588,
    (2_500_000, 1e9, 0.08): 0.938, (10_000_000, 1e9, 0.08): 2.82, (1000, 1e9, 0.02): 0.133,
    (500_000, 1e9, 0.02): 0.167, (2_500_000, 1e9, 0.02): 0.295, (10_000_000, 1e9, 0.02): 1.02,
    (10_000_000, 200e6, 0.0): 2.58,
}  # fmt: skip


@pytest.mark.parametrize(("n", "rate", "rtt"), GLOO_SECONDS)
def test_gloo_waits_a_round_trip_for_every_two_segments(n: int, rate: float, rtt: float) -> None:
    prediction = predict(Training(4, n, 0.5), Network(rate, rtt), Exchange(sync_every=1))
    own = 3 * DEFAULT.add * n
    assert prediction.seconds - own == pytest.approx(GLOO_SECONDS[n, rate, rtt], rel=0.2)


@pytest.mark.parametrize(
    ("algorithm", "phases", "peers"), [("allgather", 1, 7), ("split", 1, 7), ("butterfly", 3, 1), ("tree", 6, 1)]
)
def test_windows_open_on_as_many_connections_as_an_algorithm_has(algorithm: str, phases: int, peers: int) -> None:
    """40 segments take windows of 10, 20 and a quarter of 40: 1.75 round trips more than 2 segments."""
    network, exchange = Network(1e12, 0.1, connections=1), Exchange(algorithm, "plain", 0.1, adamw=True)

    def seconds(segments: int) -> float:
        n, goal = 10**6, segments * phases * peers * SEGMENT
        for _ in range(3):
            prediction = predict(Training(8, n, 100.0), network, exchange)
            n = round(n * goal / prediction.nbytes)
        return prediction.seconds

    assert seconds(40) - seconds(2) == pytest.approx(phases * 0.175, rel=0.03)


def test_without_a_pause_windows_stay_open() -> None:
    network, exchange = Network(1e12, 0.1, connections=1), Exchange("butterfly", "plain", 0.1)
    pause, none = (predict(Training(2, 10**6, seconds), network, exchange) for seconds in (100.0, 1e-3))
    assert pause.seconds > none.seconds + 0.2
    kept = predict(Training(2, 10**6, 100.0), replace(network, congestion="bbr"), exchange)
    assert kept.seconds == pytest.approx(none.seconds, rel=0.05)


def test_losses_and_short_queues_cost_round_trips_and_timeouts() -> None:
    """About 1 in 40 groups of 24 short messages loses one. A short queue drops parts of 2 MB on 144 connections."""
    training, exchange = Training(4, 10**4, 1.0), Exchange("butterfly", "plain", 1e-3)
    clean, lossy = (predict(training, Network(1e9, 0.1, loss), exchange).seconds for loss in (0.0, 1e-3))
    assert 0 < lossy - clean < 0.1
    training, exchange = Training(4, 30_846_720, 0.03), Exchange("allgather", "packed_int2", 1 / 64, 8)
    short, enough = (predict(training, Network(50e6, 0.08, queue=queue), exchange) for queue in (0.08, 1.0))
    assert 0.2 < short.seconds - enough.seconds < 0.6


def test_owners_share_the_work_of_adamw() -> None:
    """Extra work plus the time of fused AdamW is proportional to the bytes read, as in docs/reports/adamw.md."""
    n, costs = 10**8, replace(DEFAULT, select=0.0, merge=0.0, codec=0.0, call=0.0)
    exchange, fused = Exchange("double", "packed_int2", 0.09, adamw=True), 18.3e-3 / 25.6e6 * n
    four, eight = (fused + predict(Training(P, n, 1.0), Network(1e9), exchange, costs).work for P in (4, 8))
    assert four / eight == pytest.approx(28.2 / 24.1, rel=0.01)
    assert four == pytest.approx(56.0e-3 / 25.6e6 * n * 28.2 / 43, rel=0.02)


# -- consistency ------------------------------------------------------------------------------------------------------


@settings(max_examples=150)
@given(trainings, networks, exchanges)
def test_better_networks_longer_rounds_and_more_cores_help(
    training: Training, network: Network, exchange: Exchange
) -> None:
    prediction = predict(training, network, exchange)
    assert 0 <= prediction.utilisation <= 1
    for better in (
        replace(network, rate=2 * network.rate),
        replace(network, rtt=network.rtt / 2),
        replace(network, loss=network.loss / 2),
        replace(network, loss=0.0),
    ):
        assert predict(training, better, exchange).utilisation >= prediction.utilisation - 0.01, better
    assert predict(training, replace(network, queue=10.0), exchange).seconds <= prediction.seconds * (1 + 1e-9)
    shared = predict(replace(training, cores_per_rank=0.5), network, exchange)
    assert shared.round_seconds >= prediction.round_seconds
    if shared.algorithm == prediction.algorithm and not exchange.overlap:
        assert shared.round_seconds - prediction.round_seconds == pytest.approx(prediction.work, rel=0.2, abs=1e-3)
    H = exchange.sync_every or 1
    of_rounds = replace(exchange, sync_every=H)
    prediction = predict(training, network, of_rounds)
    assert predict(training, network, replace(of_rounds, sync_every=4 * H)).utilisation >= prediction.utilisation - 1e-3
    delays = [predict(training, network, replace(of_rounds, delay=delay)).utilisation for delay in (0, H // 2, H - 1)]
    assert delays == sorted(delays)
    without = predict(training, Network(1e15), exchange)  # leaves only work and fixed costs of messages
    lowest = (exchange.sync_every or 1) * training.step_seconds + without.work * (not exchange.overlap)
    assert lowest * (1 - 1e-9) <= without.round_seconds
    assert without.round_seconds <= lowest + without.work + 0.05 + 1e-9 * training.parameters


@settings(max_examples=150)
@given(trainings, networks, st.sampled_from([GLOO, "double"]), st.sampled_from([0.018, 0.1]))
def test_calls_wait_for_each_other(training: Training, network: Network, algorithm: str, density: float) -> None:
    """Overlap hides at most the backward pass; a longer queue drains after it."""
    after = predict(training, network, Exchange(algorithm, "packed_int2", density))
    beside = predict(training, network, Exchange(algorithm, "packed_int2", density, overlap=True))
    if algorithm != GLOO:  # gloo's buckets do not change
        assert after.round_seconds - training.step_seconds <= beside.round_seconds <= after.round_seconds * (1 + 1e-9)
    assert beside.round_seconds >= max(1, 1 / 3 + beside.seconds / training.step_seconds) * training.step_seconds * (
        1 - 1e-9
    )


def test_ranks_of_a_node_share_its_link_and_a_delay_hides_its_exchange() -> None:
    alone, shared = (Network(1e8, 0.02, ranks_per_node=m) for m in (1, 4))
    training, exchange = Training(8, 10**7, 0.03), Exchange("allgather", "packed_int2", 1 / 64, 32)
    assert predict(training, shared, exchange).seconds > predict(training, alone, exchange).seconds
    assert predict(training, replace(shared, ranks_per_node=8), exchange).nbytes == 0
    waits, hidden = (predict(training, alone, replace(exchange, delay=delay)).utilisation for delay in (0, 16))
    assert waits < hidden
    assert predict(Training(1, 10**6, 0.03), Network(1e6, 0.1), Exchange()).utilisation == 1


@settings(max_examples=150)
@given(st.integers(2, 5), st.integers(10**7, 10**9), st.floats(1e-2, 10), networks, exchanges)
def test_ranks_that_count_as_one_send_no_more_than_one(
    N: int, n: int, seconds: float, network: Network, exchange: Exchange
) -> None:
    """A node of m ranks sends as much as a node of one rank, and never more than without ``nodes``."""
    nodes, one = replace(exchange, nodes=True), predict(Training(N, n, seconds), network, exchange)
    assert predict(Training(N, n, seconds), network, nodes) == one
    single = replace(network, ranks_per_node=N)
    assert predict(Training(N, n, seconds), single, nodes) == predict(Training(N, n, seconds), single, exchange)
    for m in (2, 4, 8):
        training, shared = Training(m * N, n, seconds), replace(network, ranks_per_node=m)
        flat, by_nodes = (predict(training, shared, plan) for plan in (exchange, nodes))
        if exchange.algorithm == GLOO:
            assert by_nodes == flat
            continue
        assert (by_nodes.participants, flat.participants) == (N, m * N)
        assert by_nodes.algorithm == flat.algorithm == one.algorithm
        assert by_nodes.nbytes <= flat.nbytes * (1 + 1e-6)
        headers = m * HEADER_BYTES * 4 * N * (n / 2**18 + 2)  # at most one call per MiB
        assert by_nodes.nbytes == pytest.approx(one.nbytes, rel=0.02, abs=headers)
        if exchange.algorithm == "double" and exchange.adamw:
            # Without nodes, some messages are forwarded and buckets differ.
            assert 0.6 < by_nodes.nbytes * m / flat.nbytes < 1.25


def test_work_and_messages_inside_a_node() -> None:
    """Bytes read per weight as in docs/reports/adamw.md: 13 in the slice, 7.1 everywhere, 32.2/P by owners."""
    n, m, N, k = 10**8, 2, 2, 10**8 // 64
    network, costs = Network(1e9, ranks_per_node=m), replace(DEFAULT, select=0.0, merge=0.0, codec=0.0, call=0.0)
    step = predict(
        Training(m * N, n, 1.0), network, Exchange("double", "packed_int2", 0.09, adamw=True, nodes=True), costs
    )
    read = 7.1 + 13 / m + 32.2 / (m * N)
    assert step.work == pytest.approx((5.5 * read / 43 - 1.8 + (m - 1) / m) * costs.add * n, rel=1e-6)
    local, costs = Exchange("allgather", "packed_int2", 1 / 64, 8, nodes=True), replace(costs, add=0.0)
    none, slow = (
        predict(Training(m * N, n, 1.0), replace(network, inside=Link(0.0, beta)), local, costs) for beta in (0.0, 1e-9)
    )
    alone = predict(Training(N, n, 1.0), Network(1e9), local, costs)
    assert none.seconds == pytest.approx(alone.seconds, rel=1e-3)  # m calls share the link
    small = 2 * 4 * 4096  # a dense sum of small tensors
    moved = (m - 1) / m * (4 * n + 8 * N * k + small)
    assert slow.seconds - none.seconds == pytest.approx(1e-9 * moved, rel=1e-6)


# -- convergence ------------------------------------------------------------------------------------------------------


def test_losses_are_those_of_the_runs_and_take_more_steps() -> None:
    for algorithm, points in TRAINED.items():
        for H, loss in points:
            assert nats(algorithm, H) == pytest.approx(loss)
        between = [nats(algorithm, H) for H in (1, 2, 8, 32, 128, 500)]
        assert between == sorted(between)
    assert nats("allgather", 30, 15) == pytest.approx(1.622, abs=0.01)
    assert relative_steps(nats("dense", 1)) == pytest.approx(1)
    assert relative_steps(1.2) == 1  # nothing counts as better than dense, whose learning rate was not tuned
    assert relative_steps(1.714) == pytest.approx(2)
    assert 2 < relative_steps(1.9) < relative_steps(2.0)
