"""The collective calls: sums of contributions (`sparse_allreduce`, `SumCall`), and gathers of integers (`WordsGather`).

`sparse_allreduce` checks its arguments, looks up the plan, and passes a `SumCall` to the queue.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from sparsecomm import backends
from sparsecomm.backends import Backend, default_float_mode
from sparsecomm.calls.arguments import chunks_of, count_of, label_of, name_rank, note_skipped
from sparsecomm.calls.label import UNLABELLED, Label, Pairs
from sparsecomm.calls.measurement import LinkMeasurement, measurement_needed, plan_costs
from sparsecomm.calls.options import CallOptions, CallSettings
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import FAILED, NO_ENTRIES, Call, CallQueue, Handle, queue_of
from sparsecomm.contribution import Contribution
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.options import Unpack, check_options, with_options
from sparsecomm.primitives.communicator import Communicator, gather_words
from sparsecomm.signals import deferred
from sparsecomm.tensors.arrays import TensorLike
from sparsecomm.tensors.dtypes import FLOAT32
from sparsecomm.tensors.interop import Tensor, as_out, as_residual, tensor
from sparsecomm.tensors.sparse import SparseVector
from sparsecomm.transport import Comm, Transport, existing_transport, transport_of
from sparsecomm.wire import PLAIN, CallSignature, Messages

_NOT_PLANNED = frozenset({"decay", "label"})  # options that may differ between calls of one plan


class SumCall(Call):
    """The call that sums the contributions of all ranks. ``contribution`` is this rank's."""

    def __init__(
        self,
        plan: Plan,
        contribution: Contribution,
        label: Label = UNLABELLED,
        write: Callable[[SparseVector], None] | None = None,
        within: AbstractContextManager[object] | None = None,
        *,
        settles_with: Backend | None = None,
        submitted: bool = False,
    ) -> None:
        """Plan a sum. No other call of the plan may be in flight when this call is made.

        Args:
            label: names and values that the ranks' calls must share.
            write: called with the result when the call is decided. Must be idempotent.
            within, submitted: as in `Call`.
            settles_with: the backend with which the caller will commit the contribution, or roll it back, by `settle`.
                Another call may use the plan's backend by then. ``None``: commit when the call is decided.
        """
        super().__init__(plan.transport, within, submitted=submitted)
        self.plan, self.comm, self.contribution = plan, plan.comm, contribution
        self.label, self._write, self._settles_with = label, write, settles_with
        self._total: SparseVector | None = None  # the sum, before it is divided for a mean

    @default_float_mode
    def settle(self, *, usable: bool) -> None:
        """Commit the contribution, or roll it back if the result is not usable on all ranks.

        Ignored after a failed call, and if the contribution was committed or rolled back before.
        """
        if self._settles_with is not None and self.succeeded:
            if usable:
                self._commit(self._settles_with)
            else:
                self.contribution.rollback(self._settles_with)
            self._settles_with = None

    def _run(self) -> SparseVector:
        counters = self.transport.counters
        counters.begin_sum()
        try:
            return super()._run()
        finally:
            counters.end_sum()

    def contents(self) -> Pairs:
        return [*self.label.pairs(), *self.plan.settings.common.items(), *self.comm.contents]

    def _exchange(self) -> SparseVector:
        return self._quotient(self._sum(self.comm))

    def _sum(self, comm: Communicator) -> SparseVector:
        """Return the sum of the contributions of the ranks of ``comm``."""
        self._total = total = self.plan.algorithm.run(comm, self.contribution, self.plan.k)
        return total

    def _quotient(self, total: SparseVector) -> SparseVector:
        """Return the result: for a mean, the sum divided by the plan's divisor."""
        divisor = self.plan.divisor
        return self.contribution.backend.divide(total, divisor) if divisor > 1 else total

    def _finish(self, result: SparseVector) -> None:
        if self._settles_with is None:
            self._commit()
        if self._write is not None:
            self._write(result)

    def _commit(self, backend: Backend | None = None) -> None:
        assert self._total is not None
        self.contribution.commit(self._total, rejects=self.plan.algorithm.rejects, backend=backend)

    def _roll_back(self) -> None:
        self.contribution.rollback()


@deferred
@with_options(CallOptions, CallSettings)
def sparse_allreduce(
    x: TensorLike,
    k: int | float,
    *,
    comm: Comm = None,
    residual: TensorLike | None = None,
    out: TensorLike | None = None,
    **options: Unpack[CallOptions],
) -> SparseVector:
    """Sum the largest entries of every rank's gradient over all ranks. Collective: every rank calls it.

        residual = np.zeros_like(gradient)  # create it once and keep it from step to step
        update = sc.sparse_allreduce(gradient, 0.001, residual=residual)  # each rank selects its top 0.1 %
        total = update.to_dense()

    With a residual, the sum of all residuals after the call, plus the result, equals the sum of ``residual + x`` over
    all ranks before the call. (For a mean, multiply the result by its divisor.) Results are bit-identical on all ranks.

    Args:
        x: this rank's gradient: float16, bfloat16, float32 or float64, any shape, contiguous; anything with
            ``__dlpack__``. Not modified, unless it is also ``out``.
        k: number of entries that every rank selects, and that the result of a global top-k algorithm has: an int from
            1 to x's size, or a float in (0, 1], the density. The type decides: ``1`` is one entry, ``1.0`` all entries.
        comm: an mpi4py communicator, a process group of `torch.distributed`, or a transport. ``None`` is the job: the
            default process group if there is one, else COMM_WORLD. The library communicates on a duplicate.
        residual: of x's shape, device and type, or float32 if x has 16-bit elements; updated in place. Begin with
            zeros. Pass it on all ranks or on none.
        out: of x's shape and device, in x's type or the type of the sums; overwritten with the dense result. May be x.
            Pass it on all ranks or on none.
        options: see `sparsecomm.calls.options`.

    Returns:
        The sum, in order of index: at most k entries, or as the algorithm says. Values are float32, or float64 for
        float64, in NumPy arrays, or in CuPy arrays on a GPU. For a dense sum in a tensor of PyTorch, pass ``out=x``;
        for a sparse one, call `SparseVector.to_torch`.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was sent or written; other ranks still wait.
        CollectiveMismatchError: the ranks made different calls. Every rank raises it.
        TimeoutError: a rank did not answer within the timeout: ``SPARSECOMM_TIMEOUT``, or the process group's.
        RankFailedError: a rank died.
        TransportError: another rank left the call, or MPI failed.

    Note:
        After the last four, the residual is ``decay * residual + x``: it contains x and has decayed once. After any
        other exception, such as `KeyboardInterrupt`, use `last_call` to find out whether the call succeeded.
    """
    queue, call = prepare(x, k, comm, residual, out, options)
    return queue.call(call)


@deferred
@with_options(CallOptions, CallSettings)
def isparse_allreduce(
    x: TensorLike,
    k: int | float,
    *,
    comm: Comm = None,
    residual: TensorLike | None = None,
    out: TensorLike | None = None,
    **options: Unpack[CallOptions],
) -> Handle:
    """Start a `sparse_allreduce` and return at once. A thread of the communicator makes the call; wait for the handle.

        handle = sc.isparse_allreduce(gradient, 0.001, residual=residual)
        update = handle.wait()  # after other work

    Both kinds of calls on a communicator are made in the order in which the program submits them, which must be the
    same on all ranks. Until the call is done, do not change x, and do not use residual and out. On a CUDA device, the
    call reads x after the work already submitted to x's current stream, and uses its own stream; it is done when its
    work on the device is done.

    The thread needs an MPI with ``MPI_THREAD_MULTIPLE`` (see ``python -m sparsecomm info``). Without it, `Handle.wait`
    makes the call, and nothing overlaps. Calls that the program never waits for are made when the interpreter exits,
    since other ranks may wait for them.

    The arguments are those of `sparse_allreduce`.

    Returns:
        A handle. Its ``wait()`` returns and raises the same as `sparse_allreduce`.

    Raises:
        InvalidInputError: an argument cannot be used. Nothing was sent or written; other ranks still wait.
        TimeoutError: in the first call on a communicator, which waits for the other ranks' first calls.
    """
    queue, call = prepare(x, k, comm, residual, out, options, background=True)
    return queue.submit(call)


def prepare(
    x: object,
    k: int | float,
    comm: Comm,
    residual: object,
    out: object,
    options: Mapping[str, Any],
    *,
    background: bool = False,
) -> tuple[CallQueue, SumCall]:
    """Return the queue of a communicator, and a call of `sparse_allreduce` that is ready to be made.

    ``background``: a thread of the queue makes the call. The label may be a `Label`.

    After a `TransportError`, or any error once a measurement of links has begun, the residual is as after a failed
    call. After other errors it is unchanged.
    """
    measurement: LinkMeasurement | None = None
    try:
        t = tensor(x, "x")
        r = None if residual is None else as_residual(residual, t)
        o = None if out is None else as_out(out, t, residual=r)
        arrays, factor, label = (r is not None, o is not None), 1.0, UNLABELLED
        planned = options
        if not _NOT_PLANNED.isdisjoint(options):
            planned = {name: value for name, value in options.items() if name not in _NOT_PLANNED}
        chunk_type = type(planned.get("chunk"))  # 4 == 4.0
        key = (k, type(k), t.shape, t.dtype.code, t.device, arrays, chunk_type, *planned, *planned.values())
        transport = existing_transport(comm)
        queue = None if transport is None else queue_of(transport)
        plan = None if queue is None else queue.plans.find(key)
        if plan is None or planned is not options:
            check_options(sparse_allreduce, options)
            settings = CallSettings(**options)
            factor, label = settings.decay, label_of(settings.label)
            if factor < 1 and r is None:
                raise InvalidInputError(
                    f"decay={factor!r} without a residual to multiply; pass one, or leave decay out"
                )
        if queue is None or not isinstance(plan, Plan):
            chunks = None if settings.chunk is None else chunks_of(k, settings.chunk)
            count = count_of(k, t.size) if chunks is None else chunks.total(t.size)
            settings.check(t.dtype.name, by_chunk=chunks is not None)
            try:
                transport = transport_of(comm)
            except TransportError:
                _roll_back(t, r, factor)
                raise
            queue = queue_of(transport)
            measurement = measurement_needed(transport, settings)
            plan = Plan(
                transport,
                queue.backends.of(t.device),
                settings,
                dtype=t.dtype,
                shape=t.shape,
                size=t.size,
                k=count,
                costs=plan_costs(transport, settings, measurement),
                chunks=chunks,
                arrays=arrays,
            )
            queue.plans.keep(key, plan)
        backend = plan.backend
        contribution = Contribution(backend, t, r, t.shape, t.size, plan.chunks, factor)
        write = None if o is None else partial(backend.densify, o)
        within = backend.on_stream(t)
        if background:
            with within:
                within = backend.side_stream()
        return queue, SumCall(plan, contribution, label, write, within)
    except InvalidInputError as error:
        note_skipped(comm, error)
        raise name_rank(error, comm) from error.__cause__
    except BaseException as error:
        if measurement is not None and measurement.must_roll_back:
            _roll_back(t, r, factor)  # `last_call` reports a call that has begun and failed
        if measurement is None or not measurement.must_roll_back or measurement.state is not FAILED:
            note_skipped(comm, error)  # otherwise the other ranks know
        raise


def _roll_back(x: Tensor, residual: Tensor | None, decay: float) -> None:
    """Add x to the residual, as after a failed call."""
    backend = backends.of(x.device)
    with backend.on_stream(x):
        Contribution(backend, x, residual, x.shape, x.size, None, decay).rollback()


class WordsGather(Call):
    """All-gathers words, in order of rank."""

    name = "words of all ranks"  # in the call signature

    def __init__(self, transport: Transport, words: list[int], label: Label) -> None:
        super().__init__(transport)
        self.words = words  # ints from 0 to 2^64 - 1, equally many on all ranks. The call replaces them by the result
        self.label = label
        plans, key = queue_of(transport).plans, (self.name, len(words))
        comm = plans.find(key)
        if not isinstance(comm, Communicator):
            host = backends.CpuBackend()
            messages = Messages(self._signature(), transport.rank, FLOAT32.accumulator, (len(words),), host)
            comm = Communicator(transport, host, messages, PLAIN)
            plans.keep(key, comm)
        self.comm = comm

    def _signature(self, label: int = 0) -> CallSignature:
        return CallSignature(self.name, FLOAT32.code, 0, PLAIN.code, len(self.words), 0, label=label)

    @property
    def description(self) -> bytes:
        """The call signature that `Transport.begin` receives."""
        return self._signature(self.label.checksum).pack()

    def _exchange(self) -> SparseVector:
        self._gathered = [word for words in gather_words(self.comm, self.words, 0) for word in words]
        return NO_ENTRIES

    def _finish(self, result: SparseVector) -> None:
        self.words = self._gathered


def gather_by_rank(transport: Transport, words: list[int], label: Label) -> list[list[int]]:
    """Return the words of each rank: see `WordsGather`. Collective."""
    gather, count = WordsGather(transport, words, label), len(words)
    queue_of(transport).submit(gather).wait()
    return [gather.words[i : i + count] for i in range(0, len(gather.words), count)]


class Realignment:
    """Makes all ranks give the next call the same number: the task of `sparsecomm.realign`."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport

    def run(self) -> SparseVector:
        self._transport.realign()
        return NO_ENTRIES

    def leave(self, error: BaseException) -> None:
        """Do nothing: other ranks do not wait for a call without a number."""
