"""Import of other libraries' tensors without a copy. All functions raise `InvalidInputError` for unusable arguments.

`tensor` reads NumPy arrays directly and all others through DLPack. A `TensorSpec` describes a tensor.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple, NoReturn, TypeAlias

import numpy as np

from sparsecomm.checks import ARGUMENT_ERRORS, quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import _dlpack
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, DType


class Device(NamedTuple):
    """A device: ``kind`` is "cpu" or "cuda", ``index`` is the number of the GPU."""

    kind: str
    index: int = 0  # type: ignore[assignment] # tuple.index is never called

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")
NamedTensors: TypeAlias = "Mapping[str, object] | Iterable[tuple[str, object]]"
Tensor = _dlpack.Tensor
overlap = _dlpack.overlap

_BYTE = DType("uint8", -1, 1, "<u1")
_WRITABLE = "expected writable memory"

# DLPack's codes: DLDataTypeCode and bits, DLDeviceType.
_DTYPES = {(2, 16): FLOAT16, (4, 16): BFLOAT16, (2, 32): FLOAT32, (2, 64): FLOAT64}
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # 3: pinned host memory; 13: managed memory
_OTHER_DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 14: "oneAPI", 15: "WebGPU"}

# Request views, never copies. Exporters older than DLPack 1.0 do not know these arguments.
_DLPACK_1: dict[str, Any] = {"max_version": (1, 0), "copy": False}


def tensor(
    obj: Any, name: str, *, writable: bool = False, stream: int | None = None, dtypes: Mapping[str, DType] = DTYPES
) -> Tensor:
    """Return the memory of an array.

    Args:
        obj: a contiguous array with ``__dlpack__``, on a CPU or a CUDA GPU.
        name: the argument's name, for errors.
        writable: the caller will write to the memory.
        stream: CUDA stream on which the memory will be used, as numbered by DLPack; ``None``: the current stream of the
            tensor's library.
        dtypes: the accepted dtypes by name, at least those of gradients.
    """
    if (plain := _dlpack.plain(obj, writable, CPU, stream)) is not None:
        return plain
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj, name, writable, dtypes)
    if not hasattr(obj, "__dlpack__"):
        advice = "convert it first, for example with np.asarray(x, dtype=np.float32)"
        _refuse(name, f"got {_kind(obj)}; {_expected(dtypes)}; {advice}")
    if (jax := sys.modules.get("jax")) is not None and isinstance(obj, jax.core.Tracer):
        advice = "inside jax.jit and jax.lax loops call sparsecomm.jax.sparse_allreduce, allreduce_tree or sparsify"
        _refuse(name, f"got a JAX tracer, which has no values yet; expected an array; {advice}")
    immutable = _is_jax(obj)
    if writable and immutable:
        _refuse(name, f"got a JAX array, which is immutable; {_WRITABLE}; {_memory_advice(name)}")
    if stream is None:
        stream = _current_stream(obj)
    if (is_negated := getattr(obj, "is_neg", None)) is not None and is_negated():  # in PyTorch
        if writable:
            _refuse(name, f"got a tensor whose negation is pending; {_WRITABLE}; pass x.resolve_neg()")
        obj = obj.resolve_neg()
    return _checked(obj, _export(obj, name, stream, dtypes), name, writable, immutable, stream, dtypes)


@dataclass(frozen=True)
class TensorSpec:
    """The name, shape and device of a tensor, and the dtype in which its gradients are summed."""

    name: str
    shape: tuple[int, ...]
    accumulator: DType
    device: Device
    size: int = field(init=False)  # number of elements

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", math.prod(self.shape))

    @property
    def nbytes(self) -> int:
        """The size of the sum in bytes."""
        return self.size * self.accumulator.itemsize

    def tensor(self, obj: object, name: str, *, writable: bool = False) -> Tensor:
        """Import an array that must match this spec; ``name`` is its name in error messages."""
        t = tensor(obj, name, writable=writable)
        if (t.shape, t.device, t.dtype.accumulator) != (self.shape, self.device, self.accumulator.accumulator):
            raise InvalidInputError(
                f"{name}: got shape {t.shape}, {t.dtype} on {t.device}; expected shape {self.shape} with sums in "
                f"{self.accumulator} on {self.device}, as at the beginning. If the model has changed, make a new object"
            )
        return t


def specs_of(tensors: NamedTensors) -> dict[str, TensorSpec]:
    """Return the specs of named tensors by name, in their order. A `TensorSpec` may take a tensor's place."""
    specs: dict[str, TensorSpec] = {}
    for name, obj in named(tensors):
        if name in specs:
            raise InvalidInputError(f"tensors: the name {name!r} appears twice; names must be unique")
        if isinstance(obj, TensorSpec):
            specs[name] = obj
            continue
        t = tensor(obj, name)
        specs[name] = TensorSpec(name, t.shape, FLOAT64 if t.dtype.itemsize == 8 else FLOAT32, t.device)
    if not specs:
        raise InvalidInputError("tensors: must contain at least one tensor")
    return specs


def refuse_masked(array: object, name: str) -> None:
    """Refuse a masked NumPy array, because the library would ignore the mask."""
    if isinstance(array, np.ma.MaskedArray):
        advice = "pass x.filled(0), or filled with another value"
        _refuse(name, f"got a masked array; expected an array without a mask; {advice}")


def _from_numpy(array: Array, name: str, writable: bool, dtypes: Mapping[str, DType]) -> Tensor:
    refuse_masked(array, name)
    dtype = array.dtype
    if not dtype.isnative:
        seen, advice = f"byte-swapped {dtype.newbyteorder('=').name}", "pass x.astype(x.dtype.newbyteorder('='))"
        _refuse(name, f"got {seen}; expected this machine's byte order; {advice}")
    if (element := dtypes.get(dtype.name)) is None:
        _refuse_dtype(name, dtype.name, dtypes)
    flags = array.flags
    t = Tensor(_dlpack.address(array), array.size, array.shape, element, CPU, not flags.writeable, array)
    return _usable(t, name, flags.c_contiguous, writable and t.readonly)


def _export(obj: Any, name: str, stream: int | None, dtypes: Mapping[str, DType]) -> _dlpack.Import:
    """Export an array's memory by DLPack 1.x, or by the old protocol."""
    arguments = {} if stream is None else {"stream": stream}
    try:
        if str(getattr(obj, "dtype", "")).startswith("torch.float8"):  # PyTorch 2.6 does not export these types
            obj = obj.view(sys.modules["torch"].uint8)
        try:
            capsule = obj.__dlpack__(**arguments, **_DLPACK_1)
        except TypeError:
            capsule = obj.__dlpack__(**arguments)
        memory = _dlpack.Import(capsule)
    except Exception as error:
        if getattr(obj, "requires_grad", False) is True:
            advice = "pass x.detach(), or p.grad for the gradient of a parameter"
            expected = "expected a gradient, or a tensor outside the graph"
            _refuse(name, f"got a tensor that requires grad; {expected}; {advice}")
        seen = f"{name}: {_kind(obj)} does not export its memory ({type(error).__name__}: {error})"
        raise InvalidInputError(f"{seen}; {_expected(dtypes)}; convert it first") from error
    if memory.size and not memory.pointer:  # freed by FSDP, or implicit zeros of PyTorch
        advice = "restore its storage, or make the zeros with torch.zeros"
        _refuse(name, f"got a tensor of shape {memory.shape} without memory; expected one with values; {advice}")
    return memory


def _checked(
    obj: object,
    t: _dlpack.Import,
    name: str,
    writable: bool,
    immutable: bool,
    stream: int | None,
    dtypes: Mapping[str, DType],
) -> Tensor:
    kind = _DEVICES.get(t.device_type)
    if kind is None:
        seen = _OTHER_DEVICES.get(t.device_type, f"DLPack device type {t.device_type}")
        advice = "move it first, for example x.cpu()"
        _refuse(name, f"got a tensor on {seen}; expected CPU or CUDA memory; {advice}")
    dtype = _DTYPES.get((t.code, t.bits)) or dtypes.get(_dtype_name(obj, t))
    if dtype is None or t.lanes != 1:
        _refuse_dtype(name, _dtype_name(obj, t) + ("" if t.lanes == 1 else f" in vectors of {t.lanes}"), dtypes)
    device = CPU if kind == "cpu" else Device(kind, t.device_id)
    imported = Tensor(t.pointer, t.size, t.shape, dtype, device, t.readonly or immutable, t, stream)
    return _usable(imported, name, t.contiguous, writable and (t.readonly or t.copied))


def _usable(t: Tensor, name: str, contiguous: bool, unwritable: bool) -> Tensor:
    if not contiguous:
        seen, advice = f"got an array of shape {t.shape}", "pass x.contiguous() or np.ascontiguousarray(x)"
        _refuse(name, f"{seen} that is not contiguous; expected C order without gaps; {advice}")
    if unwritable:
        _refuse(name, f"got a read-only array; {_WRITABLE}; {_memory_advice(name)}")
    size = t.dtype.itemsize
    if t.pointer % size and t.size:
        advice = "pass an aligned copy, for example x.copy() or x.clone()"
        _refuse(name, f"got {t.dtype} at address {t.pointer:#x}; expected a multiple of {size} bytes; {advice}")
    return t


def _dtype_name(obj: object, t: _dlpack.Import) -> str:
    dtype = getattr(obj, "dtype", None)
    return f"DLPack dtype code {t.code} with {t.bits} bits" if dtype is None else f"{dtype}".removeprefix("torch.")


def as_residual(obj: object, x: Tensor) -> Tensor:
    """Return the memory of a residual of ``x``, whose dtype is ``x``'s or, for a 16-bit ``x``, also float32."""
    residual = tensor(obj, "residual", writable=True, stream=x.stream)
    check_like(residual, x, "residual", (x.dtype, FLOAT32) if x.dtype.itemsize == 2 else (x.dtype,))
    if overlap(residual, x):
        advice = "allocate it separately, for example np.zeros_like(x)"
        _refuse("residual", f"its memory overlaps x; expected separate memory; {advice}")
    return residual


def as_out(obj: object, x: Tensor, *, residual: Tensor | None = None, name: str = "out") -> Tensor:
    """Return the memory for a dense result, whose dtype is ``x``'s or its accumulator dtype; it may be ``x`` itself."""
    out = tensor(obj, name, writable=True, stream=x.stream)
    accumulator = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    check_like(out, x, name, (x.dtype,) if accumulator is x.dtype else (x.dtype, accumulator))
    if overlap(out, x) and (out.pointer, out.dtype) != (x.pointer, x.dtype):
        advice = "pass out=x, or allocate it separately"
        _refuse(name, f"its memory partly overlaps x; expected x itself or separate memory; {advice}")
    if residual is not None and overlap(out, residual):
        _refuse(name, "its memory overlaps residual; expected separate memory; allocate the two separately")
    return out


def check_like(t: Tensor, x: Tensor, name: str, dtypes: tuple[DType, ...]) -> None:
    """Refuse ``t`` unless it has the shape and device of ``x`` and one of ``dtypes``."""
    if t.shape != x.shape:
        _refuse(name, f"got shape {t.shape}; expected {x.shape}, the shape of x; reshape it or allocate a new one")
    if t.device != x.device:
        _refuse(name, f"got a tensor on {t.device}; expected {x.device}, the device of x; keep both on one device")
    if t.dtype not in dtypes:
        names = " or ".join(d.name for d in dtypes)
        _refuse(name, f"got {t.dtype}; expected {names}, because x is {x.dtype}; allocate it with that dtype")


def host_tensor(data: Array) -> Tensor:
    """Return bytes in host memory as a tensor."""
    return Tensor(_dlpack.address(data), data.size, data.shape, _BYTE, CPU, False, data)


def as_numpy(t: Tensor) -> Array:
    """Return a flat NumPy view of a CPU tensor (bfloat16 as uint16), read-only if the tensor is."""
    if t.device.kind != "cpu":
        raise ValueError(f"tensor is on {t.device}; expected host memory")
    return _dlpack.view(t.pointer, t.size, np.dtype(t.dtype.view), t.readonly, t.owner)


def is_tensor(obj: object) -> bool:
    """Return whether ``obj`` is an array or tensor of any dtype, on any device."""
    return isinstance(obj, np.ndarray) or hasattr(obj, "__dlpack__")


def named(tensors: Any, argument: str = "tensors") -> list[tuple[str, Any]]:
    """Return pairs of names and tensors from a mapping or an iterable of pairs, without checking the tensors."""
    seen = f"got {type(tensors).__name__}"
    pairs = []
    try:
        if is_tensor(tensors):
            raise TypeError(seen)
        for pair in tensors.items() if isinstance(tensors, Mapping) else tensors:
            seen = f"got {type(tensors).__name__} with {type(pair).__name__} in it"
            if not isinstance(pair, (tuple, list)):
                raise TypeError(seen)
            name, tensor = pair
            if not isinstance(name, str):
                seen = f"got the name {quote(name)}"
                raise TypeError(seen)
            pairs.append((name, tensor))
    except ARGUMENT_ERRORS as error:
        source = "named_parameters" if argument == "named_parameters" else "state_dict"
        raise InvalidInputError(
            f"{argument}: {seen}; expected names and tensors: pass model.{source}(), a dict {{'weight': x}}, or pairs"
        ) from error
    return pairs


def content(obj: Any, name: str) -> tuple[str, Array]:
    """Return the dtype and shape of a tensor of any dtype as text, and the bytes of its elements in host memory.

    The bytes are a view if possible. PyTorch, CuPy and JAX tensors that are not contiguous or not in host memory are
    copied; those of other libraries are refused.
    """
    # PyTorch: take this rank's shard of a DTensor, and resolve a pending conjugate or negation.
    try:
        for method in ("detach", "to_local", "resolve_conj", "resolve_neg", "contiguous", "cpu"):
            obj = getattr(obj, method, lambda obj=obj: obj)()
    except Exception as error:  # for tensors that are sparse, nested, not initialized, or on the meta device
        _refuse(name, f"its elements cannot be read ({error}); expected a dense tensor with data; leave it out")
    if type(obj).__module__.startswith("cupy"):
        obj = obj.get()
    refuse_masked(obj, name)
    if isinstance(obj, np.ndarray) or _is_jax(obj):
        array = np.ascontiguousarray(obj)
        return f"{array.dtype} {np.shape(obj)}", array.reshape(-1).view(np.uint8)
    t = _export(obj, name, None, DTYPES)
    if _DEVICES.get(t.device_type) != "cpu" or not t.contiguous:
        seen = "got a tensor that is on a device or not contiguous"
        _refuse(name, f"{seen}; expected contiguous host memory; copy it there first")
    nbytes = (t.size * t.bits * t.lanes + 7) // 8
    return f"{_dtype_name(obj, t)} {t.shape}", _dlpack.view(t.pointer, nbytes, np.dtype(np.uint8), True, t)


def library_of(array: Array) -> Any:
    """Return the library of an array: NumPy or CuPy."""
    return sys.modules[type(array).__module__.partition(".")[0]]


def to_host(array: Array) -> Array:
    """Return a NumPy copy of an array."""
    copied: Array = getattr(array, "get", array.copy)()  # CuPy's arrays have `get`
    return copied


def from_host(array: Array, like: Array) -> Array:
    """Return a NumPy array as an array of the library of ``like``, on its current device."""
    converted: Array = library_of(like).asarray(array)
    return converted


def _current_stream(obj: Any) -> int | None:
    """Return the current stream of a CUDA tensor's library, else CuPy's; None for host memory."""
    try:
        kind, index = obj.__dlpack_device__()
        if _DEVICES.get(kind) != "cuda":
            return None
    except Exception:  # the export raises a better error
        return None
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(obj, torch.Tensor):
        return torch.cuda.current_stream(index).cuda_stream or 1
    if cupy is not None:
        with suppress(cupy.cuda.runtime.CUDARuntimeError), cupy.cuda.Device(index):  # without a driver: see the export
            return cupy.cuda.get_current_stream().ptr or 1
    return 1


def _is_jax(obj: object) -> bool:
    # JAX exports unversioned capsules, which cannot mark its arrays as immutable.
    return type(obj).__module__.startswith(("jax.", "jaxlib."))


def _kind(obj: object) -> str:
    c = type(obj)
    return c.__name__ if c.__module__ == "builtins" else f"{c.__module__}.{c.__qualname__}"


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidInputError(f"{name}: {why}")


def _refuse_dtype(name: str, seen: str, dtypes: Mapping[str, DType]) -> NoReturn:
    advice = "convert it first, for example x.astype('float32') or x.float()"
    _refuse(name, f"got elements of type {seen}; expected {_any_of(dtypes)}; {advice}")


def _any_of(dtypes: Mapping[str, DType]) -> str:
    *others, last = dtypes
    return f"{', '.join(others)} or {last}"


def _expected(dtypes: Mapping[str, DType]) -> str:
    return f"expected an array of {_any_of(dtypes)} with __dlpack__ (NumPy, PyTorch, JAX, CuPy, ...)"


def _memory_advice(name: str) -> str:
    if name == "residual":  # a copy of the gradient would count it twice
        return "start with separate zeros, np.zeros_like(x), and pass the same array in every step"
    if name == "out":
        return "pass a separate array, np.empty_like(x)"
    return "pass a writable NumPy array, np.array(x)"
