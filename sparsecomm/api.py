"""The functions that users call."""

from __future__ import annotations

from typing import Any

from sparsecomm import backends, transport
from sparsecomm.algorithms import ALGORITHMS, Algorithm, AlgorithmName, Algorithms, register_algorithm
from sparsecomm.calls import sparse
from sparsecomm.calls.agreement import Realignment
from sparsecomm.calls.arguments import Comm, chunks_of, count_of, naming_rank
from sparsecomm.calls.last_call import LastCall, last_call
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.calls.weights import check_weights
from sparsecomm.checks import check_choice, number, shown, whole
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import DTYPES, DTypeName
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.tuning.choice import Explanation
from sparsecomm.wire import Op, WireName

__all__ = [
    "Algorithm",
    "Handle",
    "LastCall",
    "algorithms",
    "check_weights",
    "explain",
    "isparse_allreduce",
    "last_call",
    "merge_topk",
    "realign",
    "register_algorithm",
    "sparse_allreduce",
    "threshold",
    "topk",
]


def topk(x: Any, k: int | float, *, residual: Any = None, chunk: int | None = None) -> SparseVector:
    """Return the k entries of a tensor, or of each chunk of it, that are largest by absolute value, exactly.

    The order is (|v| descending, index ascending): of equal magnitudes the lower index wins. NaN ranks above
    infinity. Zeros are never selected, so fewer than k non-zeros give fewer than k entries.

    Args:
        x: float16, bfloat16, float32 or float64, any shape, contiguous; anything with ``__dlpack__``. Not written.
        k: how many: an int from 1 to x's size, or a float in (0, 1], the density. The type decides: ``1`` is one entry,
            ``1.0`` all of them.
        residual: x's shape, in x's type or float32 beside a 16-bit x; updated in place. The entries are then taken
            from ``residual + x``, and ``residual = residual + x`` without them: error feedback (Stich et al., 2018).
        chunk: select k of every so many elements of the flat x, from its first one on. ``k`` is then an int from 1 to
            ``chunk``, or a float, of the chunk's elements. The last chunk may be shorter: k of it, or all.

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


def threshold(x: Any, tau: float, *, residual: Any = None) -> SparseVector:
    """Return every entry of a tensor with ``|v| >= tau``, and every NaN; zeros never.

    Args:
        x, residual: as in `topk`.
        tau: at least 0. At 0 every entry that is not zero is selected.

    Returns:
        Entries in order of index.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was written.
    """
    t = interop.tensor(x, "x")
    r = None if residual is None else interop.as_residual(residual, t)
    min_magnitude = number(tau)
    if not min_magnitude >= 0:  # NaN is not
        raise InvalidInputError(f"tau={shown(tau)}: expected a number that is at least 0")
    backend = backends.of(t.device)
    with backend.on_stream(t):
        return backend.threshold(t, min_magnitude, r)


def merge_topk(a: SparseVector, b: SparseVector, k: int | float) -> SparseVector:
    """Return the top-k of the sum of two sparse vectors, in the order of `topk`.

    Args:
        a, b: of one size and one type of values.
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
    """Return the algorithms of `sparse_allreduce` by name: what each does, costs and promises. Print it for a table.

    Names that a program puts together are looked up in it, too: ``algorithm=sc.algorithms()[f"split:{ratio}"]``.
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
) -> Explanation:
    """Return what `sparse_allreduce` would take for a gradient of ``n`` elements, and what else would cost. Print it.

    Args:
        n: elements.
        k: as in `sparse_allreduce`.
        comm: as in `sparse_allreduce`; the first call on a communicator is collective.
        dtype: of the gradient.
        algorithm, op, wire: as in `sparse_allreduce`.

    Raises:
        InvalidInputError: an argument cannot be used.
    """
    if (size := whole(n, 1)) is None:
        raise InvalidInputError(f"n={shown(n)}: expected the number of elements, an int from 1 to 2^63 - 1")
    check_choice("dtype", dtype, DTYPES)
    options = Options.of(algorithm, op, wire)
    options.check(dtype)
    return options.explanation(transport.of(comm), size, count_of(k, size), DTYPES[dtype].accumulator.itemsize)


def sparse_allreduce(
    x: Any,
    k: int | float,
    *,
    comm: Comm = None,
    algorithm: AlgorithmName | Algorithm = "auto",
    op: Op = "sum",
    residual: Any = None,
    out: Any = None,
    wire: WireName = "auto",
    chunk: int | None = None,
    decay: float = 1.0,
    label: str = "",
) -> SparseVector:
    """Sum the largest entries of every rank's gradient over all ranks. Collective: every rank calls it.

    No gradient is lost if a residual is given: afterwards, summed over all ranks, ``residual`` plus the result is
    what ``residual + x`` was before (with ``op="mean"``: plus the result times the number of ranks; and likewise with
    ``op="mean_of_contributors"``). The result is the same on all ranks, bit for bit.

    Args:
        x: this rank's gradient: float16, bfloat16, float32 or float64, any shape, contiguous; anything with
            ``__dlpack__``. Not written, unless it is also ``out``.
        k: how many entries every rank selects, and how many the global top-k algorithms keep: an int from 1 to x's
            size, or a float in (0, 1], the density. The type decides: ``1`` is one entry, ``1.0`` all of them.
        comm: an mpi4py communicator, a process group of `torch.distributed`, or a transport; ``None`` is the job: the
            default process group if there is one, else COMM_WORLD. The library talks on a duplicate.
        algorithm: a name that `algorithms` lists, or what it holds there; or "split:R", which is "split" with a result
            of R k entries, R = 2, 3, ..., as trainings of few rounds want it; or "auto": the cheapest of the global
            top-k algorithms, or "dense" where that costs less, by the costs that `sparsecomm tune` measured, or else
            for links of 1 Gb/s.
        op: "sum", or "mean": the sum divided by the number of ranks. "mean_of_contributors": the sum at each index
            divided by the number of ranks that sent an entry there. Only some algorithms know that number
            (docs/algorithms/index.md); "auto" chooses among these. The result has the indices that it has for "sum".
        residual: x's shape and device, in x's type or float32 beside a 16-bit x; updated in place. Begin with zeros. On
            all ranks, or on none.
        out: x's shape and device, in x's type or the type of the sums; overwritten with the dense result. May be x. On
            all ranks, or on none.
        wire: how entries travel. "plain": 8 bytes each for float32. "packed": indices in about 2 + log2(n/k) bits,
            values exact. "packed_bfloat16", "packed_float16", "packed_int8", "packed_int4", "packed_int2",
            "packed_sign": values narrow, too; what rounding takes away goes to residuals. "auto": plain or packed,
            whichever costs less. Dense messages are not packed.
        chunk: every rank selects k of each so many elements, as in `topk`. The global top-k algorithms keep as many
            entries of the sum as that is in all, wherever they are; "dense" still sums all. The same on all ranks.
        decay: in (0, 1]: the residual counts as ``decay * residual``, everywhere here: what it lacks is forgotten on
            purpose (SparseLoCo: Sarfi et al., 2025). Ranks may differ in it. Not with ``algorithm="dense"``.
        label: a name, such as that of the layer. Calls with other labels do not match, where otherwise two calls of
            one size, made in another order on another rank, could not be told apart.

    Returns:
        The sum, in order of index: at most k entries, or as the algorithm says. Values are float32, or float64 for
        float64. They are NumPy arrays, or CuPy arrays on a GPU, also for tensors of PyTorch: pass ``out=x`` to have the
        dense sum in a tensor, or call `SparseVector.to_torch`.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was sent or written; other ranks still wait.
        CollectiveMismatchError: ranks made calls that do not belong together; every rank raises.
        TimeoutError: a rank did not answer for ``SPARSECOMM_TIMEOUT`` seconds.
        RankFailedError: MPI says that a rank died (under an MPI that survives it).
        TransportError: another rank left the call, or MPI failed.

    Note:
        After the last four, the residual holds ``decay * residual + x``: x is in it, and it has decayed once. After any
        other exception, such as `KeyboardInterrupt`, `last_call` says what became of the call.
    """
    return sparse.make(x, k, comm, algorithm, op, residual, out, wire, chunk, decay, label)


def isparse_allreduce(
    x: Any,
    k: int | float,
    *,
    comm: Comm = None,
    algorithm: AlgorithmName | Algorithm = "auto",
    op: Op = "sum",
    residual: Any = None,
    out: Any = None,
    wire: WireName = "auto",
    chunk: int | None = None,
    decay: float = 1.0,
    label: str = "",
) -> Handle:
    """`sparse_allreduce` that returns at once: a thread of the communicator makes the call. Wait for it by the handle.

    Calls on a communicator, of both kinds, are made in the order in which the program made them, which must be the
    same on all ranks. Until a call is done, do not change x, nor use residual and out. On a CUDA device it works on
    what x's current stream has been given by now, on a stream of its own, and is done when all its work is done.

    The thread needs an MPI with ``MPI_THREAD_MULTIPLE`` (``python -m sparsecomm info`` says what it has); with less,
    calls are made in `Handle.wait`, and nothing is gained. What has not been waited for when the interpreter ends is
    made then, since other ranks may wait for it.

    The arguments are those of `sparse_allreduce`.

    Returns:
        A handle, of which ``wait()`` returns what `sparse_allreduce` does, and raises what it raises.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was sent or written; other ranks still wait.
        TimeoutError: on the first call on a communicator, which waits for the others to make theirs.
    """
    return sparse.submit(x, k, comm, algorithm, op, residual, out, wire, chunk, decay, label)


@naming_rank
def realign(comm: Comm = None) -> None:
    """Let ranks meet again whose calls do not pair any more. All ranks of the communicator must call it.

    Calls are numbered. A rank that was interrupted before its call began, and goes on, is one call behind the others
    from then on, and calls raise `CollectiveMismatchError`. Here all ranks tell their numbers, and go on from the
    largest. What still comes of earlier calls is discarded. Call it when the ranks have agreed to go on after an error;
    it does no harm where they are not apart. Calls in the background that were submitted before are made before.

    Args:
        comm: as in `sparse_allreduce`.

    Raises:
        InvalidInputError: the communicator cannot be used.
        TimeoutError: a rank did not call it for ``SPARSECOMM_TIMEOUT`` seconds. It may be called again.
        RankFailedError, TransportError: a rank died, or MPI failed.
    """
    ranks = transport.of(comm)
    queue_of(ranks).call(Realignment(ranks))
