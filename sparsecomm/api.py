"""The functions that users call, except `sparse_allreduce`."""

from __future__ import annotations

from dataclasses import dataclass

from sparsecomm import backends
from sparsecomm.algorithms import ALGORITHMS, Algorithm, AlgorithmName, Algorithms
from sparsecomm.calls.arguments import chunks_of, count_of, naming_rank
from sparsecomm.calls.collectives import Realignment
from sparsecomm.calls.measurement import costs_of
from sparsecomm.calls.nodes import NodesOption, check_nodes, find_nodes
from sparsecomm.calls.options import SumSettings
from sparsecomm.calls.queue import queue_of
from sparsecomm.checks import check_choice, quote, to_float, to_int
from sparsecomm.errors import InvalidInputError
from sparsecomm.signals import deferred
from sparsecomm.tensors import interop
from sparsecomm.tensors.arrays import TensorLike
from sparsecomm.tensors.dtypes import DTYPES, DTypeName
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Comm, existing_transport, transport_of
from sparsecomm.tuning.choice import Explanation, candidates
from sparsecomm.wire import Op, WireName


@deferred
def topk(
    x: TensorLike, k: int | float, *, residual: TensorLike | None = None, chunk: int | None = None
) -> SparseVector:
    """Return the k entries with the largest absolute values of a tensor, or of each chunk of it, exactly.

        sc.topk(np.array([3.0, -5.0, 0.5]), 2)  # indices [0, 1], values [3.0, -5.0]

    Among equal magnitudes the lower index wins. NaN ranks above infinity. Zeros are never selected, so fewer than k
    non-zeros give fewer than k entries.

    Args:
        x: float16, bfloat16, float32 or float64, any shape, contiguous; anything with ``__dlpack__``. Not modified.
        k: an int from 1 to x's size, or a float in (0, 1], the density. The type decides: ``1`` is one entry, ``1.0``
            is all entries.
        residual: of x's shape and type, or float32 if x has 16-bit elements; updated in place. The entries are selected
            from ``residual + x``, and the rest is the new residual: error feedback (Stich et al., 2018).
        chunk: select k of each ``chunk`` elements of the flat x. ``k`` is then an int from 1 to ``chunk``, or the
            density in a chunk. The last chunk may be shorter: k of it are selected, or all.

    Returns:
        Entries in order of index; values are float32, or float64 for float64.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was written.
    """
    t = interop.tensor(x, "x")
    r = None if residual is None else interop.as_residual(residual, t)
    backend = backends.of(t.device)
    if chunk is not None:
        chunks = chunks_of(k, chunk)
        with backend.on_stream(t):
            return backend.topk_by_chunk(t, chunks.k, chunks.length, r)
    count = count_of(k, t.size)
    with backend.on_stream(t):
        return backend.topk(t, count, r)


@deferred
def threshold(x: TensorLike, tau: float, *, residual: TensorLike | None = None) -> SparseVector:
    """Return every entry of a tensor with ``|v| >= tau``, and every NaN. Zeros are never selected.

        sc.threshold(np.array([3.0, -5.0, 0.5]), 1.0)  # indices [0, 1], values [3.0, -5.0]

    Args:
        x, residual: as in `topk`.
        tau: at least 0. At 0, every entry that is not zero is selected.

    Returns:
        Entries in order of index.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was written.
    """
    t = interop.tensor(x, "x")
    r = None if residual is None else interop.as_residual(residual, t)
    min_magnitude = to_float(tau)
    if not min_magnitude >= 0:  # true for NaN
        raise InvalidInputError(f"tau={quote(tau)}: must be a number of at least 0")
    backend = backends.of(t.device)
    with backend.on_stream(t):
        return backend.threshold(t, min_magnitude, r)


@deferred
def merge_topk(a: SparseVector, b: SparseVector, k: int | float) -> SparseVector:
    """Return the top-k of the sum of two sparse vectors, in the order of `topk`.

        sc.merge_topk(sc.topk(x, 0.01), sc.topk(y, 0.01), 0.01)

    Args:
        a, b: vectors of the same size and type of values.
        k: as in `topk`.

    Raises:
        InvalidInputError: the vectors do not fit together, or k is out of range.
    """
    for name, v in (("a", a), ("b", b)):
        if not isinstance(v, SparseVector):
            raise InvalidInputError(f"{name}: got {type(v).__name__}; expected a SparseVector, as topk returns")
    if a.size != b.size or a._accumulator != b._accumulator:
        raise InvalidInputError(
            f"b: got size {b.size} and {b._accumulator}; expected a's size {a.size} and {a._accumulator}"
        )
    if a.device != b.device:
        raise InvalidInputError(f"b is on {b.device}; expected {a.device}, where a is; keep both on one device")
    backend, count = backends.of(a.device), count_of(k, a.size)
    with backend.on_stream(None):
        return backend.merge_topk(a, b, count)[0]


def algorithms() -> Algorithms:
    """Return the algorithms of `sparse_allreduce` by name, with their costs and promises. Print it for a table.

    It also finds names with parameters: ``algorithm=sc.algorithms()[f"split:{ratio}"]``.
    """
    return Algorithms(ALGORITHMS)


def explain(
    n: int,
    k: int | float,
    *,
    comm: Comm = None,
    dtype: DTypeName = "float32",
    algorithm: AlgorithmName | Algorithm = "auto",
    op: Op = "sum",
    wire: WireName = "auto",
    nodes: NodesOption = False,
) -> Explanation:
    """Return the algorithm and wire format that `sparse_allreduce` would use, and the costs of others. Print it.

    Call it on all ranks: the first call on a communicator, and the first one that has to measure costs, are collective.

    Args:
        n: number of elements of the gradient.
        dtype: of the gradient.
        k, comm, algorithm, op, wire: as in `sparse_allreduce`.
        nodes: as in `Reducer`. With nodes, the call is one of those that the ranks of a node make at the same time,
            each for a slice of the gradient, after a dense sum inside the node, which is not counted.

    Raises:
        InvalidInputError: an argument cannot be used.
        SparseCommError: costs could not be measured, as in `sparse_allreduce`.
    """
    if (size := to_int(n, 1)) is None:
        raise InvalidInputError(f"n={quote(n)}: expected the number of elements, an int from 1 to 2^63 - 1")
    check_choice("dtype", dtype, DTYPES)
    settings = SumSettings(algorithm=algorithm, op=op, wire=wire)
    settings.check(dtype)
    transport = transport_of(comm)
    costs = costs_of(transport)
    groups, _ = find_nodes(transport, check_nodes(nodes))
    m = 1 if groups is None else groups.per_node
    count, shared = count_of(k, size), costs.costs.shared_by(m)
    query = settings.query(transport, -(-size // m), -(-count // m), DTYPES[dtype].accumulator.itemsize, m)
    return Explanation(query, shared, costs.source, candidates(query, shared), m)


@deferred
@naming_rank
def realign(comm: Comm = None) -> None:
    """Let ranks whose calls are out of step continue together. Collective over the communicator.

    If one rank is interrupted before a call begins, and continues without making it, it is one call behind the other
    ranks. All later calls then raise `CollectiveMismatchError`. This function sets all ranks to the largest call
    number. Call it when the ranks have agreed to continue after an error; it does no harm if they are in step. Earlier
    calls of `isparse_allreduce` are completed first.

    Raises:
        InvalidInputError: the communicator cannot be used.
        TimeoutError: a rank did not call it within the timeout. Call it again to retry.
        RankFailedError, TransportError: a rank died, or MPI failed.
    """
    transport = transport_of(comm)
    queue = queue_of(transport)
    queue.call(Realignment(transport))
    queue.plans.use_costs(None)


@dataclass(frozen=True)
class LastCall:
    """The latest call that this rank has begun on a communicator.

    Attributes:
        number: of the call, from 1; 0 if there was none.
        succeeded: true if the result was written, and the residual holds the rest. False if the call is in flight or
            has failed. After a failed call, the residual is ``residual + x``.
    """

    number: int
    succeeded: bool


def last_call(comm: Comm = None) -> LastCall:
    """Return the number of this rank's latest call and whether it succeeded. Not collective.

    A signal handler may raise an exception, such as `KeyboardInterrupt`, before, during or after a call. Compare the
    call numbers: if they are equal, the call has not begun and nothing has changed.

        before = sc.last_call(comm).number
        try:
            sc.sparse_allreduce(x, k, comm=comm, residual=residual)
        except KeyboardInterrupt:
            last = sc.last_call(comm)
            residual_contains_x = last.number > before and not last.succeeded

    Calls of `isparse_allreduce` and of a `Reducer` count, too, from the moment when they begin.

    Raises:
        InvalidInputError: ``comm`` is not a communicator, or cannot be used.
    """
    transport = existing_transport(comm)
    if transport is None:
        return LastCall(0, False)
    return LastCall(transport.number, transport.last_success == transport.number)
