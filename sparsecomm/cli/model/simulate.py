"""One call on simulated ranks: the shipped algorithm, on a problem that is small enough, at the cost of the whole one.

A problem of n elements and k entries is run with n/s and k/s. A message of H bytes of header and table and B others
then counts as H + s B, and work on m entries or elements as on s m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, cast

import numpy as np

from sparsecomm.algorithms import Algorithm, Communicator, Costs
from sparsecomm.backends import Backend, CpuBackend
from sparsecomm.cli.model.options import Asked, node_ranks
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.tensors.sparse import Array, SparseVector, index_dtype
from sparsecomm.transport import simulated
from sparsecomm.transport.memory import Bytes
from sparsecomm.tuning import choice
from sparsecomm.tuning.choice import Candidate, CostQuery
from sparsecomm.wire import HEADER_BYTES, CallSignature, Messages, Wire

__all__ = ["Found", "Row", "rows"]

_FLOAT32 = np.dtype(np.float32)

# Algorithms of which a call takes few messages, and few entries, per rank; up to how many ranks they and others run.
_FEW = ("tree", "butterfly")
_MAX_FEW, _MAX = 8192, 512

# Limits of a run: entries that all ranks handle together, elements that they hold.
_HANDLED, _HELD = 1 << 25, 1 << 23
_MIN = 256  # entries per rank; with fewer, what a format adds to them would count


@dataclass(frozen=True)
class Found:
    """The time of a simulated call.

    Attributes:
        exchange: seconds of the messages alone.
        step: seconds with the work.
        sent, received: bytes, of the rank that has most.
        messages: that the rank sends or receives that has most.
        scale: as many times smaller was the problem that was run.
    """

    exchange: float
    step: float
    sent: int
    received: int
    messages: int
    scale: float


@dataclass(frozen=True)
class Row:
    """A line of the table.

    Attributes:
        P, machines: ranks, and machines.
        name: the algorithm, as it was asked for.
        chosen: what that stands for.
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


def rows(asked: Asked) -> Iterator[Row]:
    """All that was asked for, by number of ranks."""
    messages_only = Costs(asked.costs.link, asked.costs.node)
    for P in asked.ranks:
        done: dict[tuple[str, str], Found] = {}
        num_nodes = node_ranks(asked, P)[-1] + 1
        for name in asked.algorithms:
            query = CostQuery(P, num_nodes, asked.n, asked.k, _FLOAT32.itemsize, name, asked.wire)
            chosen = choice.decide(query, asked.costs)
            key = chosen.algorithm.name, chosen.wire.name
            if key not in done and (asked.everything or _quick(chosen.algorithm.name, P)):
                done[key] = simulate(asked, P, chosen.algorithm, chosen.wire)
            alone = chosen.algorithm.seconds(query.problem(chosen.wire), messages_only)
            exchange, step = alone + asked.straggler, chosen.seconds + asked.straggler
            yield Row(P, num_nodes, name, chosen, exchange, step, done.get(key))


def simulate(asked: Asked, P: int, algorithm: Algorithm, wire: Wire) -> Found:
    """Run it twice: without work, and with it."""
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
    """Elements and entries of the problem that is run."""
    if name == "dense":
        small = min(n, max(64 * P, _HELD // P))
        return small, min(k, small)
    rounds = max(P - 1, 1).bit_length()
    handled = {"tree": 2, "butterfly": 2 * rounds, "split": rounds + 5}  # entries per rank and entry selected
    handled |= {"hierarchical": 2 * rounds + 2, "hierarchical_dense": 2 * rounds + 2}
    inner = name.partition(":")[2] or name
    fits = _HANDLED // (P * handled.get(inner, P * (rounds + 1)))
    fewest = max(_MIN, 40 * P) if inner == "split" else _MIN  # its ranges are unequal if they have few entries
    if name.startswith(("hierarchical_dense", "dsar")):
        fits, fewest = min(fits, int(k / n * _HELD / P)), 1
    small = min(k, max(fits, fewest))
    return max(small, math.ceil(n / k * small)) if small < k else n, small


# -- one call ---------------------------------------------------------------------------------------------------------


def _call(
    asked: Asked, P: int, algorithm: Algorithm, wire: Wire, n: int, k: int, costs: Costs
) -> list[simulated.Result[None]]:
    """Run it with n elements and k entries, at the cost of as many as asked for."""
    scale = asked.n / n
    call = CallSignature(algorithm.name, DTYPES["float32"].code, 0, wire.code, n, k)
    weights: dict[int, int] = {}  # of messages that were made and not yet sent
    everyones = np.random.default_rng([asked.seed, n, k])
    common = _some(everyones, n, round(asked.shared * k))

    def program(transport: simulated.SimulatedTransport) -> None:
        backend = _charged_backend(CpuBackend(1), transport, costs, scale)
        messages = _Weighed(call, transport.rank, _FLOAT32, (n,), backend, weights, scale)
        gradient = _Gradient(asked, transport, n, k, common, costs)
        group = Communicator(transport, backend, messages, wire)
        try:
            algorithm.run(group, gradient, k)
        except BaseException as error:
            group.abort(error)
            raise
        group.end()

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
    """Messages, and what each would weigh in the whole problem. Words are as many there."""

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
    """A rank's contribution, of which nothing is there but the top-k: entries at random places."""

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

    def put_back(self, entries: SparseVector) -> None:
        pass


def _some(rng: np.random.Generator, n: int, count: int) -> Array:
    """So many different numbers below n."""
    found: Array = rng.choice(n, count, replace=False, shuffle=False)
    return found


def _largest(rng: np.random.Generator, count: int, density: float) -> Array:
    """Normally distributed numbers, of which none is smaller than the top-k of that density are (Marsaglia, 1964)."""
    if density > 0.5:
        values = rng.standard_normal(count)
        return np.where(values == 0, 1, values).astype(_FLOAT32)
    least = -NormalDist().inv_cdf(density / 2)
    found = np.empty(0)
    while len(found) < count:
        tail = np.sqrt(least**2 - 2 * np.log1p(-rng.random(2 * count)))
        found = np.concatenate([found, tail[rng.random(2 * count) * tail < least]])
    signed: Array = found[:count] * rng.choice((-1, 1), count)
    return signed.astype(_FLOAT32)


# What the methods of `Backend` are charged, beside a call: a cost of the profile, and how many entries or elements.
# Others are free.
_CHARGES: dict[str, tuple[str, Callable[..., float]]] = {
    "merge": ("merge", lambda a, b: a.nnz + b.nnz),
    "merge_topk": ("merge", lambda a, b, k: a.nnz + b.nnz),
    "nth_key": ("merge", lambda entries, n: entries.nnz),
    "count_keys": ("merge", lambda entries, low, shift, bins: entries.nnz),
    "split_at_key": ("merge", lambda entries, low: entries.nnz),
    "pack": ("codec", lambda entries, kind: entries.nnz / 2),
    "unpack": ("codec", lambda data, head, count, n, kind, float64_values: count / 2),
    "add": ("add", lambda total, addend: len(total)),
}


class _ChargedBackend:
    def __init__(self, backend: Backend, transport: simulated.SimulatedTransport, costs: Costs, scale: float) -> None:
        self._backend = backend
        for name, (cost, items) in _CHARGES.items():
            setattr(
                self, name, _charged(getattr(backend, name), transport, costs.call, getattr(costs, cost) * scale, items)
            )

    def __getattr__(self, name: str) -> object:
        return getattr(self._backend, name)


def _charged(
    function: Callable[..., Any],
    transport: simulated.SimulatedTransport,
    call: float,
    cost: float,
    items: Callable[..., float],
) -> Callable[..., Any]:
    def charged(*args: Any) -> Any:
        transport.compute(call + cost * items(*args))
        return function(*args)

    return charged


def _charged_backend(backend: Backend, transport: simulated.SimulatedTransport, costs: Costs, scale: float) -> Backend:
    return cast(Backend, _ChargedBackend(backend, transport, costs, scale))
