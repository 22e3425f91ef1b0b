"""Simulated ranks in threads: results equal to greenlets', frameworks with thread-local state, and deaths."""

from __future__ import annotations

import subprocess
import sys
import threading
from contextlib import suppress
from typing import Any

import numpy as np
import pytest

import sparsecomm as sc
from sparsecomm import testing
from sparsecomm.transport import simulated
from sparsecomm.transport.simulated.rank import Threads

SLOW: dict[str, Any] = {"latency": 0.04, "bandwidth": 100e6}


def sums(comm: simulated.SimulatedTransport) -> tuple[np.ndarray, np.ndarray]:
    """Return the sum of the results of five calls, and this rank's residual."""
    rng, total = np.random.default_rng(comm.rank), np.zeros(20_000, np.float32)
    residual = np.zeros_like(total)
    for _ in range(5):
        x = rng.standard_normal(len(total), dtype=np.float32)
        total += sc.sparse_allreduce(x, 0.01, comm=comm, residual=residual, algorithm="butterfly").to_dense()
    return total, residual


def test_neither_the_network_nor_the_scheduler_changes_results() -> None:
    expected = testing.run(5, sums)
    assert [result.seconds for result in expected] == [0.0] * 5
    network: dict[str, Any] = {"alpha": 0.04, "beta": 8e-8, "node_of_rank": [0, 0, 1, 1, 2]}
    greenlets = simulated.run(5, sums, **network, node_alpha=0.0, node_beta=0.0, loss=0.05)
    threads = testing.run(5, sums, **SLOW, ranks_per_node=2, loss=0.05)
    assert [result.seconds for result in threads] == [result.seconds for result in greenlets]
    for results in (greenlets, threads):
        for result, wanted in zip(results, expected, strict=True):
            testing.assert_same_on_all_ranks([result.value, wanted.value])


def test_lost_packets_take_time_and_the_seed_chooses_them() -> None:
    def seconds(**network: Any) -> list[float]:
        return [result.seconds for result in testing.run(4, sums, **SLOW, **network)]

    assert seconds(loss=0.05) == seconds(loss=0.05) != seconds(loss=0.05, seed=1)
    assert max(seconds()) < max(seconds(loss=0.05)) < max(seconds(loss=0.5))


def test_a_late_rank_delays_the_others_and_changes_nothing() -> None:
    def late(comm: simulated.SimulatedTransport) -> tuple[np.ndarray, np.ndarray]:
        comm.compute(3.0 * (comm.rank == 2))
        return sums(comm)

    results, expected = testing.run(4, late, **SLOW), testing.run(4, sums, **SLOW)
    for result, wanted in zip(results, expected, strict=True):
        assert result.seconds >= 3.0 > wanted.seconds
        testing.assert_same_on_all_ranks([result.value, wanted.value])


@pytest.mark.parametrize("messages", [0, 1, 2, 3])
@pytest.mark.parametrize("threads", [False, True])
def test_a_rank_dies_and_all_others_name_it(messages: int, threads: bool) -> None:
    def program(comm: simulated.SimulatedTransport) -> None:
        residual = np.zeros(100, np.float32)
        for step in range(6):
            if step == 3 and comm.rank == 1:
                comm.kill(messages)
            before = sc.last_call(comm).number
            try:
                x = np.full(100, 1 + comm.rank, np.float32)
                sc.sparse_allreduce(x, 4, comm=comm, residual=residual, algorithm="butterfly")
            except sc.RankFailedError:
                assert not sc.last_call(comm).succeeded
                assert sc.last_call(comm).number > before
                raise

    results = simulated.run(4, program, catch=True, threads=threads)
    assert [result.killed for result in results] == [False, True, False, False]
    for rank in (0, 2, 3):
        error = results[rank].error
        assert isinstance(error, sc.RankFailedError)
        assert error.ranks == (1,)
    assert results[1].error is results[1].value is None


def test_survivors_continue_with_fewer_ranks() -> None:
    x = {"x": np.arange(100, dtype=np.float32)}

    def first(comm: simulated.SimulatedTransport) -> sc.Reducer:
        reducer = sc.Reducer(x, 0.1, comm=comm, dense_below=0)
        if comm.rank == 1:
            comm.kill(5)
        with suppress(sc.RankFailedError):
            for _ in range(9):
                reducer.push("x", x["x"] * (1 + comm.rank))
                reducer.wait()
        return reducer

    survivors = [result.value for result in testing.run(3, first, catch=True) if not result.killed]

    def second(comm: simulated.SimulatedTransport) -> sc.Rebuilt:
        reducer = survivors[comm.rank]
        assert reducer is not None
        return reducer.rebuild(comm)

    for result in testing.run(2, second):
        assert result.value is not None
        assert result.value.ranks_lost == (1,)


def test_errors_are_raised_or_returned_and_no_thread_is_left() -> None:
    def fails(comm: simulated.SimulatedTransport) -> int:
        if comm.rank == 1:
            raise ValueError("rank 1 has no data")
        sc.sparse_allreduce(np.ones(9, np.float32), 2, comm=comm)
        return comm.rank

    with pytest.raises(sc.TimeoutError, match="rank 1 has finished"):
        testing.run(2, fails)
    assert [type(result.error) for result in testing.run(2, fails, catch=True)] == [sc.TimeoutError, ValueError]

    def interrupted(comm: simulated.SimulatedTransport) -> None:
        if comm.rank == 2:
            raise KeyboardInterrupt
        sc.sparse_allreduce(np.ones(9, np.float32), 2, comm=comm)

    with pytest.raises(KeyboardInterrupt):
        testing.run(3, interrupted, catch=True)
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("rank ")] == []


@pytest.mark.parametrize(
    "odd", [{"latency": -1}, {"bandwidth": 0}, {"ranks_per_node": 0}, {"loss": 1}, {"loss": -0.1}, {"size": 0}], ids=str
)
def test_odd_arguments_are_refused(odd: dict[str, Any]) -> None:
    with pytest.raises(sc.InvalidInputError, match=next(iter(odd)) if "size" not in odd else "0 ranks"):
        testing.run(**({"size": 2, "program": sums} | odd))


def test_the_backward_pass_and_the_grad_mode_of_a_rank_are_its_own() -> None:
    torch = pytest.importorskip("torch")
    from sparsecomm.torch import DistributedOptimizer

    def program(comm: simulated.SimulatedTransport) -> dict[str, Any]:
        torch.manual_seed(0)
        model = torch.nn.Sequential(torch.nn.Linear(20, 30), torch.nn.ReLU(), torch.nn.Linear(30, 5))
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), 0.1, comm=comm)
        random = torch.Generator().manual_seed(comm.rank)
        for _ in range(4):
            assert torch.is_grad_enabled()
            optimizer.zero_grad()
            model(torch.randn(8, 20, generator=random)).square().mean().backward()
            optimizer.step()
            with torch.no_grad():
                sc.sparse_allreduce(torch.ones(20), 2, comm=comm)
        return dict(model.state_dict())

    testing.assert_same_on_all_ranks([result.value for result in testing.run(3, program, latency=0.01)])  # type: ignore[misc]


def test_threads_need_no_greenlet_and_the_library_does_not_import_this() -> None:
    program = "import sys, numpy as np; sys.modules['greenlet'] = None\nimport sparsecomm as sc\n"
    program += "assert 'sparsecomm.testing' not in sys.modules\nfrom sparsecomm import testing\n"
    program += "print(testing.run(2, lambda comm: sc.sparse_allreduce(np.ones(9, 'f4'), 9, comm=comm).nnz)[1].value)"
    output = subprocess.run([sys.executable, "-c", program], check=True, capture_output=True, text=True).stdout
    assert output.split() == ["9"]


def test_one_thread_runs_at_a_time() -> None:
    running: list[int] = []

    def task(rank: int) -> None:
        for step in range(20):
            running.append(rank)
            assert running == [rank]
            running.remove(rank)
            scheduler.wake(rank, step + rank / 10)
            scheduler.sleep(rank)

    scheduler = Threads()
    scheduler.run(task, [0.0] * 6, lambda: pytest.fail("no rank can run"))
