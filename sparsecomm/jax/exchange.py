"""`TreeExchange`, which makes the calls for a tree, and `call`, which calls a function eagerly or under jit."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeVar

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.extend.core import Primitive
from jax.interpreters import ad, batching, mlir

from sparsecomm.backends import default_float_mode, float_mode_only
from sparsecomm.calls.collectives import sparse_allreduce
from sparsecomm.calls.label import Label
from sparsecomm.calls.options import SumSettings
from sparsecomm.errors import InvalidInputError, pip_install
from sparsecomm.reducer.options import ReducerSettings, density_at
from sparsecomm.tensors.arrays import TensorLike
from sparsecomm.tensors.sparse import Array, SparseVector
from sparsecomm.transport import Comm

if TYPE_CHECKING:
    from numpy.typing import DTypeLike


Density: TypeAlias = float | Callable[[int], float]
_AnyArray = TypeVar("_AnyArray", Array, jax.Array)
ONE_DEVICE = "expected one device in each process, which is one rank: start one process for each GPU"
_ALIGNMENT = 64  # bytes; JAX uses aligned host memory without a copy


def accumulator_dtype(dtype: DTypeLike) -> np.dtype:
    """Return the type of sums and residuals for gradients of a type."""
    return np.dtype(np.float64 if np.dtype(dtype).itemsize == 8 else np.float32)


@dataclass(frozen=True)
class LeafBucket:
    """The leaves that one `sparsecomm.sparse_allreduce` sends, concatenated into one vector."""

    leaves: tuple[int, ...]  # positions in the tree
    dtype: np.dtype  # of the vector
    dense: bool  # whether the sum is dense
    label: Label  # settings, and the names, types and shapes of the leaves


@dataclass(frozen=True, eq=False)
class TreeExchange:
    """All calls for a tree, with arguments as in `sparsecomm.sparse_allreduce`."""

    buckets: tuple[LeafBucket, ...]  # one per call
    k: int | Density
    comm: Comm
    settings: ReducerSettings
    training: bool = False  # whether "auto" means the setting for training, and density 1.0 a dense sum

    def run(
        self, leaves: list[jax.Array], residuals: list[jax.Array], step: int | jax.Array
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Return the results and the new residuals. All arguments may be traced."""
        arrays, count = leaves + residuals, len(leaves)
        if not _is_traced(step, *arrays) and _device_of(arrays).platform in ("gpu", "cuda"):
            jax.effects_barrier()  # type: ignore[no-untyped-call]  # wait for calls of jitted functions
            return self.on_device(int(step), leaves, residuals)

        def host(step: Array, *arrays: Array) -> list[Array]:
            results, new_residuals = self.on_host(int(step), arrays[:count], arrays[count:])
            return results + new_residuals

        outputs = call(host, arrays, step, *arrays)
        return outputs[:count], outputs[count:]

    @float_mode_only  # XLA's threads flush denormals
    def on_host(
        self, step: int, leaves: Sequence[object], residuals: Sequence[object]
    ) -> tuple[list[Array], list[Array]]:
        """Make all calls in host memory. Return the results and the new residuals.

        They have the shapes and types of the arguments. This function must not compute with JAX, which could wait for
        the thread of XLA that runs it.
        """
        k = density_at(self.k, step) if callable(self.k) else self.k
        xs, olds = [np.asarray(x) for x in leaves], [np.asarray(r) for r in residuals]  # views
        results, new_residuals = [np.empty(0)] * len(xs), [np.empty(0)] * len(olds)
        for bucket in self.buckets:
            parts = [xs[i] for i in bucket.leaves]
            x = parts[0].reshape(-1) if len(parts) == 1 else _concatenated(parts, bucket.dtype)
            residual = None
            if olds:
                residual = _concatenated([olds[i] for i in bucket.leaves], accumulator_dtype(bucket.dtype))
            out = _empty(x.size, bucket.dtype)
            self._sum(bucket, k, x, residual, step, out)
            _split(bucket, out, xs, results)
            if residual is not None:
                _split(bucket, residual, olds, new_residuals)
        return results, new_residuals

    def on_device(
        self, step: int, leaves: list[jax.Array], residuals: list[jax.Array], arrays: str = "cupy"
    ) -> tuple[list[jax.Array], list[jax.Array]]:
        """Do the same in the memory of a GPU, with a library of writable arrays, through DLPack."""
        try:
            writable: Any = importlib.import_module(arrays)
        except ImportError as error:
            raise InvalidInputError(
                f"arrays on a GPU need CuPy ({error}): {pip_install('cuda13x')} (or [cuda12x], to match the driver), "
                "or move them to the host first"
            ) from error
        k = density_at(self.k, step) if callable(self.k) else self.k
        results, new_residuals = list(leaves), list(residuals)
        for bucket in self.buckets:
            x = jnp.concatenate([leaves[i].reshape(-1).astype(bucket.dtype) for i in bucket.leaves])
            residual = None
            if residuals:  # float32 or float64; CuPy has no bfloat16
                flat = jnp.concatenate([residuals[i].reshape(-1) for i in bucket.leaves])
                residual = writable.from_dlpack(flat).copy()
            total = self._sum(bucket, k, x, residual, step).to_dense()
            _split(bucket, jnp.from_dlpack(total), leaves, results)
            if residual is not None:
                _split(bucket, jnp.from_dlpack(residual), residuals, new_residuals)
        return results, new_residuals

    def _sum(
        self,
        bucket: LeafBucket,
        k: float,
        x: TensorLike,
        residual: TensorLike | None,
        step: int,
        out: TensorLike | None = None,
    ) -> SparseVector:
        """Make the call of a bucket, which updates ``residual`` and overwrites ``out``."""
        chunk = self.settings.chunk_length
        sums: SumSettings = self.settings
        if bucket.dense or (self.training and k == 1.0):
            k, chunk, sums = 1.0, None, sums.for_dense_sum()
        elif self.training:
            sums = self.settings.for_sums(bucket.dtype.name)
        label: Any = Label.of(("call", "a sum of JAX arrays"), ("step", step)) + bucket.label
        options = {**sums.common, "chunk": chunk, "label": label}
        return sparse_allreduce(x, k, comm=self.comm, residual=residual, out=out, **options)


@default_float_mode
def _split(bucket: LeafBucket, flat: _AnyArray, like: Sequence[_AnyArray], into: list[_AnyArray]) -> None:
    """Split ``flat`` into the leaves of a bucket, with shapes and types as in ``like``, and store them in ``into``."""
    begin = 0
    for i in bucket.leaves:
        part = flat[begin : begin + like[i].size].reshape(like[i].shape)
        into[i] = part.astype(like[i].dtype, copy=False)
        begin += like[i].size


@default_float_mode
def _concatenated(arrays: Sequence[Array], dtype: DTypeLike) -> Array:
    """Return a flat, aligned copy."""
    flat = _empty(sum(a.size for a in arrays), dtype)
    np.concatenate([a.reshape(-1) for a in arrays], out=flat)
    return flat


def _empty(size: int, dtype: DTypeLike) -> Array:
    nbytes = size * np.dtype(dtype).itemsize
    memory = np.empty(nbytes + _ALIGNMENT, np.uint8)
    begin = -memory.ctypes.data % _ALIGNMENT
    return memory[begin : begin + nbytes].view(dtype)


# -- callbacks of XLA --------------------------------------------------------------------------------------------------

Host: TypeAlias = Callable[..., Sequence[Array]]
Avals: TypeAlias = "tuple[jax.core.ShapedArray, ...]"

# JAX's effect of ordered callbacks, which run in program order within and between functions.
(_ORDERED,) = jax.make_jaxpr(lambda: io_callback(lambda: None, None, ordered=True))().effects

_exchange_p: Any = Primitive("sparsecomm_exchange")
_exchange_p.multiple_results = True


def call(host: Host, like: Sequence[jax.Array], *operands: Any) -> list[jax.Array]:
    """Call ``host(*operands)``, now or when XLA has the operands, and return its results.

    ``host`` returns NumPy arrays of the shapes and types of ``like``.
    """
    if _is_traced(*operands):
        return _call_from_xla(host, like, *operands)
    jax.effects_barrier()  # type: ignore[no-untyped-call]  # wait for calls of jitted functions
    results: list[jax.Array] = jax.device_put(host(*operands), _device_of(like) if like else None)
    return results


def _is_traced(*values: object) -> bool:
    return any(isinstance(value, jax.core.Tracer) for value in values)


def _device_of(arrays: Sequence[jax.Array]) -> Any:
    return next(iter(arrays[0].devices()))


def _call_from_xla(host: Host, like: Sequence[jax.Array], *operands: Any) -> list[jax.Array]:
    """Call ``host(*operands)`` when XLA has the operands, and return its results.

    Unlike `jax.experimental.io_callback`, it does not hang on one core: io_callback runs on a thread of XLA's pool and
    waits for copies of operands that are not aligned to 64 bytes, which another thread of the pool must make.

    ``host`` takes NumPy arrays in XLA's memory, which it must neither write nor keep.
    """
    with suppress(ImportError, RuntimeError):  # without MPI, the call itself raises
        import mpi4py.MPI  # noqa: F401  # initializes MPI on this thread, which also finalizes it
    avals = tuple(jax.core.ShapedArray(a.shape, a.dtype) for a in like)
    results: list[jax.Array] = _exchange_p.bind(*map(jnp.asarray, operands), host=host, avals=avals)
    return results


def call_if(condition: bool | jax.Array, host: Host, *operands: jax.Array) -> None:
    """Call ``host(*operands)``, which returns no arrays, if ``condition`` is true: now, or when XLA knows it."""
    if _is_traced(condition, *operands):
        jax.lax.cond(condition, lambda arrays: _call_from_xla(host, [], *arrays), lambda _: [], operands)
    elif condition:
        call(host, [], *operands)


def _abstract(*operands: object, host: Host, avals: Avals) -> tuple[list[jax.core.ShapedArray], set[object]]:
    return list(avals), {_ORDERED}


def _call_now(*operands: jax.Array, host: Host, avals: Avals) -> list[jax.Array]:
    """Call ``host`` outside of jit, for example within `jax.checkpoint`."""
    return [jax.device_put(result) for result in host(*operands)]


def _lower(ctx: Any, *operands: Any, host: Host, avals: Avals) -> Any:
    devices = getattr(ctx.module_context.axis_context, "num_devices", 1)
    if devices != 1:
        raise InvalidInputError(f"sparsecomm.jax: the function is compiled for {devices} devices; {ONE_DEVICE}")
    results, token, _ = mlir.emit_python_callback(
        ctx, host, ctx.tokens_in.get(_ORDERED), list(operands), ctx.avals_in, ctx.avals_out, has_side_effect=True
    )
    ctx.set_tokens_out(mlir.TokenSet({_ORDERED: token}))
    return results


def _no_vmap(*_: object, **__: object) -> NoReturn:
    raise InvalidInputError(
        "sparsecomm.jax under jax.vmap would make a call for every element; call it on the whole batch"
    )


def _no_derivative(*_: object, **__: object) -> NoReturn:
    raise InvalidInputError("sparsecomm.jax has no derivative; take the gradient first, then call this on it")


_exchange_p.def_effectful_abstract_eval(_abstract)
_exchange_p.def_impl(_call_now)
mlir.register_lowering(_exchange_p, _lower)
batching.primitive_batchers[_exchange_p] = _no_vmap
ad.primitive_jvps[_exchange_p] = _no_derivative
