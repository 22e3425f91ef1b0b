"""Rounds of local steps on simulated ranks that each have a core, and what limits them: bytes, trips or work.

    python -m bench.utilisation.own_cores                      # 50 Mb/s and 1 Gb/s without delay: half a minute
    python -m bench.utilisation.own_cores --rates 50mbit --rtts 0 80 --H 32

The real `sparsecomm.LocalSteps` runs on simulated ranks, one after another in one thread, with the model of
`bench.utilisation`. Messages take the time of the link in virtual time. Between messages the virtual clock of a rank
advances by the CPU time that its thread used, so work takes as long as on a core that nobody else uses. TCP is not
simulated: no slow start, no losses and no copies in the kernel.

Blocking rounds are simulated. A delayed round adds up: its local steps, the work in the training's thread, and what is
left of the exchange after the delay of half a round. That needs a second core for a part of the time, or a step that
runs on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

import sparsecomm as sc
from bench import report
from bench.slow_network.network import parse_rate
from bench.utilisation import grid
from bench.utilisation.grid import Network
from bench.utilisation.tables import percent
from bench.utilisation.worker import Training
from sparsecomm.local_steps.defaults import DEFAULTS, auto_algorithm
from sparsecomm.quantities import number_text
from sparsecomm.reducer import step as reducer_step
from sparsecomm.transport import simulated
from sparsecomm.tuning import utilisation as model

_LOCAL_ALPHA, _ROUNDS = 5e-5, 3  # seconds of a message without delay; rounds that are measured, after two


@dataclass
class Work:
    """CPU seconds that a rank has used: in all, and of these in calls, which run beside the training."""

    total: float = 0.0
    calls: float = 0.0
    last: float = 0.0  # when the rank began to work, or went on
    free: bool = True  # it takes no time: in the first round, which measures the links


def main() -> int:
    parser = report.parser(__doc__, prog="python -m bench.utilisation.own_cores")
    parser.add_argument("--rates", nargs="+", default=["50mbit", "1gbit"], metavar="RATE", help="(50mbit 1gbit)")
    parser.add_argument("--rtts", nargs="+", type=float, default=[0.0], metavar="MS", help="round trips (0)")
    parser.add_argument("--H", nargs="+", type=int, default=[8, 32], metavar="STEPS", help="of a round (8 32)")
    parser.add_argument("--ranks", type=int, default=grid.RANKS, help="(%(default)s)")
    options = parser.parse_args()
    networks = grid.networks([parse_rate(rate) for rate in options.rates], [ms / 1e3 for ms in options.rtts], [0.0])
    rows = [measured(network, options.ranks, H) for network in networks for H in options.H]
    columns: list[report.Column] = [
        ("link", lambda row: str(row["network"])),
        ("H", lambda row: row["H"]),
        ("bytes / rate, s", lambda row: number_text(row["wire"])),
        ("trips, s", lambda row: number_text(row["trips"])),
        ("work: training's thread, s", lambda row: number_text(row["own"])),
        ("in calls, s", lambda row: number_text(row["calls"])),
        ("exchange, s", lambda row: number_text(row["exchange"])),
        ("blocking, %", lambda row: percent(row["blocking"])),
        ("model", lambda row: percent(row["model"][0])),
        ("delayed, %", lambda row: percent(row["delayed"])),
        ("model", lambda row: percent(row["model"][1])),
        ("no work, %", lambda row: percent(row["limit"])),
    ]
    title = "ranks with cores of their own; seconds of a round"
    report.show([], [report.table(rows, columns, title=title, title_justify="left")])
    return 0


def measured(network: Network, P: int, H: int) -> dict[str, Any]:
    """Simulate blocking rounds; return what they took, in seconds of a round, and utilisations."""
    alpha, beta = _LOCAL_ALPHA + network.rtt / 2, 8 * model.PACKET / model.SEGMENT / network.rate

    def program(transport: simulated.SimulatedTransport) -> tuple[float, Work, int]:
        work = Work(last=time.thread_time())
        _charge(transport, work)
        training = Training(grid.SHAPES, transport.rank, 0.0)
        local = sc.LocalSteps(training.parameters, sync_every=H, comm=transport)
        training.begin()
        for round_no in range(2 + _ROUNDS):
            work.free = round_no == 0
            if round_no == 2:
                before, total, calls, sent = transport.seconds, work.total, work.calls, transport.counters.bytes_sent
            for _ in range(H):
                training.step(H)
                work.last = time.thread_time()
                transport.compute(grid.STEP)
                local.step(training.parameters)
                _advance(transport, work)
        spent = Work((work.total - total) / _ROUNDS, (work.calls - calls) / _ROUNDS)
        return ((transport.seconds - before) / _ROUNDS, spent, (transport.counters.bytes_sent - sent) // _ROUNDS)

    found = [result.value for result in simulated.run(P, program, alpha=alpha, beta=beta) if result.value is not None]
    computed, nbytes = H * grid.STEP, max(each[2] for each in found)
    own = float(np.mean([work.total - work.calls for _, work, _ in found]))
    calls = float(np.mean([work.calls for _, work, _ in found]))
    exchange = float(np.mean([seconds for seconds, *_ in found])) - computed
    wire = nbytes * beta
    beside = max(0.0, exchange - own - (H - H // 2) * grid.STEP)  # what is left of the calls after the delay
    return {
        "network": network, "H": H, "wire": wire, "own": own, "calls": calls, "exchange": exchange,
        "trips": max(0.0, exchange - own - calls - wire),
        "blocking": computed / (computed + exchange), "delayed": computed / (computed + own + beside),
        "limit": computed / (computed + wire),
        "model": [_predicted(network, P, H, delay) for delay in (0, H // 2)],
    }  # fmt: skip


def _predicted(network: Network, P: int, H: int, delay: int) -> float:
    """Return the utilisation that `sparsecomm plan` predicts for ranks with a core each."""
    training = model.Training(P, sum(grid.SHAPES.values()), grid.STEP)
    exchange = model.Exchange(auto_algorithm(H), DEFAULTS["wire"], 64 / 4096, H, delay)
    return model.predict(training, model.Network(network.rate, network.rtt), exchange).utilisation


def _charge(transport: simulated.SimulatedTransport, work: Work) -> None:
    """Let a rank's clock advance by its CPU time before each message; and note how much of it is in calls."""

    def charged(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any, **kwargs: Any) -> Any:
            _advance(transport, work)
            try:
                return function(*args, **kwargs)
            finally:
                work.last = time.thread_time()

        return run

    for name in ("isend", "receive"):
        setattr(transport, name, charged(getattr(transport, name)))
    _of_calls[id(transport)] = transport, work


def _advance(transport: simulated.SimulatedTransport, work: Work) -> None:
    seconds = time.thread_time() - work.last
    if not work.free:
        work.total += seconds
        transport.compute(seconds)
    work.last = time.thread_time()


_of_calls: dict[int, tuple[simulated.SimulatedTransport, Work]] = {}
_run = reducer_step.BucketCall.run


def _counted(call: Any) -> Any:
    """Run a call, and count its work."""
    transport, work = _of_calls[id(call.transport)]
    _advance(transport, work)
    before = work.total
    result = _run(call)
    _advance(transport, work)
    work.calls += work.total - before
    return result


reducer_step.BucketCall.run = _counted  # type: ignore[method-assign]


if __name__ == "__main__":
    raise SystemExit(main())
