"""The table of all contenders: the algorithms of sparsecomm, methods of other projects, and MPI alone."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from mpi4py import MPI

import sparsecomm as sc
from bench import timing
from bench.compare.baselines import Baseline, DenseMpi, DenseRing, Entries, GtopkPaper, Int8, TopkGloo, TopkNumpy
from bench.timing import Runner
from sparsecomm.algorithms import ALGORITHMS
from sparsecomm.backends import Backend, CpuBackend
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.testing import expected_sum
from sparsecomm.tools.check import Check
from sparsecomm.tools.devices import DEVICES
from sparsecomm.tools.timing import Clock, Vectors
from sparsecomm.tracing.observers import Forwarding, observed
from sparsecomm.transport import Request, Transport
from sparsecomm.transport.base import HOST, Bytes, MessageMemory
from sparsecomm.wire import EXACT, OPS, CallSignature, Messages

Array = np.ndarray[Any, Any]
ORACLE = 4_000_000  # entries of all ranks together that the slow oracle still merges
STRIDE = 97  # sums over all ranks are compared at every 97th element


def on_the_wire() -> int:
    """Return the bytes that this host sent over networks."""
    lines = Path("/proc/self/net/dev").read_text().splitlines()[2:]
    counts = {name.strip(): fields.split() for name, fields in (line.split(":") for line in lines)}
    return sum(int(fields[8]) for name, fields in counts.items() if name != "lo")


class FromZero(Vectors):
    """Vectors whose residual is zero before each call, in the memory of the caller."""

    def __init__(self, comm: Any, x: Array, residual: Array, out: Array) -> None:
        self.comm, self.memory, self.n = comm, DEVICES["cpu"](), x.size
        self.x, self.residual, self.out = x, residual, out

    def reset(self) -> None:
        self.residual.fill(0)


class Selection:
    """Replaces `sparsecomm.contribution.Contribution`: entries that were selected before, and no residual."""

    def __init__(self, entries: sc.SparseVector | None, whole: Array, shape: tuple[int, ...], backend: Backend) -> None:
        self.entries, self._whole, self.shape, self.size, self.backend = entries, whole, shape, whole.size, backend

    def topk(self, k: int) -> sc.SparseVector | None:
        return self.entries

    def with_selection(self, entries: sc.SparseVector) -> Selection:
        return Selection(entries, self._whole, self.shape, self.backend)

    def topk_of_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[sc.SparseVector]:
        assert self.entries is not None
        cuts = [self.backend.searchsorted(self.entries, [begin, end]) for begin, end, _ in ranges]
        return [self.entries.part(*cut) for cut in cuts]

    def topk_of_sums(self, begin: int, end: int, received: Sequence[sc.SparseVector], k: int) -> sc.SparseVector:
        mine = self.topk_of_ranges([(begin, end, k)])
        return self.backend.merge_topk(self.backend.sum_in_pairs([*mine, *received]), mine[0].part(0, 0), k)[0]

    def whole(self) -> Array:
        return self._whole

    def record_dropped(self, entries: sc.SparseVector) -> None:
        pass


@Transport.register
class Recorder(Forwarding):
    """A transport that records the messages it sends and receives."""

    def __init__(self, transport: Transport) -> None:
        super().__init__(transport)
        self._transport = transport
        self.messages: list[tuple[str, int, int, int, int]] = []  # kind, to, bytes, source, bytes

    def isend(self, data: Bytes, to: int, memory: MessageMemory = HOST) -> Request:
        self.messages.append(("send", to, len(data), -1, 0))
        return self._transport.isend(data, to, memory)

    def receive(self, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        message = self._transport.receive(source, memory, expected)
        self.messages.append(("receive", -1, 0, source, len(message)))
        return message

    def exchange(self, data: Bytes, to: int, source: int, memory: MessageMemory = HOST, expected: int = 0) -> Bytes:
        message = self._transport.exchange(data, to, source, memory, expected)
        self.messages.append(("exchange", to, len(data), source, len(message)))
        return message

    def exchange_all(
        self,
        sends: Sequence[tuple[int, Bytes]],
        sources: Sequence[int],
        memory: MessageMemory = HOST,
        expected: int = 0,
    ) -> list[Bytes]:
        messages = self._transport.exchange_all(sends, sources, memory, expected)
        self.messages += [("begin", to, len(data), -1, 0) for to, data in sends]
        self.messages += [("receive", -1, 0, source, len(m)) for source, m in zip(sources, messages, strict=True)]
        self.messages.append(("end", -1, 0, -1, 0))
        return messages


class Replay:
    """The recorded messages again, with mpi4py alone: their cost without merging, checks and Python objects."""

    def __init__(self, comm: MPI.Intracomm, recorder: Recorder) -> None:
        self._comm = comm
        largest = max((max(out, into) for _, _, out, _, into in recorder.messages), default=0)
        self._out, self._into = np.zeros(largest, np.uint8), np.zeros(largest, np.uint8)
        self._begun: list[MPI.Request] = []
        self._actions = [self._action(*message) for message in recorder.messages]

    def run(self) -> None:
        for action in self._actions:
            action()

    def _action(self, kind: str, to: int, out: int, source: int, into: int) -> Callable[[], object]:
        sent, received = [self._out[:out], MPI.BYTE], [self._into[:into], MPI.BYTE]
        if kind == "send":
            return lambda: self._comm.Send(sent, to)
        if kind == "begin":
            return lambda: self._begun.append(self._comm.Isend(sent, to))
        if kind == "end":
            return self._end
        if kind == "receive":
            return lambda: self._comm.Recv(received, source)
        return lambda: self._comm.Sendrecv(sent, to, recvbuf=received, source=source)

    def _end(self) -> None:
        MPI.Request.Waitall(self._begun)
        self._begun.clear()


class Ours(timing.Ours):
    """An algorithm of sparsecomm; its exchange can also be timed alone, and its messages with mpi4py alone."""

    def __init__(self, name: str, vectors: Vectors, k: int, wire: str) -> None:
        super().__init__(name, vectors, k, wire)
        self.problem = self.explained.query.problem(self.taken.wire)
        self.merging = Clock()
        self._backend = observed(CpuBackend(), self.merging)
        selected = sc.topk(vectors.x, k) if name != "dense" else None
        self._entries, self.selected = selected, selected and (selected.indices, selected.values)
        self.recorder = Recorder(self.transport)
        for transport in (self.recorder, self.transport):
            self._comm = self._communicator(transport)  # type: ignore[arg-type]
            self.exchange()  # the algorithm may keep something from a first call
            if transport is self.recorder:
                self.recorder.messages.clear()
                self.exchange()
        self._replay = Replay(vectors.comm, self.recorder)

    def before(self, action: str) -> None:
        if action == "step":
            super().before(action)
        elif self._entries is None:
            np.copyto(self.vectors.out, self.vectors.x)  # summed in place
        self.merging.reset()

    def exchange(self) -> None:
        """Compute the sum, as entries, from the selections."""
        v = self.vectors
        selection = Selection(self._entries, v.out, v.x.shape, self._backend)
        self._comm.begin()
        self.taken.algorithm.run(self._comm, selection, self.k)  # type: ignore[arg-type]
        self._comm._transport.end()

    def plain(self) -> None:
        """Send the messages of `exchange` by mpi4py alone."""
        self._replay.run()

    def _communicator(self, transport: Transport) -> Communicator:
        v, wire = self.vectors, self.taken.wire
        call = CallSignature(self.taken.algorithm.name, FLOAT32.code, OPS.index("sum"), wire.code, v.n, self.k)
        messages = Messages(call, transport.rank, FLOAT32.accumulator, v.x.shape, self._backend)
        return Communicator(transport, self._backend, messages, wire, self.explained.costs)

    def traffic(self) -> Sequence[float]:
        return self.transport.counters.bytes_sent, on_the_wire()

    def parts(self) -> dict[str, float]:
        return dict(self.merging.seconds)


class Theirs(Runner):
    """A baseline, with a residual."""

    def __init__(self, kind: type[Baseline], vectors: Vectors, k: int) -> None:
        self.baseline, self.vectors, self.k = kind(vectors.comm), vectors, k
        vectors.reset()
        self.selected = None if kind.exchange_only else self.baseline.select(vectors.x, vectors.residual, k)

    def before(self, action: str) -> None:
        if action == "step":
            self.vectors.reset()

    def step(self) -> None:
        self.baseline.step(self.vectors.x, self.vectors.residual, self.k, self.vectors.out)

    def exchange(self) -> None:
        """Compute the sum, or everything needed for it, from the selections."""
        self.baseline.exchange(self.selected)

    def traffic(self) -> Sequence[float]:
        return self.baseline.sent, on_the_wire()

    def close(self) -> None:
        self.baseline.close()


@dataclass(frozen=True)
class Contender:
    """One way to sum gradients over ranks."""

    name: str  # the name on command lines
    kind: str  # "ours", "baseline" (the method of another project) or "mpi" (calls of MPI alone)
    # returns a runner on vectors, for k entries and a wire format. Collective. Raises `ValueError` if it does not work
    # here or on this number of ranks
    make: Callable[[Vectors, int, str], Runner]
    times: tuple[str, ...] = ("step",)  # the actions of the runner that are timed
    # the algorithm with the same result, see `sparsecomm.testing.oracles`; ``None`` for the dense sum
    oracle: str | None = None
    # tolerated error beyond rounding of sums, as a share of the sum of all ranks' largest magnitudes; ``None`` if the
    # result must be the same in every bit
    error: float | None = None
    conserves: bool = True  # whether result and residuals add up to residuals and gradients before the call
    slow: bool = False  # whether a step of long gradients takes seconds
    usual: bool = True  # whether it runs by default


def _ours(name: str) -> Contender:
    times, usual = ("step", "exchange", "plain"), name in ("dense", "allgather", "tree", "butterfly", "split")
    checked: dict[str, Any] = {"error": 0.0} if name == "dense" else {"oracle": name}
    return Contender(name, "ours", partial(Ours, name), times, usual=usual, **checked)


def _theirs(kind: type[Baseline], of: str = "baseline", **options: Any) -> Contender:
    times = ("step",) if kind.exchange_only else ("step", "exchange")
    options = {"error": 0.0, "conserves": False, "slow": kind.slow, "times": times} | options
    return Contender(kind.name, of, lambda vectors, k, wire: Theirs(kind, vectors, k), **options)


CONTENDERS: dict[str, Contender] = {
    contender.name: contender
    for contender in (
        *map(_ours, ALGORITHMS),
        _theirs(DenseMpi, "mpi"),
        _theirs(DenseRing),
        _theirs(Int8, error=1 / 125),  # half a step of 1/127 for every addend and for the sum
        _theirs(TopkNumpy, oracle="allgather", conserves=True),
        _theirs(TopkGloo, oracle="allgather", conserves=True),
        _theirs(GtopkPaper, oracle="tree"),
    )
}


class Distance(Check):
    """A check with a tolerated error; without ``expected`` the result is the sum of all gradients and residuals."""

    at = slice(None, None, STRIDE)

    def __init__(self, comm: Any, accumulated: Array, expected: Array | None, error: float | None) -> None:
        super().__init__(comm, accumulated, expected)
        self._error = error

    def different(self, indices: Array | None, values: Array | None, out: Array) -> int:
        """Count elements of ``out`` beyond the tolerated error, and ranks with other results."""
        if self._error is None:
            return super().different(indices, values, out)
        result, expected = out, self.expected
        if expected is None:
            result, expected = out[self.at], self.summed(self.accumulated)
        addends = self.comm.allreduce(float(np.abs(self.accumulated).max()))
        bound = (4 * self.comm.Get_size() * np.finfo(out.dtype).eps + self._error) * addends
        wrong = np.count_nonzero(~(np.abs(result - expected) <= bound))
        return int(wrong) + len(set(self.comm.allgather(zlib.crc32(out.data)))) - 1


def wrong_elements(contender: Contender, runner: Ours | Theirs, vectors: Vectors, k: int) -> int:
    """Count the wrong elements of a step's selection, result and residual on this rank. Collective."""
    comm, residual = vectors.comm, vectors.residual if contender.conserves else None
    runner.before("step")
    runner.step()
    if contender.oracle is None:
        check = Distance(comm, vectors.x, None, contender.error)
        return check.different(None, None, vectors.out) + (0 if residual is None else check.lost(vectors.out, residual))
    wrong = _wrongly_selected(vectors.x, runner.selected, k)
    expected = None
    if contender.kind != "ours":
        expected = _expected(contender.oracle, runner.selected, vectors, k, range(comm.size))
    elif runner.taken.wire.kind == EXACT:  # type: ignore[union-attr]
        expected = _expected(contender.oracle, runner.selected, vectors, k, runner.transport.node_of_rank)  # type: ignore[union-attr]
    error = None if expected is None else contender.error
    check = Distance(comm, vectors.x, expected, error)
    indices = np.flatnonzero(vectors.out)
    wrong += check.different(indices, vectors.out[indices], vectors.out)
    return wrong + (0 if residual is None else check.lost(vectors.out, residual))


def _expected(oracle: str, selected: Entries, vectors: Vectors, k: int, nodes: Sequence[int]) -> Array | None:
    """Return the oracle's dense result for all selections, or ``None`` if there are too many entries."""
    comm = vectors.comm
    if len(selected[0]) * comm.size > ORACLE:
        return None
    order = np.argsort(selected[0])
    every = comm.gather((selected[0][order], selected[1][order]))
    indices, values = comm.bcast(None if every is None else _reduced(oracle, every, k, nodes))
    expected = np.zeros_like(vectors.out)
    expected[indices] = values
    return expected


def _wrongly_selected(x: Array, selected: Entries, k: int) -> int:
    """Count the differences of a selection to k largest entries of x, with any choice among ties."""
    indices, values = selected
    missing = abs(len(np.unique(indices)) - k) + abs(len(indices) - k) + np.count_nonzero(x[indices] != values)
    smallest = np.abs(values).min()
    larger = sum(np.count_nonzero(np.abs(part) > smallest) for part in np.array_split(x, max(1, x.size >> 20)))
    return int(missing + larger - np.count_nonzero(np.abs(values) > smallest))


def _reduced(oracle: str, selected: Sequence[tuple[Array, Array]], k: int, nodes: Sequence[int]) -> tuple[Array, Array]:
    """Return the entries of the oracle's result for the selections of all ranks, on vectors of their indices only."""
    positions = np.unique(np.concatenate([indices for indices, _ in selected]))
    vectors = [np.zeros(len(positions), values.dtype) for _, values in selected]
    for vector, (indices, values) in zip(vectors, selected, strict=True):
        vector[np.searchsorted(positions, indices)] = values
    total = expected_sum(oracle, vectors, k, nodes)
    nonzero = np.flatnonzero(total)
    return positions[nonzero], total[nonzero]
