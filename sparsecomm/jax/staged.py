"""An operation of JAX that XLA carries out by calling back.

It replaces `jax.experimental.io_callback`, which copies operands that XLA has not aligned to 64 bytes into JAX arrays,
on a thread of XLA's pool. The callback runs on such a thread and waits for the copy, for ever if the pool has no other:
a rank that is bound to one core, as by mpirun, hangs. This operation is lowered to the same call of XLA, and takes its
operands, which are NumPy arrays, as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn, TypeAlias

import jax
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors.sparse import Array

__all__ = ["ONE_DEVICE", "call"]

ONE_DEVICE = "expected one device in each process, which is one rank: start one process for each GPU"

Host: TypeAlias = Callable[..., Sequence[Array]]
Avals: TypeAlias = "tuple[jax.core.ShapedArray, ...]"

# JAX's own effect of ordered callbacks, which keep the order of the program, within a function and between functions.
(_ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects

_exchange_p: Any = Primitive("sparsecomm_exchange")
_exchange_p.multiple_results = True


def call(host: Host, like: Sequence[jax.Array], *operands: jax.Array) -> list[jax.Array]:
    """Call ``host(*operands)`` when XLA has the operands, and return its results.

    Args:
        host: takes NumPy arrays in XLA's memory, which it must neither write nor keep, and returns NumPy arrays.
        like: arrays of the shapes and types of the results.
        operands: the arguments of ``host``.
    """
    avals = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in like)
    results: list[jax.Array] = _exchange_p.bind(*operands, host=host, avals=avals)
    return results


def _abstract(*operands: object, host: Host, avals: Avals) -> tuple[list[jax.core.ShapedArray], set[object]]:
    return list(avals), {_ORDERED}


def _at_once(*operands: jax.Array, host: Host, avals: Avals) -> list[jax.Array]:
    """Call in traces that have values, such as `jax.checkpoint` outside of jit."""
    return [jax.device_put(result) for result in host(*operands)]


def _lower(ctx: Any, *operands: Any, host: Host, avals: Avals) -> Any:
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices != 1:
        raise InvalidInputError(f"sparsecomm.jax in a function that is compiled for {devices} devices; {ONE_DEVICE}")
    results, token, _ = mlir.emit_python_callback(
        ctx, host, ctx.tokens_in.get(_ORDERED), list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(mlir.TokenSet({_ORDERED: token}))
    return results


def _no_vmap(*_: object, **__: object) -> NoReturn:
    raise InvalidInputError(
        "sparsecomm.jax under jax.vmap would be a call for every element; call it on the whole batch"
    )


def _no_derivative(*_: object, **__: object) -> NoReturn:
    raise InvalidInputError("sparsecomm.jax has no derivative; take the gradient first, then call this on it")


_exchange_p.def_effectful_abstract_eval(_abstract)
_exchange_p.def_impl(_at_once)
mlir.register_lowering(_exchange_p, _lower)
batching.primitive_batchers[_exchange_p] = _no_vmap
ad.primitive_jvps[_exchange_p] = _no_derivative
