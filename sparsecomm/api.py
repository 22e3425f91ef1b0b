"""What users call."""

from __future__ import annotations

import math
import numbers
import operator
import os
import sys
import zlib
from collections.abc import Callable
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

import numpy as np

from sparsecomm import algorithms as collectives
from sparsecomm import backends, transport
from sparsecomm.calls.collective import Collective
from sparsecomm.calls.options import Options
from sparsecomm.calls.queue import Handle, queue_of
from sparsecomm.errors import InvalidInputError
from sparsecomm.feedback import Gradient
from sparsecomm.tensors import interop
from sparsecomm.tensors.dtypes import DTYPES
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.tuning import choice

if TYPE_CHECKING:
    from mpi4py import MPI

__all__ = [
    "Handle",
    "Options",
    "algorithms",
    "explain",
    "isparse_allreduce",
    "merge_topk",
    "sparse_allreduce",
    "threshold",
    "topk",
]

_P = ParamSpec("_P")
_R = TypeVar("_R")


def topk(x: Any, k: int | float, *, residual: Any = None) -> SparseVector:
    """The k entries of a tensor that are largest by absolute value, exactly.

    The order is (|v| descending, index ascending): of equal magnitudes the lower index wins. NaN ranks above
    infinity. Zeros are never selected, so fewer than k non-zeros give fewer than k entries.

    Args:
        x: float16, bfloat16, float32 or float64, any shape, contiguous; anything with ``__dlpack__``. Not written.
        k: how many: an int from 1 to x's size, or a float in (0, 1], the density.
        residual: x's shape, in x's type or float32 beside a 16-bit x; updated in place. The entries are then taken
            from ``residual + x``, and ``residual = residual + x`` without them: error feedback (Stich et al., 2018).

    Returns:
        Entries in order of index; values are float32, or float64 for float64.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was written.
    """
    t = interop.tensor(x, "x")
    r = None if residual is None else interop.as_residual(residual, t)
    backend, count = backends.of(t.device), _count(k, t.size)
    with backend.on_stream(t):
        return backend.topk(t, count, r)


def threshold(x: Any, tau: float, *, residual: Any = None) -> SparseVector:
    """Every entry of a tensor with ``|v| >= tau``, and every NaN; zeros never.

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
    if not _is_real(tau) or not tau >= 0:
        raise InvalidInputError(f"tau={tau!r}: expected a number that is at least 0")
    backend = backends.of(t.device)
    with backend.on_stream(t):
        return backend.threshold(t, float(tau), r)


def merge_topk(a: SparseVector, b: SparseVector, k: int | float) -> SparseVector:
    """The top-k of the sum of two sparse vectors, in the order of `topk`.

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
    backend, count = backends.of(a.device), _count(k, a.size)
    with backend.on_stream(None):
        return backend.merge_topk(a, b, count)[0]


def algorithms() -> dict[str, collectives.Algorithm]:
    """The algorithms of `sparse_allreduce` by name: what each does, costs and promises."""
    return dict(collectives.ALGORITHMS)


def explain(
    n: int,
    k: int | float,
    *,
    comm: MPI.Intracomm | transport.Transport | None = None,
    dtype: str = "float32",
    algorithm: str = "auto",
    wire: str = "auto",
    complete: bool = False,
) -> choice.Explanation:
    """What `sparse_allreduce` would take for a gradient of ``n`` elements, and what else would cost. Print it.

    Args:
        n: elements.
        k: as in `sparse_allreduce`.
        comm: as in `sparse_allreduce`; the first call on a communicator is collective.
        dtype: of the gradient.
        algorithm, wire, complete: as in `sparse_allreduce`.

    Raises:
        InvalidInputError: an argument cannot be used.
    """
    try:
        size = operator.index(n)
    except TypeError:
        size = 0
    if size < 1:
        raise InvalidInputError(f"n={n!r}: expected the number of elements, an int from 1 on")
    if dtype not in DTYPES:
        raise InvalidInputError(f"dtype={dtype!r}: expected one of {', '.join(DTYPES)}")
    options = Options(algorithm, "sum", wire, bool(complete))
    options.check(dtype)
    return options.explanation(transport.of(comm), size, _count(k, size), DTYPES[dtype].accumulator.itemsize)


def _says_rank(function: Callable[_P, _R]) -> Callable[_P, _R]:
    """Refused arguments name the rank that refused them: others may have passed theirs."""

    @wraps(function)
    def wrapper(*args: _P.args, **kwargs: _P.kwargs) -> _R:
        try:
            return function(*args, **kwargs)
        except InvalidInputError as error:
            rank = _rank(kwargs.get("comm"))
            if rank is None:
                raise
            raise InvalidInputError(f"rank {rank}: {error}") from error.__cause__

    return wrapper


@_says_rank
def sparse_allreduce(
    x: Any,
    k: int | float,
    *,
    comm: MPI.Intracomm | transport.Transport | None = None,
    algorithm: str = "auto",
    op: str = "sum",
    residual: Any = None,
    out: Any = None,
    wire: str = "auto",
    complete: bool = False,
    explain: bool = False,
    label: str = "",
) -> SparseVector:
    """Sum the largest entries of every rank's gradient over all ranks. Collective: every rank calls it.

    No gradient is lost if a residual is given: afterwards, summed over all ranks, ``residual`` plus the result is
    what ``residual + x`` was before (with ``op="mean"``: plus the result times the number of ranks). The result is
    the same on all ranks, bit for bit.

    Args:
        x: this rank's gradient: float16, bfloat16, float32 or float64, any shape, contiguous; anything with
            ``__dlpack__``. Not written, unless it is also ``out``.
        k: how many entries every rank selects, and how many the global top-k algorithms keep: an int from 1 to x's
            size, or a float in (0, 1], the density.
        comm: an mpi4py communicator, or a transport; ``None`` is COMM_WORLD. The library talks on a duplicate.
        algorithm: a name that `algorithms` lists, or "auto": the cheapest of the global top-k algorithms, or
            "dense" where that costs less, by the costs that `sparsecomm tune` measured, or else for links of 1 Gb/s.
        op: "sum" or "mean".
        residual: x's shape and device, in x's type or float32 beside a 16-bit x; updated in place. Begin with zeros.
        out: x's shape and device, in x's type or the type of the sums; overwritten with the dense result. May be x.
        wire: how entries travel. "plain": 8 bytes each for float32. "packed": indices in about 2 + log2(n/k) bits,
            values exact. "packed_bfloat16", "packed_float16", "packed_int8": values narrow, too; what rounding takes
            away goes to residuals. "auto": plain or packed, whichever costs less. Dense messages are not packed.
        complete: for algorithms that keep k entries: the result has, at their indices, all that any rank holds there,
            also below its own top-k, and residuals become zero there. A second, dense exchange of k values.
        explain: print on rank 0 what "auto" chose from, and why (to stderr; see `explain`).
        label: a name, such as that of the layer. Calls with other labels do not match, where otherwise two calls of
            one size, made in another order on another rank, could not be told apart.

    Returns:
        The sum, in order of index: at most k entries, or as the algorithm says. Values are float32, or float64 for
        float64.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was sent or written; other ranks still wait.
        CollectiveMismatchError: ranks made calls that do not belong together; every rank raises.
        TimeoutError: a rank did not answer for ``SPARSECOMM_TIMEOUT`` seconds.
        RankFailedError: MPI says that a rank died (under an MPI that survives it).
        TransportError: another rank left the call, or MPI failed.

        After the last four, the residual holds ``residual + x``: nothing is lost, and x is in it.
    """
    options = Options(algorithm, op, wire, bool(complete), bool(explain))
    t, r, o, count = _tensors(x, k, residual, out, options)
    backend = backends.of(t.device)
    with backend.on_stream(t):
        return _allreduce(backend, comm, t, count, options, r, o, _checksum(label))


@_says_rank
def isparse_allreduce(
    x: Any,
    k: int | float,
    *,
    comm: MPI.Intracomm | transport.Transport | None = None,
    algorithm: str = "auto",
    op: str = "sum",
    residual: Any = None,
    out: Any = None,
    wire: str = "auto",
    complete: bool = False,
    explain: bool = False,
    label: str = "",
) -> Handle:
    """`sparse_allreduce` that returns at once: a thread of the communicator makes the call. Wait for it by the handle.

    Calls on a communicator, of both kinds, are made in the order in which the program made them, which must be the
    same on all ranks. Until a call is done, do not change x, nor use residual and out. On a CUDA device it works on
    what x's current stream has been given by now, on a stream of its own, and is done when all its work is done.

    The thread needs an MPI with ``MPI_THREAD_MULTIPLE`` (``python -m sparsecomm info`` says what it has); with less,
    calls are made in `Handle.wait`, and nothing is gained. What has not been waited for when the interpreter ends is
    made then, since other ranks may wait for it.

    Args:
        As `sparse_allreduce`.

    Returns:
        A handle, of which ``wait()`` returns what `sparse_allreduce` does, and raises what it raises.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was sent or written; other ranks still wait.
        TimeoutError: on the first call on a communicator, which waits for the others to make theirs.
    """
    options = Options(algorithm, op, wire, bool(complete), bool(explain))
    t, r, o, count = _tensors(x, k, residual, out, options)
    backend = backends.of(t.device)
    with backend.on_stream(t):
        ranks = _ranks(comm, Gradient(backend, t, r))
        there, within = backend.side_stream()
    call = _collective(there, ranks, t, count, options, r, o, _checksum(label))
    call.within = within
    return queue_of(ranks).submit(call)


def _tensors(
    x: Any, k: int | float, residual: Any, out: Any, options: Options
) -> tuple[interop.Tensor, interop.Tensor | None, interop.Tensor | None, int]:
    """The checked arguments of a call: x, residual, out, and how many entries k is."""
    t = interop.tensor(x, "x")
    r = None if residual is None else interop.as_residual(residual, t)
    o = None if out is None else interop.as_out(out, t, residual=r)
    count = _count(k, t.size)
    options.check(t.dtype.name)
    return t, r, o, count


def _allreduce(
    backend: backends.Backend,
    comm: MPI.Intracomm | transport.Transport | None,
    t: interop.Tensor,
    count: int,
    options: Options,
    r: interop.Tensor | None,
    o: interop.Tensor | None,
    label: int = 0,
) -> SparseVector:
    """`sparse_allreduce` of checked arguments. `sparsecomm bench` calls it with clocks around the parts."""
    ranks = _ranks(comm, Gradient(backend, t, r))
    return queue_of(ranks).call(_collective(backend, ranks, t, count, options, r, o, label))


def _ranks(comm: MPI.Intracomm | transport.Transport | None, gradient: Gradient) -> transport.Transport:
    try:
        return transport.of(comm)
    except InvalidInputError:
        raise
    except BaseException:
        gradient.rollback()
        raise


def _collective(
    backend: backends.Backend,
    ranks: transport.Transport,
    t: interop.Tensor,
    count: int,
    options: Options,
    r: interop.Tensor | None,
    o: interop.Tensor | None,
    label: int,
) -> Collective:
    write = None if o is None else partial(backend.densify, o)
    return Collective(backend, ranks, Gradient(backend, t, r), t.shape, t.dtype, count, options, label, write)


def _checksum(label: str) -> int:
    if not isinstance(label, str):
        raise InvalidInputError(f"label={label!r}: expected a text")
    return zlib.crc32(label.encode()) or 1 if label else 0


def _is_real(value: object) -> bool:
    return isinstance(value, numbers.Real) and not isinstance(value, (bool, np.bool_))


def _count(k: Any, size: int) -> int:
    """Entries that ``k`` stands for, of a vector of ``size`` elements."""
    expected = f"k={k!r}: expected an int from 1 to {size} (the number of elements) or a float in (0, 1] (the density)"
    if not _is_real(k):
        raise InvalidInputError(expected)
    if isinstance(k, numbers.Integral):
        count = operator.index(k)
        if count < 1 or (count > size and size > 0):
            raise InvalidInputError(expected)
        return min(count, size)
    density = float(k)
    if math.isnan(density) or not 0 < density <= 1:
        raise InvalidInputError(expected)
    return min(size, max(1, round(density * size)))


def _rank(comm: Any) -> int | None:
    """This process's rank, if that can be said without starting anything."""
    if isinstance(comm, transport.Transport):
        return comm.rank
    MPI = sys.modules.get("mpi4py.MPI")
    if MPI is not None and MPI.Is_initialized() and not MPI.Is_finalized():
        try:
            return int((MPI.COMM_WORLD if comm is None else comm).Get_rank())
        except Exception:  # not a communicator, or a freed one: the error being raised says so
            return int(MPI.COMM_WORLD.Get_rank())
    for name in ("OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK", "SLURM_PROCID"):
        if os.environ.get(name, "").isdigit():
            return int(os.environ[name])
    return None
