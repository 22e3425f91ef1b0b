"""One call on simulated ranks: the shipped algorithm on a smaller problem, at the cost of the full one.

A problem of n elements and k entries is run with n/s and k/s. A message with H bytes of header and table and B other
bytes then counts as H + s B bytes, and work on m entries or elements as work on s m.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import dataclass
from statistics import NormalDist
from typing import Any, NamedTuple, cast

import numpy as np

from sparsecomm.algorithms import Algorithm
from sparsecomm.backends import Backend, CpuBackend
from sparsecomm.contribution import Contribution
from sparsecomm.primitives.communicator import Communicator
from sparsecomm.primitives.costs import Costs
from sparsecomm.tensors.arrays import Array, Bytes
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.tensors.sparse import SparseVector, index_dtype
from sparsecomm.transport import simulated
from sparsecomm.wire import HEADER_BYTES, CallSignature, Messages, Wire

_FLOAT32 = np.dtype(np.float32)

# Algorithms with few messages and entries per rank; the numbers of ranks up to which these and others are simulated.
_FEW = ("tree", "butterfly")
_MAX_FEW, _MAX = 8192, 512

# Limits of a simulation: entries that all ranks handle together, and elements that they hold.
_HANDLED, _HELD = 1 << 25, 1 << 23
_MIN = 256  # entries per rank; with fewer, what a wire format adds to them would matter


@dataclass(frozen=True)
class Problem:
    """A call of all ranks."""

    n: int  # elements, and entries that each rank selects
    k: int
    costs: Costs  # the costs of messages and work
    per_node: int = 1  # ranks per node
    common: float = 0.5  # the part of a rank's entries that all ranks select

    def node_of_rank(self, P: int) -> list[int]:
        """Return the number of the node of each of P ranks."""
        return [rank // self.per_node for rank in range(P)]

    def network(self, P: int) -> dict[str, Any]:
        """Return the network as arguments of `simulated.run`."""
        link, node = self.costs.link, self.costs.node or self.costs.link
        between, inside = ({"alpha": costs.alpha, "beta": costs.beta, "gap": costs.gap} for costs in (link, node))
        inside = {f"node_{name}": value for name, value in inside.items()}
        return {"node_of_rank": self.node_of_rank(P), **between, **inside}


@dataclass(frozen=True)
class Outcome:
    """The result of a simulated call, under the names that it has in the JSON file.

    Times are those of the rank that ends last, amounts those of the rank that has most.
    """

    exchange_seconds: float  # of the messages alone
    step_seconds: float  # with the work
    sent_bytes_per_rank: int
    received_bytes_per_rank: int
    messages_per_rank: int  # that it sends or receives
    scale: float  # the factor by which the simulated problem was smaller


def simulate(problem: Problem, P: int, algorithm: Algorithm, wire: Wire) -> Outcome:
    """Run an algorithm twice, without work and with it, and return its costs."""
    idle = Costs(problem.costs.link, problem.costs.node)
    n, k = _smaller(algorithm.name, P, problem.n, problem.k)
    without, with_work = (_call(problem, P, algorithm, wire, n, k, costs) for costs in (idle, problem.costs))
    return Outcome(
        exchange_seconds=without.seconds,
        step_seconds=with_work.seconds,
        sent_bytes_per_rank=without.bytes_sent,
        received_bytes_per_rank=without.bytes_received,
        messages_per_rank=without.messages,
        scale=problem.n / n,
    )


def step_seconds(problem: Problem, P: int, algorithm: Algorithm, wire: Wire) -> float:
    """Return the seconds of a call with its work, see `Outcome`."""
    n, k = _smaller(algorithm.name, P, problem.n, problem.k)
    return _call(problem, P, algorithm, wire, n, k, problem.costs).seconds


def in_seconds(name: str, ranks: int) -> bool:
    """Return whether an algorithm on ``ranks`` ranks can be simulated in seconds."""
    inner = name.partition(":")[2] or name
    return ranks <= (_MAX_FEW if inner in _FEW or name == "hierarchical" else _MAX)


def _smaller(name: str, P: int, n: int, k: int) -> tuple[int, int]:
    """Return the elements and entries of the problem that is run."""
    if name == "dense":
        small = min(n, max(64 * P, _HELD // P))
        return small, min(k, small)
    rounds = max(P - 1, 1).bit_length()
    # Entries per rank and entry selected.
    handled = {"tree": 2, "butterfly": 2 * rounds, "split": rounds + 5, "double": rounds + 5}
    handled["hierarchical"] = 2 * rounds + 2
    inner = name.partition(":")[2] or name
    fits = _HANDLED // (P * handled.get(inner, P * (rounds + 1)))
    min_entries = max(_MIN, 40 * P) if inner == "split" else _MIN  # its ranges are unequal if they have few entries
    small = min(k, max(fits, min_entries))
    return max(small, math.ceil(n / k * small)) if small < k else n, small


# -- one call ---------------------------------------------------------------------------------------------------------


class _Cost(NamedTuple):
    """The cost of a call: of the last rank in time, and of the ranks with the most bytes and messages."""

    seconds: float
    bytes_sent: int
    bytes_received: int
    messages: int


def _call(problem: Problem, P: int, algorithm: Algorithm, wire: Wire, n: int, k: int, costs: Costs) -> _Cost:
    """Run a call with n elements and k entries, at the cost of the full problem, and return its cost.

    For algorithms that keep something from call to call, it is the second of two calls.
    """
    scale = problem.n / n
    call = CallSignature(algorithm.name, DTYPES["float32"].code, 0, wire.code, n, k)
    weights: dict[int, int] = {}  # by id of the message; all messages are kept, so that ids are unique
    common = _indices(np.random.default_rng([n, k]), n, round(problem.common * k))

    def program(transport: simulated.SimulatedTransport) -> list[_Cost]:
        backend = cast(Backend, _ChargedBackend(CpuBackend(1), transport, costs, scale))
        messages = _Weighed(call, transport.rank, _FLOAT32, (n,), backend)
        messages.weights, messages.scale = weights, scale
        comm = Communicator(transport, backend, messages, wire, costs)
        seen = [_Cost(0.0, 0, 0, 0)]
        for number in range(2 if "split" in algorithm.name else 1):
            comm.begin()
            try:
                gradient = _Gradient(problem, backend, n, common, number)
                algorithm.run(comm, cast(Contribution, gradient), k)
            except BaseException as error:
                transport.abort(error)
                raise
            transport.end()
            moved = transport.counters
            either = max(moved.messages_sent, moved.messages_received)
            seen.append(_Cost(transport.seconds, moved.bytes_sent, moved.bytes_received, either))
        return seen[-2:]

    results = simulated.run(P, program, weigh=lambda data: weights.get(id(data), len(data)), **problem.network(P))
    before, after = zip(*(result.value for result in results if result.value is not None), strict=True)
    seconds = max(amounts.seconds for amounts in after) - max(amounts.seconds for amounts in before)
    taken = [[b - a for a, b in zip(*pair, strict=True)][1:] for pair in zip(before, after, strict=True)]
    return _Cost(seconds, *(round(max(amounts)) for amounts in zip(*taken, strict=True)))


class _Weighed(Messages):
    """Messages with their bytes in the full problem. Messages of words are not scaled."""

    weights: dict[int, int]
    scale: float

    def entries(self, entries: SparseVector, wire: Wire, round_no: int) -> Bytes:
        return self._weighed(super().entries(entries, wire, round_no), HEADER_BYTES)

    def parcel(self, vectors: Sequence[SparseVector], words: Sequence[int], wire: Wire, round_no: int) -> Bytes:
        message = super().parcel(vectors, words, wire, round_no)
        fixed = len(super().parcel([v.part(0, 0) for v in vectors], words, wire, round_no))
        return self._weighed(message, fixed)

    def dense(self, segment: Array, round_no: int) -> Bytes:
        return self._weighed(super().dense(segment, round_no), HEADER_BYTES)

    def _weighed(self, message: Bytes, fixed: int) -> Bytes:
        self.weights[id(message)] = fixed + round(self.scale * (len(message) - fixed))
        return message


class _Gradient:
    """Replaces a `Contribution`: only the top-k exists, with entries at random indices."""

    def __init__(self, problem: Problem, backend: Any, n: int, common: Array, number: int) -> None:
        self.shape, self.size, self.backend = (n,), n, backend
        self._problem, self._transport, self._common, self._costs = problem, backend.transport, common, backend.costs
        self._seed = [n, self._transport.rank, number] if number else [n, self._transport.rank]
        self._selection: SparseVector | None = None  # see `with_selection`

    def topk(self, k: int) -> SparseVector:
        if self._selection is not None:
            return self._selection
        self._transport.compute(self._costs.select * self._problem.n)
        n = self.size
        rng = np.random.default_rng([k, *self._seed])
        own = np.setdiff1d(_indices(rng, n, k), self._common, assume_unique=True)
        own = rng.permutation(own)[: k - len(self._common)]
        indices = np.sort(np.concatenate([self._common, own])).astype(index_dtype(n))
        return SparseVector.trusted(indices, _values(rng, k, self._problem.k / self._problem.n), n, self.shape)

    def with_selection(self, entries: SparseVector) -> _Gradient:
        stage = copy(self)
        stage._selection = entries
        return stage

    def topk_of_ranges(self, ranges: Sequence[tuple[int, int, int]]) -> list[SparseVector]:
        self._transport.compute(self._costs.select * self._problem.n)
        n, rng, parts = self.size, np.random.default_rng([len(ranges), *self._seed]), []
        for begin, end, k in ranges:
            indices = begin + np.sort(_indices(rng, end - begin, k)).astype(index_dtype(n))
            values = _values(rng, k, self._problem.k / self._problem.n)
            parts.append(SparseVector.trusted(indices, values, n, self.shape))
        return parts

    def topk_of_sums(self, begin: int, end: int, received: Sequence[SparseVector], k: int) -> SparseVector:
        sums = self.backend.sum_in_pairs([*received, *self.topk_of_ranges([(begin, end, k)])])
        return self.backend.merge_topk(sums, sums.part(0, 0), k)[0]

    def whole(self) -> Array:
        self._transport.compute(self._costs.add * self._problem.n)
        return np.zeros(self.shape, _FLOAT32)

    def record_dropped(self, entries: SparseVector) -> None:
        pass


def _indices(rng: np.random.Generator, n: int, count: int) -> Array:
    """Return ``count`` distinct numbers below n."""
    return rng.choice(n, count, replace=False, shuffle=False)


def _values(rng: np.random.Generator, count: int, density: float) -> Array:
    """Return numbers as large as the top-k of that density: nearly the tails of a normal distribution."""
    threshold = NormalDist().inv_cdf(1 - density / 2)
    values: Array = np.sqrt(threshold**2 - 2 * np.log1p(-rng.random(count))) * rng.choice((-1, 1), count)
    return values.astype(_FLOAT32)


# The charges for methods of `Backend`, beside `Costs.call`: a cost of the profile, and the number of entries or
# elements that it applies to. Other methods are free.
_CHARGES: dict[str, tuple[str, Callable[..., float]]] = {
    "merge": ("merge", lambda a, b: a.nnz + b.nnz),
    "merge_topk": ("merge", lambda a, b, k: a.nnz + b.nnz),
    "nth_keys": ("merge", lambda entries, numbers: entries.nnz),
    "split_by_key": ("merge", lambda entries, low, high: entries.nnz),
    "pack": ("codec", lambda entries, kind: entries.nnz / 2),
    "unpack": ("codec", lambda data, head, count, n, kind, float64_values: count / 2),
    "add": ("add", lambda total, addend: len(total)),
}


class _ChargedBackend:
    """A backend whose work takes virtual time."""

    def __init__(self, backend: Backend, transport: simulated.SimulatedTransport, costs: Costs, scale: float) -> None:
        self._backend, self.transport, self.costs, self._scale = backend, transport, costs, scale

    def sum_in_pairs(self, vectors: list[SparseVector]) -> SparseVector:
        """Merge by this backend, so that merges take virtual time."""
        return Backend.sum_in_pairs(cast(Backend, self), vectors)

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._backend, name)
        if name not in _CHARGES:
            return function
        cost, items = _CHARGES[name]

        def charged(*args: Any, **kwargs: Any) -> Any:
            unit = getattr(self.costs, cost) * self._scale
            self.transport.compute(self.costs.call + unit * items(*args, **kwargs))
            return function(*args, **kwargs)

        return charged
