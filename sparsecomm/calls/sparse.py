"""`sparsecomm.sparse_allreduce`: arguments are checked, the plan is looked up, and the queue makes the call."""

from __future__ import annotations

from functools import partial
from typing import Any

from sparsecomm import backends, transport
from sparsecomm.algorithms import Algorithm, AlgorithmName
from sparsecomm.calls.arguments import chunks_of, count_of, decay_of, label_checksum, name_rank, note_skipped
from sparsecomm.calls.call import SumCall
from sparsecomm.calls.measurement import LinkMeasurement, measurement_needed, plan_costs
from sparsecomm.calls.options import Options
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue, Handle, queue_of
from sparsecomm.contribution import Contribution, Segment
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.tensors.interop import Tensor, as_out, as_residual, tensor
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Comm
from sparsecomm.wire import Op, WireName

__all__ = ["isparse_allreduce", "prepare", "sparse_allreduce"]


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
            of R k entries, R = 2, 3, ..., as trainings of few rounds want it; or "fastest": the cheapest of the global
            top-k algorithms, by the costs that `sparsecomm tune` measured, or else for links of 1 Gb/s; or "auto": the
            same, or "dense" where that costs less.
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
    queue, call = prepare(x, k, comm, algorithm, op, residual, out, wire, chunk, decay, label, background=False)
    return queue.call(call)


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
    queue, call = prepare(x, k, comm, algorithm, op, residual, out, wire, chunk, decay, label, background=True)
    return queue.submit(call)


def prepare(
    x: Any,
    k: Any,
    comm: Any,
    algorithm: Any,
    op: Any,
    residual: Any,
    out: Any,
    wire: Any,
    chunk: Any,
    decay: Any,
    label: Any,
    *,
    background: bool,
) -> tuple[CallQueue, SumCall]:
    """Return the queue of a communicator, and a call that is ready to be made.

    The arguments are those of `sparsecomm.sparse_allreduce`. ``background``: a thread of the queue makes the call.

    Raises:
        InvalidInputError: one of them cannot be used.
        TransportError: see `sparsecomm.transport.transport_of`. The residual is as after a call that failed.
        CollectiveMismatchError: so is it here.
        BaseException: anything else, such as an interrupt. Nothing has changed, unless it came in the call that
            measures costs, or after that: then it is as after a call that failed.
    """
    measurement: LinkMeasurement | None = None
    try:
        t = tensor(x, "x")
        r = None if residual is None else as_residual(residual, t)
        o = None if out is None else as_out(out, t, residual=r)
        part = 1.0 if type(decay) is float and decay == 1.0 else decay_of(decay, r, algorithm)
        word = 0 if type(label) is str and not label else label_checksum(label)
        given = r is not None, o is not None
        key = (k, type(k), t.shape, t.dtype.code, t.device, given, algorithm, op, wire, chunk, type(chunk))
        ranks = transport.existing_transport(comm)
        queue = None if ranks is None else queue_of(ranks)
        plan = None if queue is None else queue.plans.find(key)
        if queue is None or plan is None:
            options = Options.of(algorithm, op, wire)
            chunks = None if chunk is None else chunks_of(k, chunk)
            count = count_of(k, t.size) if chunks is None else chunks.total(t.size)
            options.check(t.dtype.name, by_chunk=chunks is not None)
            try:
                ranks = transport.transport_of(comm)
            except TransportError:
                _keep(t, r, part)
                raise
            queue = queue_of(ranks)
            measurement = measurement_needed(ranks, options)
            costs = plan_costs(ranks, options, measurement)
            backend = queue.backends.of(t.device)
            plan = Plan(ranks, backend, t.dtype, t.shape, t.size, count, options, costs, chunks, given)
            queue.plans.keep(key, plan)
        backend = plan.backend
        contribution = Contribution(backend, (Segment(t, r),), r, t.shape, t.size, plan.chunks, part)
        write = None if o is None else partial(backend.densify, o)
        within = backend.on_stream(t)
        if background:
            with within:
                within = backend.side_stream()
        return queue, SumCall(plan, contribution, word, write, within)
    except InvalidInputError as error:
        note_skipped(comm, error)
        raise name_rank(error, comm) from error.__cause__
    except BaseException as error:
        if measurement is not None and measurement.must_keep:
            # `last_call` says that a call has begun, and does not count.
            _keep(t, r, part)
        if measurement is None or not measurement.failed:  # else this rank has left the call that the others are in
            note_skipped(comm, error)
        raise


def _keep(x: Tensor, residual: Tensor | None, decay: float) -> None:
    """Add x to the residual, as after a call that failed."""
    backend = backends.of(x.device)
    with backend.on_stream(x):
        Contribution(backend, (Segment(x, residual),), residual, x.shape, x.size, None, decay).rollback()
