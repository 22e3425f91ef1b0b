"""`sparsecomm.sparse_allreduce`: arguments are checked, the plan is looked up, and the queue makes the call."""

from __future__ import annotations

from contextlib import AbstractContextManager
from functools import partial
from typing import Any

from sparsecomm import backends, transport
from sparsecomm.calls.arguments import chunks_of, count_of, decay_of, label_checksum, name_rank, note_skipped
from sparsecomm.calls.call import SumCall
from sparsecomm.calls.options import Options
from sparsecomm.calls.plan import Plan
from sparsecomm.calls.queue import CallQueue, Handle, queue_of
from sparsecomm.contribution import Contribution, Segment
from sparsecomm.errors import InvalidInputError, TransportError
from sparsecomm.tensors.interop import CPU, Tensor, as_out, as_residual, tensor
from sparsecomm.tensors.sparse import SparseVector

__all__ = ["begin", "make", "submit"]


def make(*arguments: Any) -> SparseVector:
    """Make a call with the arguments of `begin`, in their order, and return its result."""
    queue, call = begin(*arguments, background=False)
    return queue.call(call)


def submit(*arguments: Any) -> Handle:
    """Have a call with the arguments of `begin`, in their order, made, and return its handle."""
    queue, call = begin(*arguments, background=True)
    return queue.submit(call)


def begin(
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
        TransportError: see `sparsecomm.transport.of`. The residual is as after a call that failed.
        BaseException: anything else, such as an interrupt. Nothing has changed.
    """
    try:
        t = tensor(x, "x")
        r = None if residual is None else as_residual(residual, t)
        o = None if out is None else as_out(out, t, residual=r)
        part = 1.0 if type(decay) is float and decay == 1.0 else decay_of(decay, r, algorithm)
        word = 0 if type(label) is str and not label else label_checksum(label)
        device = None if t.device is CPU else t.device
        given = r is not None, o is not None
        key = (k, type(k), t.shape, t.dtype.code, device, given, algorithm, op, wire, chunk, type(chunk))
        ranks = transport.existing(comm)
        plan = None if ranks is None else queue_of(ranks).plans.find(key)
        if plan is None:
            options = Options.of(algorithm, op, wire)
            chunks = None if chunk is None else chunks_of(k, chunk)
            count = count_of(k, t.size) if chunks is None else chunks.total(t.size)
            options.check(t.dtype.name)
            ranks = _connect(comm, t, r, part)
            backend = queue_of(ranks).backends.of(t.device)
            plan = Plan(ranks, backend, t.dtype, t.shape, t.size, count, options, chunks, given=given)
            queue_of(ranks).plans.keep(key, plan)
        backend = plan.backend
        contribution = Contribution(backend, (Segment(t, r),), r, t.shape, t.size, plan.chunks, part)
        write = None if o is None else partial(backend.densify, o)
        within: AbstractContextManager[object] | None = None
        if t.device is not CPU:
            within = backend.on_stream(t)
            if background:
                with within:
                    within = backend.side_stream()
        return queue_of(plan.ranks), SumCall(plan, contribution, word, write, within)
    except InvalidInputError as error:
        note_skipped(comm, error)
        raise name_rank(error, comm) from error.__cause__
    except BaseException as error:
        note_skipped(comm, error)
        raise


def _connect(comm: Any, x: Tensor, residual: Tensor | None, decay: float) -> transport.Transport:
    """Return the transport of ``comm``; where there is none, keep x in the residual."""
    try:
        return transport.of(comm)
    except TransportError:
        backend = backends.of(x.device)
        with backend.on_stream(x):
            Contribution(backend, (Segment(x, residual),), residual, x.shape, x.size, None, decay).rollback()
        raise
