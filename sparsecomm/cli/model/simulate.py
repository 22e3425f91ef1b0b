"""One call on simulated ranks: the shipped algorithm, on a problem that is small enough, at the cost of the whole one.

A problem of n elements and k entries is run with n/s and k/s. A message with H bytes of header and table and B other
bytes then counts as H + s B bytes, and work on m entries or elements as work on s m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, ParamSpec, TypeVar, cast

import numpy as np

from sparsecomm.algorithms import Algorithm
from sparsecomm.backends import Backend, CpuBackend
from sparsecomm.cli.model.options import Asked, node_ranks
from sparsecomm.cli.terminal import Progress
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype
from sparsecomm.transport import simulated
from sparsecomm.transport.memory import Bytes
from sparsecomm.tuning import choice
from sparsecomm.tuning.choice import Candidate, CostQuery
from sparsecomm.wire import HEADER_BYTES, CallSignature, Messages, Wire

__all__ = ["Found", "Row", "rows"]

_P = ParamSpec("_P")
_R = TypeVar("_R")

_FLOAT32 = np.dtype(np.float32)

# Algorithms with few messages and entries per rank; the numbers of ranks up to which these and others are simulated.
_FEW = ("tree", "butterfly")
_MAX_FEW, _MAX = 8192, 512

# Limits of a simulation: entries that all ranks handle together, and elements that they hold.
_HANDLED, _HELD = 1 << 25, 1 << 23
_MIN = 256  # entries per rank; with fewer, what a wire format adds to them would matter


@dataclass(frozen=True)
class Found:
    """The result of a simulated call.

    Attributes:
        exchange: seconds of the messages alone.
        step: seconds with the work.
        sent, received: bytes, of the rank that has most.
        messages: that the rank sends or receives that has most.
        scale: the factor by which the simulated problem was smaller.
    """

    exchange: float
    step: float
    sent: int
    received: int
    messages: int
    scale: float


@dataclass(frozen=True)
class Row:
    """One line of the table.

    Attributes:
        P, num_nodes: ranks, and nodes.
        name: the algorithm, as it was asked for.
        chosen: the algorithm and wire format that this stands for.
        exchange, step: seconds by the formula.
        found: what was simulated; ``None``: it would take too long.
    """

    P: int
    num_nodes: int
    name: str
    chosen: Candidate
    exchange: float
    step: float
    found: Found | None


def rows(asked: Asked, show_progress: Progress = lambda text: None) -> Iterator[Row]:
    """Yield all rows that were asked for, by number of ranks. ``show_progress`` is told of each before it is run."""
    messages_only = Costs(asked.costs.link, asked.costs.node)
    for P in asked.ranks:
        done: dict[tuple[str, str], Found] = {}
        num_nodes = node_ranks(asked, P)[-1] + 1
        for name in asked.algorithms:
            show_progress(f"{P} ranks, {name}")
            query = CostQuery(P, num_nodes, asked.n, asked.k, _FLOAT32.itemsize, name, asked.wire)
            chosen = choice.decide(query, asked.costs)
            key = chosen.algorithm.name, chosen.wire.name
            if key not in done and (asked.everything or _quick(chosen.algorithm.name, P)):
                done[key] = simulate(asked, P, chosen.algorithm, chosen.wire)
            alone = chosen.algorithm.predicted_time(query.problem(chosen.wire), messages_only)
            exchange, step = alone + asked.straggler, chosen.seconds + asked.straggler
            show_progress(None)
            yield Row(P, num_nodes, name, chosen, exchange, step, done.get(key))


def simulate(asked: Asked, P: int, algorithm: Algorithm, wire: Wire) -> Found:
    """Run an algorithm twice, without work and with it; return what it took."""
    work, idle = asked.costs, Costs(asked.costs.link, asked.costs.node)
    n, k = _smaller(algorithm.name, P, asked.n, asked.k)
    without, with_work = (_call(asked, P, algorithm, wire, n, k, costs) for costs in (idle, work))
    counters = [result.counters for result in without]
    return Found(
        exchange=max(result.seconds for result in without),
        step=max(result.seconds for result in with_work),
        sent=max(c.bytes_sent for c in counters),
        received=max(c.bytes_received for c in counters),
        messages=max(max(c.messages_sent, c.messages_received) for c in counters),
        scale=asked.n / n,
    )


def _quick(name: str, ranks: int) -> bool:
    """Return whether so many ranks can be simulated in seconds."""
    outer, _, inner = name.partition(":")
    return ranks <= (_MAX_FEW if (inner or outer) in _FEW or name == "hierarchical" else _MAX)


def _smaller(name: str, P: int, n: int, k: int) -> tuple[int, int]:
    """Return the elements and entries of the problem that is run."""
    if name == "dense":
        small = min(n, max(64 * P, _HELD // P))
        return small, min(k, small)
    rounds = max(P - 1, 1).bit_length()
    handled = {"tree": 2, "butterfly": 2 * rounds, "split": rounds + 5}  # entries per rank and entry selected
    handled |= {"hierarchical": 2 * rounds + 2, "hierarchical_dense": 2 * rounds + 2}
    inner = name.partition(":")[2] or name
    fits = _HANDLED // (P * handled.get(inner, P * (rounds + 1)))
    min_entries = max(_MIN, 40 * P) if inner == "split" else _MIN  # its ranges are unequal if they have few entries
    if name.startswith(("hierarchical_dense", "dsar")):
        fits, min_entries = min(fits, int(k / n * _HELD / P)), 1
    small = min(k, max(fits, min_entries))
    return max(small, math.ceil(n / k * small)) if small < k else n, small


# -- one call ---------------------------------------------------------------------------------------------------------


def _call(
    asked: Asked, P: int, algorithm: Algorithm, wire: Wire, n: int, k: int, costs: Costs
) -> list[simulated.Result[None]]:
    """Run one call with n elements and k entries, at the cost of as many as asked for; return the result by rank."""
    scale = asked.n / n
    call = CallSignature(algorithm.name, DTYPES["float32"].code, 0, wire.code, n, k)
    weights: dict[int, int] = {}  # by id, of messages that were made and not yet sent
    shared_rng = np.random.default_rng([asked.seed, n, k])
    common = _some(shared_rng, n, round(asked.shared * k))

    def program(transport: simulated.SimulatedTransport) -> None:
        backend = _charged_backend(CpuBackend(1), transport, costs, scale)
        messages = _Weighed(call, transport.rank, _FLOAT32, (n,), backend, weights, scale)
        gradient = _Gradient(asked, transport, n, k, common, costs)
        comm = Communicator(transport, backend, messages, wire)
        try:
            algorithm.run(comm, gradient, k)
        except BaseException as error:
            comm.abort(error)
            raise
        comm.end()

    link, node = costs.link, costs.node or costs.link
    return simulated.run(
        P,
        program,
        alpha=link.alpha,
        beta=link.beta,
        node_of_rank=node_ranks(asked, P),
        node_alpha=node.alpha,
        node_beta=node.beta,
        delays=[0.0] * (P - 1) + [asked.straggler],
        weigh=lambda data: weights.pop(id(data), len(data)),
    )


class _Weighed(Messages):
    """Messages, and the bytes that each would have in the whole problem. Messages of words are not scaled."""

    def __init__(
        self,
        call: CallSignature,
        rank: int,
        value: np.dtype[Any],
        shape: tuple[int, ...],
        backend: Backend,
        weights: dict[int, int],
        scale: float,
    ) -> None:
        super().__init__(call, rank, value, shape, backend)
        self._weights, self._scale = weights, scale

    def entries(self, entries: SparseVector, wire: Wire, round_no: int) -> Bytes:
        return self._weighed(super().entries(entries, wire, round_no), HEADER_BYTES)

    def vectors(self, vectors: list[SparseVector], wire: Wire, round_no: int) -> Bytes:
        return self._weighed(super().vectors(vectors, wire, round_no), HEADER_BYTES + 16 * len(vectors))

    def dense(self, segment: Array, round_no: int) -> Bytes:
        return self._weighed(super().dense(segment, round_no), HEADER_BYTES)

    def _weighed(self, message: Bytes, fixed: int) -> Bytes:
        self._weights[id(message)] = fixed + round(self._scale * (len(message) - fixed))
        return message


class _Gradient:
    """A rank's contribution, of which only the top-k exists: entries at random indices."""

    def __init__(
        self, asked: Asked, transport: simulated.SimulatedTransport, n: int, k: int, common: Array, costs: Costs
    ) -> None:
        self.shape: tuple[int, ...] = (n,)
        self._asked, self._transport, self._k, self._common, self._costs = asked, transport, k, common, costs

    def topk(self, k: int) -> SparseVector:
        self._transport.compute(self._costs.select * self._asked.n)
        n = self.shape[0]
        rng = np.random.default_rng([self._asked.seed, n, k, self._transport.rank])
        own = np.setdiff1d(_some(rng, n, k), self._common, assume_unique=True)
        own = rng.permutation(own)[: k - len(self._common)]
        indices = np.sort(np.concatenate([self._common, own])).astype(index_dtype(n))
        return SparseVector.trusted(indices, _largest(rng, k, self._asked.k / self._asked.n), n, self.shape)

    def whole(self) -> Array:
        self._transport.compute(self._costs.add * self._asked.n)
        return np.zeros(self.shape, _FLOAT32)

    def rest(self, total: Array, k: int) -> SparseVector:
        return self.topk(k)

    def drop(self, entries: SparseVector) -> None:
        pass


def _some(rng: np.random.Generator, n: int, count: int) -> Array:
    """Return ``count`` distinct numbers below n."""
    found: Array = rng.choice(n, count, replace=False, shuffle=False)
    return found


def _largest(rng: np.random.Generator, count: int, density: float) -> Array:
    """Return normally distributed numbers, all as large as the top-k of that density (Marsaglia, 1964)."""
    if density > 0.5:
        values = rng.standard_normal(count)
        return np.where(values == 0, 1, values).astype(_FLOAT32)
    threshold = -NormalDist().inv_cdf(density / 2)
    found = np.empty(0)
    while len(found) < count:
        tail = np.sqrt(threshold**2 - 2 * np.log1p(-rng.random(2 * count)))
        found = np.concatenate([found, tail[rng.random(2 * count) * tail < threshold]])
    signed: Array = found[:count] * rng.choice((-1, 1), count)
    return signed.astype(_FLOAT32)


# The charges for methods of `Backend`, beside `Costs.call`: a cost of the profile, and the number of entries or
# elements that it applies to. Other methods are free.
_CHARGES: dict[str, tuple[str, Callable[..., float]]] = {
    "merge": ("merge", lambda a, b: a.nnz + b.nnz),
    "merge_topk": ("merge", lambda a, b, k: a.nnz + b.nnz),
    "nth_key": ("merge", lambda entries, n: entries.nnz),
    "count_keys": ("merge", lambda entries, low, shift, bins: entries.nnz),
    "reaching_key": ("merge", lambda entries, low: entries.nnz),
    "pack": ("codec", lambda entries, kind: entries.nnz / 2),
    "unpack": ("codec", lambda data, head, count, n, kind, float64_values: count / 2),
    "add": ("add", lambda total, addend: len(total)),
}


class _ChargedBackend:
    """A backend whose work takes virtual time."""

    def __init__(self, backend: Backend, transport: simulated.SimulatedTransport, costs: Costs, scale: float) -> None:
        self._backend = backend
        for name, (cost, items) in _CHARGES.items():
            setattr(
                self, name, _charged(getattr(backend, name), transport, costs.call, getattr(costs, cost) * scale, items)
            )

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


def _charged(
    function: Callable[_P, _R],
    transport: simulated.SimulatedTransport,
    call: float,
    cost: float,
    items: Callable[_P, float],
) -> Callable[_P, _R]:
    """Return ``function``, taking ``call`` seconds and ``cost`` for each of its items."""

    def charged(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        transport.compute(call + cost * items(*args, **kwargs))
        return function(*args, **kwargs)

    return charged


def _charged_backend(backend: Backend, transport: simulated.SimulatedTransport, costs: Costs, scale: float) -> Backend:
    return cast(Backend, _ChargedBackend(backend, transport, costs, scale))
