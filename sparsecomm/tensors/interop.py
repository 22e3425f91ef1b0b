"""Tensors of other libraries, in: DLPack to a pointer with what the kernels must know about it.

Nothing is copied, and no framework is imported: NumPy arrays are read directly, everything else through
``__dlpack__``. What cannot be used is refused here, by the name of the argument, before anything else happens.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple, NoReturn

import numpy as np

from sparsecomm.checks import FAULTS, quote
from sparsecomm.errors import InvalidInputError
from sparsecomm.tensors import _dlpack
from sparsecomm.tensors.arrays import Array
from sparsecomm.tensors.dtypes import BFLOAT16, DTYPES, FLOAT16, FLOAT32, FLOAT64, DType

__all__ = [
    "CPU",
    "Device",
    "Tensor",
    "as_numpy",
    "as_out",
    "as_residual",
    "check_like",
    "content",
    "is_tensor",
    "named",
    "overlap",
    "refuse_masked",
    "tensor",
]


class Device(NamedTuple):  # whose comparisons run no bytecode
    """The device on which memory is: ``kind`` "cpu" or "cuda", and the number of the GPU."""

    kind: str
    index: int = 0  # type: ignore[assignment] # tuple.index is never called

    def __str__(self) -> str:
        return self.kind if self.kind == "cpu" else f"{self.kind}:{self.index}"


CPU = Device("cpu")
Tensor = _dlpack.Tensor
overlap = _dlpack.overlap


_ANY_FLOAT = "float16, bfloat16, float32 or float64"
_EXPECTED = f"expected an array of {_ANY_FLOAT} with __dlpack__ (NumPy, PyTorch, JAX, CuPy, ...)"
_WRITABLE = "expected memory that may be written"

# DLPack's codes: DLDataTypeCode and bits, DLDeviceType.
_DTYPES = {(2, 16): FLOAT16, (4, 16): BFLOAT16, (2, 32): FLOAT32, (2, 64): FLOAT64}
_DTYPE_CODES = {0: "int", 1: "uint", 2: "float", 3: "opaque", 4: "bfloat", 5: "complex", 6: "bool"}
_NARROW_NAMES = (  # from code 7 on; they say how many bits they have
    "float8_e3m4 float8_e4m3 float8_e4m3b11fnuz float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz "
    "float8_e8m0fnu float6_e2m3fn float6_e3m2fn float4_e2m1fn"
)
_DEVICES = {1: "cpu", 2: "cuda", 3: "cpu", 13: "cuda"}  # 3: pinned host memory; 13: managed memory
_OTHER_DEVICES = {4: "OpenCL", 7: "Vulkan", 8: "Metal", 10: "ROCm", 11: "ROCm host", 14: "oneAPI", 15: "WebGPU"}

# Views, never copies. Exporters that predate DLPack 1.0 do not know the arguments.
_DLPACK_1: dict[str, Any] = {"max_version": (1, 0), "copy": False}


def tensor(obj: Any, name: str, *, writable: bool = False, stream: int | None = None) -> Tensor:
    """Return the memory of ``obj``: a contiguous array of a float type with ``__dlpack__``, on a CPU or a CUDA GPU.

    ``name`` is the argument's name, for messages. ``writable`` says that the caller will write. ``stream`` is the
    CUDA stream on which the memory will be used, as DLPack numbers it; ``None`` stands for the stream that is current
    in the library whose tensor it is.

    Raises:
        InvalidInputError: the object cannot be used; the message says why and what to do.
    """
    if (plain := _dlpack.plain(obj, writable, CPU)) is not None:
        return plain
    if isinstance(obj, np.ndarray):
        return _from_numpy(obj, name, writable)
    if not hasattr(obj, "__dlpack__"):
        advice = "convert it first, for example with np.asarray(x, dtype=np.float32)"
        _refuse(name, f"got {_kind(obj)}; {_EXPECTED}; {advice}")
    if _is_traced(obj):
        advice = "inside jax.jit and jax.lax loops call sparsecomm.jax.sparse_allreduce, allreduce_tree or sparsify"
        _refuse(name, f"got a tracer of JAX, which has no values yet; expected an array; {advice}")
    immutable = _is_jax(obj)
    if writable and immutable:
        _refuse(name, f"got a JAX array, which is immutable; {_WRITABLE}; {_own_memory(name)}")
    if stream is None:
        stream = _current_stream(obj)
    if (is_negated := getattr(obj, "is_neg", None)) is not None and is_negated():  # in PyTorch
        if writable:
            _refuse(name, f"got a tensor whose negation is pending; {_WRITABLE}; pass what its .resolve_neg() returns")
        obj = obj.resolve_neg()
    return _checked(_export(obj, name, stream), name, writable, immutable, stream)


def refuse_masked(array: object, name: str) -> None:
    """Refuse an array of NumPy with a mask, which nothing here would look at."""
    if isinstance(array, np.ma.MaskedArray):
        advice = "pass x.filled(0), or filled with another value"
        _refuse(name, f"got a masked array; expected an array without a mask; {advice}")


def _from_numpy(array: Array, name: str, writable: bool) -> Tensor:
    refuse_masked(array, name)
    dtype = array.dtype
    if not dtype.isnative:
        seen, advice = f"byte-swapped {dtype.newbyteorder('=').name}", "pass x.astype(x.dtype.newbyteorder('='))"
        _refuse(name, f"got {seen}; expected this machine's byte order; {advice}")
    found = DTYPES.get(dtype.name)
    if found is None:
        _refuse_dtype(name, dtype.name)
    flags, pointer = array.flags, _dlpack.address(array)
    t = Tensor(pointer, array.size, array.shape, found, CPU, not flags.writeable, array)
    return _usable(t, name, flags.c_contiguous, writable and t.readonly)


def _export(obj: Any, name: str, stream: int | None) -> _dlpack.Import:
    """Ask for DLPack 1.x; an exporter that does not know the question is asked in the old way."""
    asked = {} if stream is None else {"stream": stream}
    try:
        try:
            capsule = obj.__dlpack__(**asked, **_DLPACK_1)
        except TypeError:
            capsule = obj.__dlpack__(**asked)
        found = _dlpack.Import(capsule)
    except Exception as error:
        if getattr(obj, "requires_grad", False) is True:
            advice = "pass x.detach(), or p.grad for the gradient of a parameter"
            expected = "expected a gradient, or a tensor outside the graph"
            _refuse(name, f"got a tensor that requires grad; {expected}; {advice}")
        seen = f"{name}: {_kind(obj)} does not export its memory ({type(error).__name__}: {error})"
        raise InvalidInputError(f"{seen}; {_EXPECTED}; convert it first") from error
    if found.size and not found.pointer:  # freed by FSDP, or an implicit zero of PyTorch
        advice = "restore its storage, or make the zeros with torch.zeros"
        _refuse(
            name, f"got a tensor of shape {found.shape} without memory; expected one that holds its values; {advice}"
        )
    return found


def _checked(t: _dlpack.Import, name: str, writable: bool, immutable: bool, stream: int | None) -> Tensor:
    kind = _DEVICES.get(t.device_type)
    if kind is None:
        seen = _OTHER_DEVICES.get(t.device_type, f"DLPack device type {t.device_type}")
        advice = "move it to one of them first, for example x.cpu()"
        _refuse(name, f"got a tensor on {seen}; expected CPU or CUDA memory; {advice}")
    dtype = _DTYPES.get((t.code, t.bits))
    if dtype is None or t.lanes != 1:
        _refuse_dtype(name, _dtype_name(t) + ("" if t.lanes == 1 else f" in vectors of {t.lanes}"))
    device = CPU if kind == "cpu" else Device(kind, t.device_id)
    found = Tensor(t.pointer, t.size, t.shape, dtype, device, t.readonly or immutable, t, stream)
    return _usable(found, name, t.contiguous, writable and (t.readonly or t.copied))


def _usable(t: Tensor, name: str, contiguous: bool, unwritable: bool) -> Tensor:
    """Return a tensor that kernels can take."""
    if not contiguous:
        advice = "pass x.contiguous() or np.ascontiguousarray(x)"
        _refuse(
            name, f"got an array of shape {t.shape} that is not contiguous; expected C order without gaps; {advice}"
        )
    if unwritable:
        _refuse(name, f"got a read-only array; {_WRITABLE}; {_own_memory(name)}")
    size = t.dtype.itemsize
    if t.pointer % size and t.size:
        advice = "pass an aligned copy, for example x.copy() or x.clone()"
        _refuse(name, f"got {t.dtype} at address {t.pointer:#x}; expected a multiple of {size} bytes; {advice}")
    return t


def _dtype_name(t: _dlpack.Import) -> str:
    """Return the name of an element type that DLPack knows, whether or not it can be used here."""
    if 0 <= t.code - 7 < len(narrow := _NARROW_NAMES.split()):
        return narrow[t.code - 7]
    kind = _DTYPE_CODES.get(t.code)
    return f"number {t.code} of DLPack, of {t.bits} bits" if kind is None else f"{kind}{t.bits}"


def as_residual(obj: object, x: Tensor, *, name: str = "residual") -> Tensor:
    """``obj``, to be updated in place as the residual of ``x``: in ``x``'s type, or float32 for a 16-bit ``x``."""
    residual = tensor(obj, name, writable=True, stream=x.stream)
    check_like(residual, x, name, (x.dtype, FLOAT32) if x.dtype.itemsize == 2 else (x.dtype,))
    if overlap(residual, x):
        advice = "allocate it separately, for example np.zeros_like(x)"
        _refuse(name, f"its memory overlaps x; expected memory of its own; {advice}")
    return residual


def as_out(obj: object, x: Tensor, *, residual: Tensor | None = None, name: str = "out") -> Tensor:
    """``obj``, to be overwritten with the dense result: in ``x``'s type or its carrier. It may be ``x`` itself."""
    out = tensor(obj, name, writable=True, stream=x.stream)
    accumulator = FLOAT64 if x.dtype is FLOAT64 else FLOAT32
    check_like(out, x, name, (x.dtype,) if accumulator is x.dtype else (x.dtype, accumulator))
    if overlap(out, x) and (out.pointer, out.dtype) != (x.pointer, x.dtype):
        advice = "pass out=x, or allocate it separately"
        _refuse(name, f"its memory overlaps a part of x; expected x itself or memory of its own; {advice}")
    if residual is not None and overlap(out, residual):
        _refuse(name, "its memory overlaps residual; expected memory of its own; allocate the two separately")
    return out


def check_like(t: Tensor, x: Tensor, name: str, dtypes: tuple[DType, ...], like: str = "x") -> None:
    """Refuse ``t`` unless it has the shape and device of ``x`` (called ``like``) and one of ``dtypes``."""
    if t.shape != x.shape:
        _refuse(name, f"got shape {t.shape}; expected {x.shape}, the shape of {like}; reshape it or allocate it anew")
    if t.device != x.device:
        _refuse(name, f"got a tensor on {t.device}; expected {x.device}, where {like} is; keep both on one device")
    if t.dtype not in dtypes:
        names = " or ".join(d.name for d in dtypes)
        _refuse(name, f"got {t.dtype}; expected {names}, since {like} is {x.dtype}; allocate it with that type")


def as_numpy(t: Tensor) -> Array:
    """Return a flat view of a CPU tensor (bfloat16 as uint16), read-only if the tensor is. It keeps memory alive."""
    if t.device.kind != "cpu":
        raise ValueError(f"a NumPy view of memory on {t.device}")
    return _dlpack.view(t.pointer, t.size, _VIEWS[t.dtype.code], t.readonly, t.owner)


def is_tensor(obj: object) -> bool:
    """Return whether ``obj`` is an array or a tensor, of any type and on any device."""
    return isinstance(obj, np.ndarray) or hasattr(obj, "__dlpack__")


def named(tensors: Any, argument: str = "tensors") -> list[tuple[str, Any]]:
    """Return names and tensors, of a mapping or of pairs.

    Raises:
        InvalidInputError: these are none; what stands beside a name is not looked at.
    """
    seen = f"got {type(tensors).__name__}"
    found = []
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
            found.append((name, tensor))
    except FAULTS as error:
        raise InvalidInputError(
            f"{argument}: {seen}; expected names and tensors: a dict, {{'weight': x}}, or pairs, as named_parameters() "
            "gives"
        ) from error
    return found


def content(obj: Any, name: str) -> tuple[str, Array]:
    """Return a tensor's type and shape, in words, and the bytes of its elements, in order, in host memory.

    Args:
        obj: of any type. What is not contiguous, or on a device, is copied by its own library, as PyTorch, CuPy and JAX
            can; the bytes of others are a view.
        name: for messages.

    Raises:
        InvalidInputError: it is on a device, or not contiguous, and its library is none of these.
    """
    # PyTorch's; of a DTensor it is this rank's shard, and a conjugate or a negation may be pending.
    for method in ("detach", "to_local", "resolve_conj", "resolve_neg", "contiguous", "cpu"):
        obj = getattr(obj, method, lambda obj=obj: obj)()
    if type(obj).__module__.startswith("cupy"):
        obj = obj.get()
    refuse_masked(obj, name)
    if isinstance(obj, np.ndarray) or _is_jax(obj):
        array = np.ascontiguousarray(obj)
        return f"{array.dtype} {np.shape(obj)}", array.reshape(-1).view(np.uint8)
    t = _export(obj, name, None)
    if _DEVICES.get(t.device_type) != "cpu" or not t.contiguous:
        seen = "got a tensor that is on a device, or not contiguous"
        _refuse(name, f"{seen}; expected memory of the host; copy it there first")
    described = f"{obj.dtype}".removeprefix("torch.") if hasattr(obj, "dtype") else _dtype_name(t)
    nbytes = (t.size * t.bits * t.lanes + 7) // 8
    return f"{described} {t.shape}", _dlpack.view(t.pointer, nbytes, np.dtype(np.uint8), True, t)


_VIEWS = tuple(np.dtype(d.view) for d in sorted(DTYPES.values(), key=lambda d: d.code))


def _current_stream(obj: Any) -> int | None:
    """Return the stream on which users of a CUDA tensor expect work to happen: its library's current one, or CuPy's."""
    try:
        kind, index = obj.__dlpack_device__()
        if _DEVICES.get(kind) != "cuda":
            return None
    except Exception:  # exporting will say what is wrong
        return None
    torch, cupy = sys.modules.get("torch"), sys.modules.get("cupy")
    if torch is not None and isinstance(obj, torch.Tensor):
        return torch.cuda.current_stream(index).cuda_stream or 1
    if cupy is not None:
        with suppress(cupy.cuda.runtime.CUDARuntimeError), cupy.cuda.Device(index):  # no driver: said later
            return cupy.cuda.get_current_stream().ptr or 1
    return 1


def _is_jax(obj: object) -> bool:
    # JAX exports unversioned capsules, which cannot say that its arrays are immutable.
    return type(obj).__module__.startswith(("jax.", "jaxlib."))


def _is_traced(obj: object) -> bool:
    jax = sys.modules.get("jax")
    return jax is not None and isinstance(obj, jax.core.Tracer)


def _kind(obj: object) -> str:
    c = type(obj)
    return c.__name__ if c.__module__ == "builtins" else f"{c.__module__}.{c.__qualname__}"


def _refuse(name: str, why: str) -> NoReturn:
    raise InvalidInputError(f"{name}: {why}")


def _refuse_dtype(name: str, seen: str) -> NoReturn:
    advice = "convert it first, for example x.astype('float32') or x.float()"
    _refuse(name, f"got elements of type {seen}; expected {_ANY_FLOAT}; {advice}")


def _own_memory(name: str) -> str:
    """Return how to come by memory that may be written, for an argument of that name."""
    if name == "residual":  # a copy of the gradient would count it twice
        return "begin with zeros of its own, np.zeros_like(x), and pass the same array in every step"
    if name == "out":
        return "pass an array of its own, np.empty_like(x)"
    return "pass a writable NumPy array, np.array(x)"
