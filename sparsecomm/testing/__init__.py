"""Tests of distributed programs in one process, without MPI, a cluster or a GPU.

    from sparsecomm import testing

    results = testing.run(4, train, latency=0.04, bandwidth=100e6)  # `train(comm)` on 4 ranks
    testing.assert_same_on_all_ranks([result.value for result in results])

`run` simulates the ranks and the network. `expected_sum` is the result of an algorithm in plain NumPy.
"""

from sparsecomm.testing.assertions import assert_nothing_lost, assert_same_on_all_ranks
from sparsecomm.testing.oracles import expected_sum, num_contributors
from sparsecomm.testing.ranks import run
from sparsecomm.transport.simulated import Result, SimulatedTransport

__all__ = [
    "Result",
    "SimulatedTransport",
    "assert_nothing_lost",
    "assert_same_on_all_ranks",
    "expected_sum",
    "num_contributors",
    "run",
]
