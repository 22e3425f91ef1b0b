"""Between sparse and dense, and dense sums: kernels/cuda/dense.cu."""

from __future__ import annotations

import numpy as np

from sparsecomm.backends.base import Done
from sparsecomm.backends.cuda.context import Argument, ExecutionContext, ceil_div, dtype_of
from sparsecomm.backends.cuda.modules import dense_definitions
from sparsecomm.backends.cuda.runtime import read_word
from sparsecomm.backends.cuda.selection import nonzeros
from sparsecomm.backends.cuda.vector import CountedVector, Operand
from sparsecomm.tensors.interop import Tensor
from sparsecomm.tensors.sparse import INT64_SIZE, Array, DenseSum, SparseVector

__all__ = ["accumulate", "add", "cast_into", "densify", "divide", "scatter_add", "scatter_add_where", "well_formed"]


def scatter_add(context: ExecutionContext, dense: Tensor, entries: SparseVector, done: Done = None) -> None:
    _scatter(context, "scatter_add", dense, entries, done)


def scatter_add_where(
    context: ExecutionContext,
    dense: Tensor,
    entries: SparseVector,
    others: SparseVector,
    present: bool,
    done: Done = None,
) -> None:
    among = Operand.of(others)
    _scatter(
        context,
        "scatter_add_where",
        dense,
        entries,
        done,
        others=among.indices,
        other_host_count=among.host_count,
        other_device_count=among.device_count,
        present=present,
    )


def _scatter(
    context: ExecutionContext, kernel: str, dense: Tensor, entries: SparseVector, done: Done, **more: Argument
) -> None:
    """Launch a kernel that adds entries to dense memory."""
    given = Operand.of(entries)
    _elementwise(
        context,
        kernel,
        given.max_count,
        dense_definitions(dense.dtype, int64_indices=entries.size >= INT64_SIZE),
        done,
        dense=dense,
        indices=given.indices,
        values=given.values,
        host_count=given.host_count,
        device_count=given.device_count,
        **more,
    )


def densify(context: ExecutionContext, out: Tensor, entries: SparseVector) -> None:
    if isinstance(entries, DenseSum):
        return cast_into(context, entries.dense, out)
    if not out.size:
        return None
    given, size = Operand.of(entries), context.tuning
    definitions = dense_definitions(out.dtype, int64_indices=entries.size >= INT64_SIZE)
    return context.start(
        context.prepare(
            context.kernel("dense.cu", "densify", definitions),
            ceil_div(out.size, size.densify_tile),
            size.dense_threads,
            out=out,
            n=out.size,
            aligned=out.pointer % 16 == 0,
            indices=given.indices,
            values=given.values,
            host_count=given.host_count,
            device_count=given.device_count,
        )
    )


def divide(context: ExecutionContext, entries: SparseVector, divisor: int) -> SparseVector:
    if isinstance(entries, DenseSum):
        given = Operand(entries.dense, entries.dense, entries.size, entries.size, None)
    else:
        given = Operand.of(entries)
    quotients = context.runtime.empty(given.max_count, given.values.dtype)
    _elementwise(
        context,
        "divide",
        given.max_count,
        dense_definitions(dtype_of(quotients)),
        values=given.values,
        host_count=given.host_count,
        device_count=given.device_count,
        by=quotients.dtype.type(divisor),
        to=quotients,
    )
    if isinstance(entries, DenseSum):
        return nonzeros(context, quotients, entries.shape)
    if isinstance(entries, CountedVector):
        return entries.with_values(quotients)
    return SparseVector.trusted(given.indices, quotients, entries.size, entries.shape)


def well_formed(context: ExecutionContext, entries: SparseVector) -> bool:
    faults = context.zeros(1, np.uint32)
    _elementwise(
        context,
        "well_formed",
        entries.nnz,
        dense_definitions(dtype_of(entries.values), int64_indices=entries.size >= INT64_SIZE),
        indices=entries.indices,
        values=entries.values,
        count=entries.nnz,
        n=entries.size,
        faults=faults,
    )
    return not read_word(context.runtime, faults)


def accumulate(context: ExecutionContext, x: Tensor, residual: Tensor | None) -> Array:
    total = context.runtime.empty(x.size, x.dtype.accumulator)
    definitions = dense_definitions(x.dtype, residual.dtype if residual else x.dtype)
    _elementwise(context, "widen", x.size, definitions, x=x, residual=residual, n=x.size, sum=total)
    return total


def add(context: ExecutionContext, total: Array, addend: Array) -> None:
    n, definitions = len(total), dense_definitions(dtype_of(total))
    _elementwise(context, "add", n, definitions, sum=total, addend=addend, n=n)


def cast_into(context: ExecutionContext, values: Array | None, out: Tensor, done: Done = None) -> None:
    definitions = dense_definitions(out.dtype)
    _elementwise(context, "narrow", out.size, definitions, done, values=values, n=out.size, dense=out)


def _elementwise(
    context: ExecutionContext,
    name: str,
    max_count: int,
    definitions: tuple[str, ...],
    done: Done = None,
    **arguments: Argument,
) -> None:
    """Start a kernel of dense.cu with about a thread per entry or element."""
    launches = []
    if max_count:
        threads = context.tuning.dense_threads
        blocks = min(ceil_div(max_count, threads), 16 * context.runtime.multiprocessors)
        kernel = context.kernel("dense.cu", name, definitions)
        launches.append(context.prepare(kernel, blocks, threads, **arguments))
    context.start(*launches, done=done)
